"""A request that leaves its row before its admission was sent leaves it to the batch of the next request in the row."""

from __future__ import annotations

from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler

NAME = "admission outlives its row"
TESTS = ["tests/unit/test_scheduler.py"]


def apply() -> None:
    release = Scheduler._release

    def release_row_alone(self: Scheduler, request: Request) -> None:
        admissions = self._admissions
        release(self, request)
        self._admissions = admissions

    Scheduler._release = release_row_alone  # type: ignore[method-assign]
