"""Pages are shared up to a request's bound, drafts that may be rejected included."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.sched.batch import BatchBuilder
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler

NAME = "promises of drafts"
TESTS = ["tests/unit/test_scheduler_random.py", "-k", "share or accepted"]


def apply() -> None:
    finish = Scheduler._finish_batch

    def promise_all(self: Scheduler, batch: BatchBuilder, started: Sequence[Request]) -> object:
        for entry in batch._entries:
            own: Request = entry.request
            tokens = [*own.token_ids, *[0] * own.bound.at_most]  # as if the drafts were known to be these
            self.cache.promise(batch.step, own.id, tokens, own.bound.at_most)
        return finish(self, batch, started)

    Scheduler._finish_batch = promise_all  # type: ignore[method-assign, assignment]
