"""How many drafts each request gets in the next step: costs and acceptance in, a DraftPlan out.

A draft pays if the tokens it is expected to add are worth the time it adds to the step. Costs are measured at start-up;
acceptance is learned as steps go by. Knows no drafter by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import zip_longest
from typing import NamedTuple

from outrider.core import RequestResult
from outrider.core.costs import StepCosts
from outrider.sched.acceptance import Acceptance
from outrider.sched.request import Request

PROBE_ALL_AFTER = 64  # steps without drafts until all requests try one, where one alone would cost as much as all
PROBE_DEPTH_AFTER = 128  # steps until all requests try one draft more than has paid
MIN_GAIN = 1.03  # less than this is within the noise of the costs


class DraftPlan(NamedTuple):
    """The drafts of one step."""

    num_drafts: list[int]  # drafts to check, of each request that was asked about
    num_wanted: int  # most drafts to guess for the step after; 0 leaves the drafter out


class DraftCounts(ABC):
    """Plans how many drafts each request should have in the next step."""

    @abstractmethod
    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        """`is_exact`: nothing is in flight, so the drafts that wait on the device are known."""

    def observe(self, request: Request, result: RequestResult, num_scheduled: int) -> None:  # noqa: B027
        """A step of the request has ended, for which so many drafts were scheduled."""

    def forget(self, request: Request) -> None:  # noqa: B027
        """The request has ended."""


class FixedDrafts(DraftCounts):
    """k drafts for everyone who allows it."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        return DraftPlan([clamp_drafts(request, self.num_drafts, is_exact) for request in requests], self.num_drafts)


def clamp_drafts(request: Request, k: int, is_exact: bool) -> int:
    """The number of drafts, at most k: no more than the request allows and, where the host knows how many wait on the
    device, no more than those."""
    most = request.max_drafts
    if most is not None and most < k:
        k = most
    return min(k, request.num_proposed) if is_exact else k


def auto_drafts(k: int, costs: StepCosts, *, always_propose: bool) -> UniformDrafts | IndividualDrafts:
    """The counts with the most expected tokens per second, none included. `always_propose`: a proposal costs nothing
    worth saving, as long as steps are not captured; a captured step is so fast that a lookup is 2% of it."""
    if costs.is_padded:
        return UniformDrafts(k, costs)
    return IndividualDrafts(k, costs, always_propose=always_propose)


class _LearningDrafts(DraftCounts):
    """Learns acceptance from results."""

    def __init__(self, k: int, costs: StepCosts) -> None:
        self._k = k
        self._costs = costs
        self.acceptance = Acceptance(k)

    def observe(self, request: Request, result: RequestResult, num_scheduled: int) -> None:
        """Learn how many of the scheduled drafts a step has accepted. A draft that was scheduled but did not exist (a
        lookup found nothing) counts as rejected, because it has cost as much."""
        if num_scheduled:
            self.acceptance.observe(request.id, num_scheduled, result.num_accepted)

    def forget(self, request: Request) -> None:
        self.acceptance.forget(request.id)

    def _gains(self, request: Request, is_exact: bool) -> list[float]:
        gains = self.acceptance.gains(request.id)
        if request.max_drafts is None and not is_exact:
            return gains
        return gains[: clamp_drafts(request, self._k, is_exact)]


