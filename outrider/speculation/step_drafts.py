"""StepDrafts: plans the drafts of a scheduler's steps, makes the orders for the device, and passes on the results."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import DraftOrders, Finish, RowEnd, ScheduledBatch, StepResult
from outrider.core.draft_confidence import DraftSharing
from outrider.core.drafted_request import DraftedRequest
from outrider.core.speculation import DraftedBatch, RequestUpdate, Speculation
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, FixedDrafts


class StepDrafts(Speculation):
    """Speculation with drafters on the device. `counts` chooses how many drafts each request gets."""

    def __init__(self, counts: DraftCounts) -> None:
        self.counts = counts
        self._plan = DraftPlan([], 0)
        self._ends: list[RowEnd] = []  # rows that requests have left since the last orders

    @property
    def makes_drafts(self) -> bool:
        return not (isinstance(self.counts, FixedDrafts) and self.counts.num_drafts == 0)

    def plan(self, requests: Sequence[DraftedRequest], *, is_exact: bool, has_prompts: bool) -> Sequence[int]:
        plan = self.counts.choose(requests, is_exact)
        self._plan = self.counts.beside_prompts(plan) if has_prompts else plan
        return self._plan.num_drafts

    def take_orders(self, batch: DraftedBatch, started: Sequence[DraftedRequest]) -> DraftOrders:
        num_wanted = self._plan.num_wanted
        if started:
            num_wanted = max(num_wanted, self.counts.begin(started))
        ends, self._ends = self._ends, []
        return DraftOrders(num_wanted, sharing=self._sharing_of(batch), ends=ends)

    def observe(self, batch: ScheduledBatch, result: StepResult, updates: Sequence[RequestUpdate],
                seconds: float | None) -> None:
        if seconds is not None:
            self.counts.observe_step(batch, seconds)
        if result.drafting is not None and result.drafting.is_over:
            self._stop()
        is_shared = batch.drafting.sharing is not None
        num_drafts = dict(zip(batch.request_ids, batch.num_drafts, strict=True))
        # Drafts that the request's end cut off were not tried.
        self.counts.observe([(request, part, part.num_drafted if part.finish or is_shared else num_drafts[request.id])
                             for request, part in updates if part.run], is_shared=is_shared)

    def leave_row(self, request: DraftedRequest) -> None:
        # A preempted request may still be aborted, and nothing of it must be learned then.
        is_served = request.finish not in (Finish.NO, Finish.ABORT, Finish.ERROR)
        self._ends.append(RowEnd(request.row, request.settled.at_least if is_served else 0))

    def end(self, request: DraftedRequest) -> None:
        self.counts.forget(request)

    def _stop(self) -> None:
        """Called when all drafters on the device are switched off."""
        self.counts = FixedDrafts(0)

    def _sharing_of(self, batch: DraftedBatch) -> DraftSharing | None:
        """Return the order by which the device distributes token rows among drafts, with weights in the order of the
        batch. None for a batch with prompts, which checks the most drafts of each request instead."""
        sharing = self._plan.sharing
        if sharing is None or not batch.only_decodes:
            return None
        return DraftSharing(sharing.total, [sharing.weights[request.id] for request in batch.requests], sharing.chances)
