"""StepDraftsWithHost: the drafts of a scheduler's steps if a drafter on the host makes some or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core import DraftOrders, ScheduledBatch, StepResult
from outrider.core.drafted_request import DraftedRequest
from outrider.core.speculation import DraftedBatch, RequestUpdate
from outrider.speculation.draft_counts import DraftCounts
from outrider.speculation.host_drafts import HostDrafts
from outrider.speculation.step_drafts import StepDrafts


class StepDraftsWithHost(StepDrafts):
    """Speculation with a drafter on the host. Drafters on the device, if there are any, make drafts too."""

    def __init__(self, counts: DraftCounts, host_drafts: HostDrafts) -> None:
        super().__init__(counts)
        self._host_drafts = host_drafts

    @property
    def makes_drafts(self) -> bool:
        return True

    def plan(self, requests: Sequence[DraftedRequest], *, is_exact: bool, has_prompts: bool) -> Sequence[int]:
        """Plan the drafts of a step. The host's drafts are made here; those for which the batch has no room are dropped
        later."""
        counts = super().plan(requests, is_exact=False, has_prompts=has_prompts)
        return self._host_drafts.propose(requests, counts)

    def take_orders(self, batch: DraftedBatch, started: Sequence[DraftedRequest]) -> DraftOrders:
        orders = super().take_orders(batch, started)
        drafted = {request.row for request, num_drafts in zip(batch.requests, batch.num_drafts, strict=True)
                   if num_drafts}
        return replace(orders, from_host=self._host_drafts.take(drafted))

    def observe(self, batch: ScheduledBatch, result: StepResult, updates: Sequence[RequestUpdate],
                seconds: float | None) -> None:
        from_host = {draft.row for draft in batch.drafting.from_host}
        for request, part in updates:
            if request.row in from_host:  # they took the place of the device's drafts
                request.checked_levels = 0
            else:
                self._host_drafts.observe_device(request, part)
        super().observe(batch, result, updates, seconds)

    def end(self, request: DraftedRequest) -> None:
        super().end(request)
        self._host_drafts.finish(request)

    def _stop(self) -> None:
        """Do nothing: the host goes on drafting without the device."""