class UniformDraftDepth:
    """One number of drafts for all requests, step after step: what pays, no more than was proposed in the step before,
    and now and then one draft more, to see whether it pays by now."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.proposed = 0  # drafts that the last step proposed
        self._tried = 0  # drafts that the last step proposed for a try
        self._since = 0  # steps since the last try

    def next(self, best: int) -> int:
        """Drafts for the coming step, when `best` would pay."""
        now = max(min(best, self.proposed), self._tried)
        interval = PROBE_DEPTH_AFTER if best else PROBE_ALL_AFTER
        self._since += 1
        self._tried = 0
        if self._since >= interval and best < self._k:
            self._since, self._tried = 0, best + 1
        self.proposed = max(best, self._tried)
        return now


class UniformDrafts(_LearningDrafts):
    """Equal counts for all. Where a step is padded to equal counts, a draft of one request costs what a draft of each
    of them costs. The drafter rests while no request drafts."""

    def __init__(self, k: int, costs: StepCosts) -> None:
        super().__init__(k, costs)
        self._depth = UniformDraftDepth(k)

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        now = self._depth.next(self._best_depth(requests))
        wanted = [clamp_drafts(request, now, is_exact) if request.yields_tokens else 0 for request in requests]
        return DraftPlan(wanted, self._depth.proposed)

    def _best_depth(self, requests: list[Request]) -> int:
        """Those that still compute their prompts count too: they will run soon, and the drafter must see them."""
        count = len(requests)
        if not count:
            return 0
        gains = [self._gains(request, is_exact=False) for request in requests]
        expected = list(map(sum, zip_longest(*gains, fillvalue=0.0)))  # accepted at each place, over all requests
        reading = self._costs.read([request.bound.at_most for request in requests])
        sampling = self._costs.sample([request.sampler_load for request in requests])  # one logit row each
        tokens = float(count)
        best, best_rate = 0, tokens / (self._costs.step(count, count) + reading + sampling) * MIN_GAIN
        for depth, gain in enumerate(expected, start=1):
            tokens += gain
            seconds = self._costs.step(count * (1 + depth), count) + reading + self._costs.draft(depth, count)
            seconds += sampling * (1 + depth)
            if tokens / seconds > best_rate:
                best, best_rate = depth, tokens / seconds
        return best


class IndividualDrafts(_LearningDrafts):
    """A count of its own for each request."""

    def __init__(self, k: int, costs: StepCosts, *, always_propose: bool) -> None:
        super().__init__(k, costs)
        self._always_propose = always_propose
        self._since_drafts = 0  # steps in which drafting did not pay

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        wanted = [0] * len(requests)
        running = [index for index, request in enumerate(requests) if request.yields_tokens]
        if not running:  # a drafter must see the prompts if it is to guess what follows them
            candidates = self._candidates(requests, range(len(requests)), is_exact=False)
            return DraftPlan(wanted, self._proposal(self._best_count(len(requests), candidates)))
        candidates = self._candidates(requests, running, is_exact)
        best = self._best_count(len(running), candidates)
        for _, index in candidates[:best]:
            wanted[index] += 1
        if self._always_propose:
            for index in dict.fromkeys(index for _, index in candidates[best:]):
                if not wanted[index]:
                    wanted[index] = int(self.acceptance.is_probe_due(requests[index].id))
        elif best == 0 and self._since_drafts and self._since_drafts % PROBE_ALL_AFTER == 0:
            # The drafter rests while no request drafts, so all try together.
            for _, index in candidates:
                wanted[index] = 1
        return DraftPlan(wanted, self._proposal(best))

    def _candidates(self, requests: list[Request], indices: range | list[int],
                    is_exact: bool) -> list[tuple[float, int]]:
        """(chance of being reached and accepted, index of the request) of every draft there may be, likeliest first."""
        found = [(gain, index) for index in indices for gain in self._gains(requests[index], is_exact)]
        found.sort(key=lambda pair: -pair[0])
        return found

    def _best_count(self, running: int, candidates: list[tuple[float, int]]) -> int:
        """Drafts over all requests, taken by falling chance: where expected tokens per second are most."""
        plain = running / self._costs.step(max(running, 1), max(running, 1))
        best, best_rate, expected = 0, plain * MIN_GAIN, float(running)
        deepest: dict[int, int] = {}
        most = 0
        for count, (gain, index) in enumerate(candidates, start=1):
            expected += gain
            deepest[index] = deepest.get(index, 0) + 1
            most = max(most, deepest[index])
            rate = expected / (self._costs.step(running + count, running) + self._costs.draft(most, running))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _proposal(self, best: int) -> int:
        """Cold when drafting does not pay, but for the step before everyone tries again."""
        self._since_drafts = 0 if best else self._since_drafts + 1
        is_before_probe = self._since_drafts % PROBE_ALL_AFTER == 0
        return self._k if self._always_propose or best or is_before_probe else 0
