"""HostTurn: a feature's part of split steps, in which the host acts between the forward pass and the sampler.

A step is split if it samples for a request whose part says `masks_tokens`. The host acts after the forward pass is
queued, so host and device work at the same time. An earlier step may still run. A part that needs the content of rows
therefore orders a copy in `prepare`, and its turn waits for this copy alone."""

from __future__ import annotations

from abc import abstractmethod

from outrider.core import ScheduledBatch, StepForm, StepPart, StepResult
from outrider.runner.clock import NoClock


class HostTurn(StepPart):
    name = "host"  # of its time, in the times of a traced step

    @abstractmethod
    def turn(self, batch: ScheduledBatch, *, runs_ahead: bool) -> None:
        """Write the sampler's inputs for this step, such as token masks (`RowMasks`, which combines the masks of
        several parts). runs_ahead: the next step is queued before the result of this one is read, so the part must
        guess drafts for the next step now."""

    def settle(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Correct the result of a split step, before the next step is queued. Called only if steps do not run ahead.
        The part may read rows and store drafts in them; the returned result has the new numbers of drafts."""
        return result

    def explain(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Return the result with better errors for failed requests, if the part knows the reason. The device can only
        report that no token was allowed. Called with the result of every split step. Must not read the device."""
        return result


class HostTurns:
    """All features that act between the halves of split steps, in the order in which they are called."""

    def __init__(self, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead  # set by the runner of the steps
        self._all: tuple[HostTurn, ...] = ()
        self.reporters: tuple[StepPart, ...] = ()

    def add(self, part: HostTurn) -> None:
        self._all = (*self._all, part)

    def take(self, batch: ScheduledBatch, clock: NoClock) -> None:
        for part in self._all:
            part.turn(batch, runs_ahead=self.runs_ahead)
            clock.lap(part.name)

    def amend(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Let the parts correct the result of a step, explain its errors, and report."""
        for reporter in self.reporters:
            result = reporter.amend_result(batch, result)
        if batch.mode.form is not StepForm.SPLIT:
            return result
        for part in self._all:
            if not self.runs_ahead:
                result = part.settle(batch, result)
            result = part.explain(batch, result)
        return result
