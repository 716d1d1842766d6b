"""Commands that load and drop adapters of a worker, in order with its steps. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.runner.commands import Command


@dataclass(frozen=True)
class BeginAdapter(Command[None]):
    """Begin to read an adapter. Steps go on meanwhile; `PollAdapter` tells when it is there."""

    number: int
    name: str
    folder: str

    def carry_out(self, worker: Any) -> None:
        worker.device_step.adapters.begin(self.number, self.name, self.folder)


@dataclass(frozen=True)
class PollAdapter(Command["int | None"]):
    """The size of an adapter that has been read, or None while it is read. Raises what was wrong with it."""

    number: int

    def carry_out(self, worker: Any) -> int | None:
        size: int | None = worker.device_step.adapters.poll(self.number)
        return size

    def combine(self, answers: Sequence[int | None]) -> int | None:
        """Ranks hold different parts: the largest must fit, and all must be there."""
        sizes = [answer for answer in answers if answer is not None]
        return max(sizes) if len(sizes) == len(answers) else None


@dataclass(frozen=True)
class DropAdapter(Command[None]):
    """Forget an adapter that no request has any more."""

    number: int

    def carry_out(self, worker: Any) -> None:
        worker.device_step.adapters.drop(self.number)
