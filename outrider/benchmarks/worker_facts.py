"""Commands that ask a worker for facts about its model, which benchmarks compare their figures with. Each rank reports
its own part.

Ranks compute at the same time, so the work of the busiest device counts: that of one rank if it has a GPU for itself,
or that of all ranks which share one memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from outrider.benchmarks.prompt_work import PromptWork
from outrider.benchmarks.roofline import Decoding, Traffic
from outrider.layers import ExpertTally, Router, find_modules
from outrider.runner.commands import Command


@dataclass(frozen=True)
class DecodingBytes(Command[float]):
    """Ask for the bytes that decode steps must move in one device's memory."""

    work: Decoding

    def carry_out(self, worker: Any) -> float:
        step = worker.device_step
        return Traffic(step.model, step.drafter, step.pool.layout).total(self.work) * int(step.ranks.num_sharing)

    def combine(self, answers: Sequence[float]) -> float:
        return max(answers)


@dataclass(frozen=True)
class PromptOperations(Command[float]):
    """Ask for the number of operations that prompts of these lengths take on one device."""

    lengths: tuple[int, ...]

    def carry_out(self, worker: Any) -> float:
        step = worker.device_step
        return PromptWork(step.model).total(self.lengths) * int(step.ranks.num_sharing)

    def combine(self, answers: Sequence[float]) -> float:
        return max(answers)


@dataclass(frozen=True)
class CountExperts(Command[bool]):
    """Begin to count the different experts that decode steps use. Steps then run eagerly, because captured steps have
    no observer. Answers whether the model has experts; if not, nothing has changed. `ReadExperts` ends the counting."""

    max_rows: int  # token rows of a step

    def carry_out(self, worker: Any) -> bool:
        model = worker.device_step.model
        routers = find_modules([model], Router)
        if not routers:
            return False
        tally = ExpertTally(routers, self.max_rows, device=model.device)
        for router in routers:
            router.observer = tally
        stack = ExitStack()
        stack.enter_context(worker.uncaptured())
        worker.expert_count = stack, routers, tally
        return True


@dataclass(frozen=True)
class ReadExperts(Command[float]):
    """Ask for the mean number of different experts of a layer that a decode step has used since `CountExperts`. It is
    the same on every rank."""

    def carry_out(self, worker: Any) -> float:
        stack, routers, tally = worker.expert_count
        del worker.expert_count
        for router in routers:
            router.observer = None
        stack.close()
        mean: float = tally.mean()
        return mean
