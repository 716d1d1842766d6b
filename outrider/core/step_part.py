"""StepPart: the work that a feature does for batch rows in each step of a worker. Each step calls every part, in order.
No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.step_messages import Admission, ScheduledBatch, StepResult


class StepPart:
    """Base class of a feature's work in a step. Methods do nothing by default. The first three methods are called
    before each step, in this order; their work on the device runs after that of earlier steps."""

    def begin(self, batch: ScheduledBatch) -> None:
        """Called first, while the rows still belong to the requests of earlier steps."""

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Called when these requests have taken their rows. The rows have tokens and parameters, but no page tables
        yet."""

    def prepare(self, batch: ScheduledBatch) -> None:
        """Called when all rows are complete, before the forward pass."""

    def amend_result(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        """Add the part's report to a result, if the batch asks for one. Must not read the device."""
        return result

    def reset(self) -> None:
        """Forget all rows, because a step has failed and the content of the device is unknown."""

    def close(self) -> None:
        """Free the resources of the part. Called when the worker ends."""
