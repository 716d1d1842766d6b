"""DraftCounts: the interface of objects that choose how many drafts each request gets in the next step. The choice is a
DraftPlan.

The interface does not depend on the kind of drafter. `choosers.py` makes the implementations that use measured costs
and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from outrider.core import RequestResult, ScheduledBatch
from outrider.core.drafted_request import DraftedRequest


class SharingPlan(NamedTuple):
    """A plan, made before the batch, for a step whose token rows the device distributes among drafts. The batch carries
    it as a `DraftSharing`."""

    total: int
    weights: dict[int, int]  # by request
    chances: list[int]
    fixed_drafts: list[int]  # drafts of each request in a step that also computes prompts, where the device shares none


class DraftPlan(NamedTuple):
    """The drafts of one step."""

    num_drafts: list[int]  # drafts to check, of each request that was asked about
    num_wanted: int  # most drafts to guess for the step after; 0 leaves the drafter out
    sharing: SharingPlan | None = None  # then num_drafts are the most, and the device shares token rows out


# A request's part of a step that has ended, and the number of drafts that was scheduled for it. A plain tuple, because
# hundreds are made every step.
SettledDrafts: TypeAlias = tuple[DraftedRequest, RequestResult, int]


class DraftCounts(ABC):
    """Plans how many drafts each request should have in the next step."""

    @abstractmethod
    def choose(self, requests: Sequence[DraftedRequest], is_exact: bool) -> DraftPlan:
        """Plan the drafts of the next step. `is_exact`: whether the number of drafts that wait on the device is known,
        because no step is in flight."""

    def beside_prompts(self, plan: DraftPlan) -> DraftPlan:
        """Change the plan that `choose` just returned, because the step also computes prompts. In these steps the
        device does not distribute token rows among drafts."""
        return plan if plan.sharing is None else DraftPlan(plan.sharing.fixed_drafts, plan.num_wanted)

    def begin(self, requests: Sequence[DraftedRequest]) -> int:
        """Note the requests that start in the step that `choose` has just planned. Returns how many drafts the step
        must propose at least, so that the drafter processes their prompts."""
        return 0

    def observe(self, settled: Sequence[SettledDrafts], *, is_shared: bool = False) -> None:
        """Learn from a step that yielded tokens for these requests. is_shared: whether the device distributed the token
        rows among drafts."""

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """Learn from the time of a step. seconds: from the end of the step before to the end of this step."""

    def forget(self, request: DraftedRequest) -> None:
        """Forget a request that has ended."""


class FixedDrafts(DraftCounts):
    """Gives every request the same number of drafts, or fewer if the request allows only fewer."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def choose(self, requests: Sequence[DraftedRequest], is_exact: bool) -> DraftPlan:
        return DraftPlan([clamp_drafts(request, self.num_drafts, is_exact) for request in requests], self.num_drafts)


def clamp_drafts(request: DraftedRequest, k: int, is_exact: bool) -> int:
    """Reduce k to the number of drafts that a request can have: at most as many as its caller allows and, if the host
    knows how many drafts wait on the device (`is_exact`), at most that many."""
    most = request.max_drafts
    if most is not None and most < k:
        k = most
    return min(k, request.num_proposed) if is_exact else k
