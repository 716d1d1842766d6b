"""Commands by which the engine makes a worker load or drop adapters, in order with its steps. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.runner.commands import Command


@dataclass(frozen=True)
class AdapterRead:
    """The result of reading an adapter. An error is part of the result: ranks read at different speeds, and a command
    that raises on only some ranks would end all ranks."""

    size: int = 0  # numbers that it takes on the device
    error: str | None = None  # what is wrong with the adapter
    digest: str = ""  # of its files


@dataclass(frozen=True)
class BeginAdapter(Command[None]):
    """Command that starts reading an adapter while steps go on. `PollAdapter` asks whether it has been read."""

    number: int
    name: str
    folder: str

    def carry_out(self, worker: Any) -> None:
        worker.device_step.deltas.read(self.number, self.name, self.folder)


@dataclass(frozen=True)
class PollAdapter(Command["AdapterRead | None"]):
    """Command that asks how the reading of an adapter ended. The answer is None while the adapter is being read. It
    stays the same until `DropAdapter`."""

    number: int

    def carry_out(self, worker: Any) -> AdapterRead | None:
        read: AdapterRead | None = worker.device_step.deltas.poll(self.number)
        return read

    def combine(self, answers: Sequence[AdapterRead | None]) -> AdapterRead | None:
        """Join the answers of all ranks into one. Ranks hold different parts of an adapter, so the size is the largest
        of theirs. The answer is None until all ranks have read their parts."""
        ended = [answer for answer in answers if answer is not None]
        if len(ended) < len(answers):
            return None
        errors = {rank: read.error for rank, read in enumerate(ended) if read.error is not None}
        if not errors:
            return max(ended, key=lambda read: read.size)
        rank, error = next(iter(errors.items()))
        return AdapterRead(error=error if len(errors) == len(ended) else f"rank {rank}: {error}")


@dataclass(frozen=True)
class DropAdapter(Command[None]):
    """Command that drops an adapter that no request uses any more."""

    number: int

    def carry_out(self, worker: Any) -> None:
        worker.device_step.deltas.drop(self.number)
