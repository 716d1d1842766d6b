"""A batch's lengths are bounded by the longest request there may be, not by its own (failure F2)."""

from __future__ import annotations

from dataclasses import replace

from outrider.core import ScheduledBatch
from outrider.sched.scheduler import Scheduler

NAME = "bound is max_len"
TESTS = ["tests/unit/test_scheduler.py"]


def apply() -> None:
    schedule = Scheduler.schedule

    def unbounded(self: Scheduler) -> ScheduledBatch | None:
        batch = schedule(self)
        return batch and replace(batch, bounds=[self.limits.max_len] * batch.num_requests)

    Scheduler.schedule = unbounded  # type: ignore[method-assign]
