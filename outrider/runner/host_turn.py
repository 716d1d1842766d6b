"""HostTurn: a feature's part of split steps, in which the host acts between the forward pass and the sampler.

A step is split if it samples for a request whose part says `masks_tokens`. The turn is taken when the forward pass is
queued, so the host works while the device does. A step before may still run: what the turn reads of rows, it has asked
for in `prepare`, and it waits for that copy alone.
"""

from __future__ import annotations

from abc import abstractmethod

from outrider.core import ScheduledBatch, StepForm, StepPart, StepResult
from outrider.runner.clock import NoClock


class HostTurn(StepPart):
    name = "host"  # of its time, in the times of a traced step

    @abstractmethod
    def turn(self, batch: ScheduledBatch, *, runs_ahead: bool) -> None:
        """Write what the sampler shall read, such as masks (`RowMasks`). runs_ahead: the next step is queued before the
        result of this one is read, so drafts of the next step must be guessed now."""

    def settle(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Called with the result of a split step before the next step is queued, if steps do not run ahead. The part
        may read rows and store drafts in them. Returns the result with counts of drafts that are right again."""
        return result

    def explain(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Called with the result of every split step: the result, with errors of requests that the part can explain.
        The device knows only that no token was allowed. Must read nothing of the device."""
        return result


class HostTurns:
    """All parts that have a turn in the steps of a device, in the order in which they take it."""

    def __init__(self, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead  # set by the runner of the steps
        self._all: tuple[HostTurn, ...] = ()

    def add(self, part: HostTurn) -> None:
        self._all = (*self._all, part)

    def take(self, batch: ScheduledBatch, clock: NoClock) -> None:
        for part in self._all:
            part.turn(batch, runs_ahead=self.runs_ahead)
            clock.lap(part.name)

    def amend(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """The result of a step as the parts leave it."""
        if batch.mode.form is not StepForm.SPLIT:
            return result
        for part in self._all:
            if not self.runs_ahead:
                result = part.settle(batch, result)
            result = part.explain(batch, result)
        return result
