"""Commands with which tests look into the ranks of a worker, and make one of them fail."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.runner.commands import Command


@dataclass(frozen=True)
class RowDigests(Command[list[str]]):
    """A digest of the rows of every rank: tokens, lengths, drafts and tables of pages."""

    def carry_out(self, worker: Any) -> list[str]:
        import torch

        digest = hashlib.sha256()
        for name, value in sorted(vars(worker.device_step.state).items()):
            if isinstance(value, torch.Tensor):
                digest.update(name.encode() + value.cpu().numpy().tobytes())
        return [digest.hexdigest()]

    def combine(self, answers: Sequence[list[str]]) -> list[str]:
        return [own for one in answers for own in one]


@dataclass(frozen=True)
class BreakStep(Command[None]):
    """Let the step after `countdown` others fail in some ranks: raise, die, stop or hang."""

    how: str
    ranks: tuple[int, ...]
    countdown: int = 0

    def carry_out(self, worker: Any) -> None:
        step = worker.device_step
        if step.ranks.rank not in self.ranks:
            return
        left, forward = [self.countdown], step.forward

        def broken(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                return forward(*args, **kwargs)
            step.forward = forward
            if self.how == "raise":
                raise ValueError("a fault of this test")
            if self.how == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[self.how])
            time.sleep(1000)

        step.forward = broken


@dataclass(frozen=True)
class FormNumbers(Command[list[list[int]]]):
    """The numbers of the forms that every rank keeps. From then on, a rank that compiles one fails."""

    allows_more: bool

    def carry_out(self, worker: Any) -> list[list[int]]:
        forms = worker.feature("grammars").forms
        vars(forms).pop("_compile_in_time", None)
        if not self.allows_more:
            forms._compile_in_time = None
        return [sorted(forms._compiled)]

    def combine(self, answers: Sequence[list[list[int]]]) -> list[list[int]]:
        return [own for one in answers for own in one]


@dataclass(frozen=True)
class Refuse(Command[int]):
    """Fails on some ranks; the others answer their rank."""

    ranks: tuple[int, ...]

    def carry_out(self, worker: Any) -> int:
        rank: int = worker.device_step.ranks.rank
        if rank in self.ranks:
            raise ValueError(f"refused by rank {rank}")
        return rank

    def combine(self, answers: Sequence[int]) -> int:
        return sum(answers)
