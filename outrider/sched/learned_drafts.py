"""LearnedDrafts: what the choosers of draft counts have in common, the acceptance that they learn as steps go by.

A draft pays if the tokens it is expected to add are worth the time it adds to the step. Costs are measured at start-up.
"""

from __future__ import annotations

from outrider.core import RequestResult
from outrider.core.costs import StepCosts
from outrider.sched.acceptance import Acceptance
from outrider.sched.draft_chances import DraftChances
from outrider.sched.drafts import DraftCounts, clamp_drafts
from outrider.sched.request import Request

MIN_GAIN = 1.03  # less than this is within the noise of the costs


class LearnedDrafts(DraftCounts):
    """Learns acceptance from results."""

    def __init__(self, k: int, costs: StepCosts) -> None:
        self._k = k
        self._costs = costs
        self.acceptance = Acceptance(k)
        self.chances = DraftChances(k)

    def observe(self, request: Request, result: RequestResult, num_scheduled: int, *, is_shared: bool = False) -> None:
        """Learn how many of the scheduled drafts a step has accepted. A draft that was scheduled but did not exist (a
        lookup found nothing) counts as rejected, because it has cost as much."""
        if request.checked_levels and num_scheduled:
            self._learn_chances(request, result)
        elif num_scheduled:
            self.acceptance.observe(request.id, num_scheduled, result.num_accepted)
        if request.levels and not result.finish:
            self.acceptance.expect(request.id, self._waiting_gains(request))

    def _learn_chances(self, request: Request, result: RequestResult) -> None:
        if not result.finish:  # the end may have cut off accepted drafts
            self.chances.observe(request.id, request.checked_levels, result.num_drafted, result.num_accepted)

    def forget(self, request: Request) -> None:
        self.acceptance.forget(request.id)
        self.chances.forget(request.id)

    def _waiting_gains(self, request: Request) -> list[float]:
        """The chance that each draft which waits on the device is reached and accepted, by how sure its drafter is."""
        return self.chances.gains(request.id, request.levels, clamp_drafts(request, self._k, is_exact=True))

    def _gains(self, request: Request, is_exact: bool) -> list[float]:
        gains = self.acceptance.gains(request.id)
        if request.max_drafts is None and not is_exact:
            return gains
        return gains[: clamp_drafts(request, self._k, is_exact)]
