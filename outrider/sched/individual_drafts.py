"""IndividualDrafts: counts of drafts for steps that are not captured, a count of its own for each request."""

from __future__ import annotations

from itertools import accumulate

from outrider.core.costs import StepCosts
from outrider.sched.acceptance import Acceptance
from outrider.sched.draft_tries import HARDLY, HOPELESS, NewRequestTries, ProposedDepth
from outrider.sched.drafts import DraftPlan, clamp_drafts
from outrider.sched.learned_drafts import MIN_GAIN, LearnedDrafts
from outrider.sched.request import Request

# Observations that the rate of the first request is worth, where the drafter rests while no request drafts: a few
# unlucky drafts must not send it to rest.
FIRST_WEIGHT = 32.0


class IndividualDrafts(LearnedDrafts):
    """A count of its own for each request. Where proposals cost time, the drafter guesses no more than will be checked,
    and rests while no request drafts. A drafter that has rested has not seen what was written meanwhile, so that a try
    in the middle of a request says nothing: new requests try drafts from their prompts on."""

    def __init__(self, k: int, costs: StepCosts, *, always_propose: bool) -> None:
        super().__init__(k, costs)
        if not always_propose:
            self.acceptance = Acceptance(k, FIRST_WEIGHT)
        self._always_propose = always_propose
        self._depth = ProposedDepth(k, tries_from_rest=False)
        self._tries = NewRequestTries()

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._tries.forget(request.id)

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        running = [index for index, request in enumerate(requests) if request.yields_tokens]
        if self._always_propose:
            return DraftPlan(self._counts_of_guesses(requests, running, is_exact), self._k)
        counts = self._counts(requests, running, is_exact=False)
        # The drafter must see prompts that are being computed if it is to guess what follows them.
        reading = [i for i, request in enumerate(requests) if not request.yields_tokens]
        ahead = self._counts(requests, reading, False)
        for own, indexes in ((counts, running), (ahead, reading)):
            for index in self._trying(requests, indexes):
                own[index] = max(1, own[index])
        most, best = max(counts, default=0), max([*counts, *ahead], default=0)
        depth = self._depth.next(best)
        wanted = [0] * len(requests)
        if is_exact and depth <= best and any(requests[index].levels for index in running):
            return DraftPlan(self._likely_counts(requests, running), self._depth.proposed)
        for index in running:  # for a try, requests that have the most get one more
            count = counts[index] + 1 if depth > best and counts[index] == most else counts[index]
            wanted[index] = clamp_drafts(requests[index], min(count, depth), is_exact)
        return DraftPlan(wanted, self._depth.proposed)

    def _trying(self, requests: list[Request], indexes: list[int]) -> list[int]:
        """Those of the requests that try a draft in this step."""
        needed = self._needed_acceptance(max(1, len(indexes)))
        for request in requests:
            self._tries.meet(request.id, is_likely=self._gains(request, False)[:1] > [HARDLY * needed])
        if needed > HOPELESS:
            return []
        return [index for index in indexes if self._gains(requests[index], False)
                and self._tries.take(requests[index].id, is_step=requests[index].yields_tokens)]

    def _needed_acceptance(self, count: int) -> float:
        """The share of drafts that must be accepted where so many requests have one each."""
        costs = self._costs
        return (costs.step(2 * count, count) + costs.draft(1, count)) / costs.step(count, count) - 1

    def _counts_of_guesses(self, requests: list[Request], running: list[int], is_exact: bool) -> list[int]:
        """Counts of drafts that cost nothing to guess: a request that has had none for a while tries one."""
        wanted = self._counts(requests, running, is_exact)
        for index in running:
            if not wanted[index] and self._gains(requests[index], is_exact):
                wanted[index] = int(self.acceptance.is_probe_due(requests[index].id))
        return wanted

    def _counts(self, requests: list[Request], running: list[int], is_exact: bool) -> list[int]:
        """Drafts of each request, none of those that are not running. Drafts are taken by falling chance of being
        reached and accepted, as many as give the most expected tokens per second."""
        counts = [0] * len(requests)
        if not running:
            return counts
        candidates = [(gain, index) for index in running for gain in self._gains(requests[index], is_exact)]
        candidates.sort(key=lambda pair: -pair[0])
        for _, index in candidates[: self._best_count(len(running), candidates)]:
            counts[index] += 1
        return counts

    def _likely_counts(self, requests: list[Request], running: list[int]) -> list[int]:
        """Counts of drafts that wait and whose drafter says how sure it is of each. A draft is checked if the tokens
        that it is expected to add take longer to get without it: at the rate of steps with drafts of the usual
        chances."""
        usual = sorted((gain for index in running for gain in self._gains(requests[index], False)), reverse=True)
        found = [(gain, index) for index in running
                 for gain in (self._waiting_gains(requests[index]) if requests[index].levels
                              else self._gains(requests[index], True))]
        found.sort(key=lambda pair: -pair[0])
        count, step = len(running), [self._costs.step(len(running) + n, len(running)) for n in range(1 + len(usual))]
        drafting = self._costs.draft(self._depth.proposed, count)
        rate = max(expected / (step[n] + (drafting if n else 0.0))
                   for n, expected in enumerate(accumulate(usual, initial=float(count))))
        values = [expected - rate * step[n]
                  for n, expected in enumerate(accumulate((gain for gain, _ in found), initial=0.0))]
        counts = [0] * len(requests)
        for _, index in found[: values.index(max(values))]:
            counts[index] += 1
        return counts

    def _best_count(self, running: int, candidates: list[tuple[float, int]]) -> int:
        """Drafts over all requests, taken by falling chance: where expected tokens per second are most."""
        plain = running / self._costs.step(running, running)
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
