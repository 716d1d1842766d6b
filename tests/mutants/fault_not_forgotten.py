"""After a failed step pages are published that only that step, or one after it, was to write."""

from __future__ import annotations

from outrider.core import Settled
from outrider.sched.scheduler import Scheduler

NAME = "failed steps are not forgotten"
TESTS = [
    "tests/engine/test_faults.py::test_every_request_but_the_culprit_gives_the_references_tokens[llama-2]",
]


def apply() -> None:
    recover = Scheduler.recover

    def recover_publishing(self: Scheduler, error: str, *, lacked_memory: bool = False) -> None:
        for request in self._running:
            reached = min(request.bound.at_most, len(request.token_ids))
            self.cache.settle(request.id, Settled(reached), request.token_ids)
        recover(self, error, lacked_memory=lacked_memory)

    Scheduler.recover = recover_publishing  # type: ignore[method-assign]
