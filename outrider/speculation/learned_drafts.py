"""LearnedDrafts: the base class of choosers of draft counts. It learns acceptance from every step, and decides when a
resting drafter tries drafts.

A draft pays if the tokens that it is expected to add are worth the time that it adds to the step. This time is measured
at start-up and corrected by the times of later steps. A drafter with a network rests (does not run) while no draft
pays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from outrider.core.costs import StepCosts
from outrider.core.drafted_request import DraftedRequest
from outrider.speculation.acceptance import Acceptance
from outrider.speculation.draft_chances import DraftChances
from outrider.speculation.draft_counts import DraftCounts, SettledDrafts, clamp_drafts
from outrider.speculation.drafter_tries import READ_STEPS, TRY_STEPS, DrafterSight, DrafterTries, ProposedDepth
from outrider.speculation.observed_times import ObservedTimes

MIN_GAIN = 1.03  # less than this is within the noise of the costs
LEAST_LEFT = 2 * (READ_STEPS + TRY_STEPS)  # tokens that a request has left if it tries drafts that were not read along


class LearnedDrafts(DraftCounts):
    """Base class: learns acceptance from results, while subclasses choose the counts."""

    def __init__(self, k: int, costs: StepCosts, acceptance: Acceptance, *, misses_rests: bool) -> None:
        """misses_rests: whether the drafter has a network. The network's state lacks the tokens of steps that propose
        no drafts."""
        self._k, self._costs, self._misses_rests = k, costs, misses_rests
        self.acceptance = acceptance
        self.chances = DraftChances(k)
        self._depth = ProposedDepth(k, tries_from_rest=not misses_rests)
        self._sight = DrafterSight(misses_rests=misses_rests)
        self._times = ObservedTimes()
        self._tries = DrafterTries(costs, self._times)
        self._requests: Sequence[DraftedRequest] = []  # those of the step that is planned

    def begin(self, requests: Sequence[DraftedRequest]) -> int:
        for request in requests:
            self._sight.begin(request.id)
        if not self._depth.proposed:
            all_requests = [*self._requests, *requests]
            self._depth.proposed = self._best_depth(all_requests) or int(self._try_new(requests, len(all_requests)))
        return self._depth.proposed

    @abstractmethod
    def _best_depth(self, requests: Sequence[DraftedRequest]) -> int:
        """Return the most drafts that save time for any of the requests; 0 if none do. Requests that still compute
        their prompts count too."""

    def _note_tries(self, settled: Sequence[SettledDrafts]) -> None:
        for request, result, _ in settled if self._tries.any_left else ():
            self._tries.accept(request.id, result.num_accepted)

    def _learn_chances(self, settled: Sequence[SettledDrafts]) -> None:
        """Learn how many drafts of each confidence level were accepted. Requests that have ended are left out, because
        the end may have cut off accepted drafts."""
        self.chances.observe([(request.id, request.checked_levels, result.num_drafted, result.num_accepted)
                              for request, result, num_scheduled in settled
                              if num_scheduled and request.checked_levels and not result.finish])

    def _expect_waiting(self, settled: Sequence[SettledDrafts]) -> None:
        """Learn acceptance from the drafts that wait on the device, by their drafter's confidence in them."""
        waiting = [(request.id, request.levels, clamp_drafts(request, self._k, is_exact=True))
                   for request, result, _ in settled
                   if request.levels and not result.finish and self._sees(request)]
        if waiting:
            request_ids, levels, counts = zip(*waiting, strict=True)
            num_drafts = np.array(counts)
            gains = self.chances.gains_of_chains(self.chances.factors(request_ids), np.array(levels), num_drafts)
            self.acceptance.expect(request_ids, gains, num_drafts)

    def forget(self, request: DraftedRequest) -> None:
        self.acceptance.forget(request.id)
        self.chances.forget(request.id)
        self._sight.forget(request.id)
        self._tries.forget(request.id)

    def _next_step(self, requests: Sequence[DraftedRequest]) -> Sequence[DraftedRequest]:
        """Begin to plan a step. Returns the requests that were not known before: they start in this step."""
        self._sight.next_step(self._depth.proposed)
        self._requests = requests
        new = self._sight.new_of(requests)
        for request in new:
            self._sight.begin(request.id)
        return new

    def _trying_ids(self, requests: Sequence[DraftedRequest]) -> set[int]:
        """Requests that try a draft in this step, if the step before has proposed one. Must be called before
        `_advance_tries`, which ends tries."""
        if not self._tries.any_left:
            return set()
        return {own.id for own in requests if self._tries.has(own.id) and self._sees(own)}

    def _advance_tries(self, requests: Sequence[DraftedRequest], new: Sequence[DraftedRequest], best: int) -> bool:
        """Count this step as part of current tries, or begin a try if there is none, no draft pays, and tries may cost
        more time. Returns whether some requests try drafts. new: requests that start; best: the most drafts that
        pay."""
        if self._tries.any_left:
            trying = [request for request in requests if self._tries.has(request.id)]
            for request in trying:
                if request.yields_tokens:
                    self._tries.take(request.id)
            if trying:
                return True
        if best or not self._misses_rests or not requests:
            return False
        self._tries.rest(len(requests))
        return self._try_new(new, len(requests)) or not self._depth.proposed and self._try_all(requests)

    def _try_new(self, requests: Sequence[DraftedRequest], num_requests: int) -> bool:
        """Let requests that start now try drafts, to learn whether drafts would save time again. Returns whether the
        try has begun. num_requests: all requests of the step."""
        ids = [request.id for request in requests if request.max_drafts != 0]
        return self._misses_rests and bool(ids) and self._tries.begin(ids, num_requests, self.acceptance.usual_rate)

    def _try_all(self, requests: Sequence[DraftedRequest]) -> bool:
        """Let all requests with enough tokens left try drafts, to learn whether drafts would save time again. Returns
        whether the try has begun. The drafter has missed tokens while it did not run, so it first catches up for
        `READ_STEPS` steps, whose drafts are not checked."""
        ids = [request.id for request in requests if request.max_drafts != 0 and request.yields_tokens
               and request.end_len - request.bound.at_most >= LEAST_LEFT]
        return bool(ids) and self._tries.begin(ids, len(requests), self.acceptance.usual_rate, num_reading=READ_STEPS)

    def _waiting_gains(self, request: DraftedRequest) -> list[float]:
        """Return, for each draft of the request that waits on the device, the chance that it is reached and accepted,
        from its drafter's confidence."""
        return self.chances.gains(request.id, request.levels, clamp_drafts(request, self._k, is_exact=True))

    def _gains(self, requests: Sequence[DraftedRequest], is_exact: bool) -> list[list[float]]:
        """Return, for each request and draft j, the chance that all drafts up to j are accepted. Empty if the drafter
        has seen too little of the request and either rests or cannot catch up before the request ends."""
        all_gains = self.acceptance.gains_of([request.id for request in requests])
        return [self._cut_gains(request, gains, is_exact) for request, gains in zip(requests, all_gains, strict=True)]

    def _cut_gains(self, request: DraftedRequest, gains: list[float], is_exact: bool) -> list[float]:
        """Cut the chances of a request's drafts off after as many drafts as the request can have."""
        if not self._sees(request) and (not self._depth.proposed
                                        or request.end_len - request.bound.at_most < LEAST_LEFT):
            return []
        if request.max_drafts is None and not is_exact:
            return gains
        return gains[: clamp_drafts(request, self._k, is_exact)]

    def _sees(self, request: DraftedRequest) -> bool:
        """Whether the drafter has processed enough tokens of the request to guess the next ones."""
        return self._sight.sees_all or self._sight.sees(request.id)

    @property
    def _least_gain(self) -> float:
        """Return the factor by which drafts must multiply the tokens per second to be made. It is greater for a drafter
        that rests than for one that runs."""
        return 1.0 if self._misses_rests and self._depth.proposed else MIN_GAIN
