"""BatchBuilder: the requests of one batch, as the scheduler adds them, and the ScheduledBatch they make.

Advances bounds as tokens are scheduled. Which requests and how many tokens is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.cache.checkpoints import Reach
from outrider.cache.manager import Granted
from outrider.core import Admission, CheckpointWrite, HostDraft, ScheduledBatch
from outrider.sched.request import Request


class BatchBuilder:
    """Collects the requests of one batch and advances their bounds."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.requests: list[Request] = []
        self._num_known: list[int] = []
        self._num_drafts: list[int] = []
        self._samples: list[bool] = []
        self._num_pending: list[int] = []
        self._before: list[int] = []  # bounds

    def add(self, request: Request, num_known: int, num_drafts: int, samples: bool, bound: int) -> None:
        self.requests.append(request)
        self._num_known.append(num_known)
        self._num_drafts.append(num_drafts)
        self._samples.append(samples)
        self._num_pending.append(request.num_pending)
        self._before.append(request.bound.at_most)
        request.num_pending = num_drafts
        request.bound.at_most = bound
        request.unsettled += num_known + num_drafts
        request.in_flight_samples += samples

    @property
    def reaches(self) -> dict[int, Reach]:
        """How far each request's recurrent states get. Tokens known at admission are never in doubt, and drafts are
        not stored in the step that checks them."""
        reaches: dict[int, Reach] = {}
        for request, known, before in zip(self.requests, self._num_known, self._before, strict=True):
            sure = min(request.known, before)  # computed when the step begins, whatever is in flight
            least = max(request.settled.at_least, sure) + known
            reaches[request.id] = Reach(request.folded, max(request.folded, sure), least, before + known)
        return reaches

    def build(self, admissions: Iterable[Admission], granted: Granted, host_drafts: list[HostDraft],
              checkpoints: list[CheckpointWrite], folds: list[CheckpointWrite], propose: int) -> ScheduledBatch:
        requests = self.requests
        return ScheduledBatch(
            step=self._step,
            request_ids=[r.id for r in requests],
            epochs=[r.epoch for r in requests],
            rows=[r.row for r in requests],
            num_known=self._num_known,
            num_drafts=self._num_drafts,
            samples=self._samples,
            bounds=[r.bound.at_most for r in requests],
            params=[r.params for r in requests],
            admissions=list(admissions),
            page_writes=granted.page_writes,
            clear_pages=granted.clear_pages,
            host_drafts=host_drafts,
            checkpoints=checkpoints,
            folds=folds,
            num_pending=self._num_pending,
            propose=propose,
        )
