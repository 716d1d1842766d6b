"""StepPart: what a feature keeps of the device's rows. The steps of a worker call every part, in order. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.step_messages import Admission, ScheduledBatch


class StepPart:
    """The base class of parts of a step. Methods do nothing by default. The first three methods are called before each
    step, in this order; their work on the device is done after earlier steps."""

    def begin(self, batch: ScheduledBatch) -> None:
        """The rows still belong to the requests of the steps before."""

    def admit(self, admissions: Sequence[Admission]) -> None:
        """These requests have taken their rows, which hold their tokens and parameters, but no page tables yet."""

    def prepare(self, batch: ScheduledBatch) -> None:
        """All rows are complete. Next is the forward pass."""

    def reset(self) -> None:
        """Forget all rows: a step has failed, so the content of the device is unknown."""

    def close(self) -> None:
        """Free what the part holds: the worker ends."""
