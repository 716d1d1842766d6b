"""Steps that were made smaller for lack of memory grow only when steps pass: what needs a larger one never runs."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import ScheduledBatch
from outrider.sched.batch import BatchBuilder
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler

NAME = "small steps stay small"
TESTS = ["tests/unit/test_step_size.py", "-k", "larger_one"]


def apply() -> None:
    finish = Scheduler._finish_batch

    def finish_as_large(self: Scheduler, batch: BatchBuilder, started: Sequence[Request]) -> ScheduledBatch | None:
        size, self._size.grow = self._size, lambda: None  # type: ignore[method-assign]
        try:
            return finish(self, batch, started)
        finally:
            del size.grow

    Scheduler._finish_batch = finish_as_large  # type: ignore[method-assign]
