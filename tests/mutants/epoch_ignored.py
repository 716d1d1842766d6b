"""A result counts for the request it names even if that was preempted, and begun again, while the step ran."""

from __future__ import annotations

from dataclasses import replace

from outrider.core import StepResult
from outrider.sched.scheduler import Scheduler
from outrider.sched.updates import Update

NAME = "epoch ignored"
TESTS = ["tests/unit/test_scheduler.py"]


def apply() -> None:
    update = Scheduler.update

    def update_any(self: Scheduler, result: StepResult, seconds: float | None = None) -> list[Update]:
        parts = [
            part._replace(epoch=self._requests[part.request_id].epoch) if part.request_id in self._requests else part
            for part in result.requests
        ]
        return update(self, replace(result, requests=parts), seconds)

    Scheduler.update = update_any  # type: ignore[method-assign]
