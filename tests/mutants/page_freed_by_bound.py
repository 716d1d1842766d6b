"""Pages leave a window by the bound: a step in flight that accepts less still reads them."""

from __future__ import annotations

from outrider.core import RequestResult
from outrider.sched.request import Request, State
from outrider.sched.scheduler import Scheduler

NAME = "page freed by bound"
TESTS = ["tests/unit/test_scheduler.py"]


def apply() -> None:
    settle = Scheduler._settle

    def settle_and_drop(self: Scheduler, request: Request, part: RequestResult) -> None:
        settle(self, request, part)
        if request.state is State.RUNNING:
            for group in self.cache.groups:
                self.cache._drop(self.cache._requests[request.id], group, request.bound.at_most)

    Scheduler._settle = settle_and_drop  # type: ignore[method-assign]
