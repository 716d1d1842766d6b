"""IndividualDrafts: chooses a separate number of drafts for each request, in steps that are not captured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from outrider.core import ScheduledBatch
from outrider.core.costs import StepCosts
from outrider.core.drafted_request import DraftedRequest
from outrider.speculation.acceptance import PATIENT, QUICK, Acceptance
from outrider.speculation.draft_counts import DraftPlan, SettledDrafts, clamp_drafts
from outrider.speculation.draft_slowness import DraftSlowness
from outrider.speculation.drafter_tries import HOPELESS
from outrider.speculation.learned_drafts import LearnedDrafts


class IndividualDrafts(LearnedDrafts):
    """Chooses a separate number of drafts for each request. If proposals take time, the drafter proposes only drafts
    that will be checked, and rests while no request has drafts."""

    def __init__(self, k: int, costs: StepCosts, *, always_propose: bool) -> None:
        acceptance = Acceptance(k, QUICK if always_propose else PATIENT)
        super().__init__(k, costs, acceptance, misses_rests=not always_propose)
        self._always_propose = always_propose
        self._slowness = DraftSlowness()

    def choose(self, requests: Sequence[DraftedRequest], is_exact: bool) -> DraftPlan:
        plan = self._plan(requests, is_exact)
        if self._slowness.wants_rest and not self._always_propose:
            self._depth.proposed = 0
            return DraftPlan([0] * len(requests), 0)
        if not self._slowness.wants_look or not plan.num_wanted:
            return plan
        if not self._always_propose:  # a drafter that rested for a step would miss what it has
            self._depth.proposed = 1
        return DraftPlan([0] * len(requests), self._k if self._always_propose else 1)

    def _plan(self, requests: Sequence[DraftedRequest], is_exact: bool) -> DraftPlan:
        new = self._next_step(requests)
        running = [index for index, request in enumerate(requests) if request.yields_tokens]
        if self._always_propose:
            return DraftPlan(self._counts_of_guesses(requests, running, is_exact), self._k)
        trying = self._trying_ids(requests)
        counts = self._counts(requests, running, is_exact=False)
        most = max(counts, default=0)
        # The drafter must see prompts that are being computed if it is to guess what follows them.
        best = max(most, 0 if len(running) == len(requests) else self._best_depth(requests))
        best = max(best, int(self._advance_tries(requests, new, best)))
        depth = self._depth.next(best)
        wanted = [0] * len(requests)
        if is_exact and depth <= best and any(requests[index].levels for index in running):
            wanted = self._likely_counts(requests, running)
        else:
            for index in running:  # for a try of more drafts, requests that have the most get one more
                is_deeper = depth > best and counts[index] == most
                count = min(counts[index] + is_deeper, depth) if self._sees(requests[index]) else 0
                wanted[index] = clamp_drafts(requests[index], count, is_exact)
        for index in running if trying else ():
            if requests[index].id in trying:
                wanted[index] = max(wanted[index], clamp_drafts(requests[index], min(1, depth), is_exact))
        return DraftPlan(wanted, self._depth.proposed)

    def observe(self, settled: Sequence[SettledDrafts], *, is_shared: bool = False) -> None:
        """Learn from a step. A draft that was scheduled but not made (a lookup found nothing) counts as rejected,
        because it has cost as much."""
        self._note_tries(settled)
        self._learn_chances(settled)
        self.acceptance.observe([(request.id, num_scheduled, result.num_accepted)
                                 for request, result, num_scheduled in settled
                                 if num_scheduled and not request.checked_levels])
        self._expect_waiting(settled)

    def observe_step(self, batch: ScheduledBatch, seconds: float) -> None:
        if max(batch.num_known, default=0) != 1:
            return
        count = batch.num_requests
        plain = self._costs.step(count, count)
        added = self._costs.step(batch.num_tokens, count) - plain + self._costs.draft(batch.drafting.num_wanted, count)
        checks_drafts = batch.num_tokens > count
        if self._slowness.observe(plain, added, seconds, checks_drafts=checks_drafts) and not self._depth.proposed:
            self._tries.allow(count)
        self._tries.slowness = self._slowness.factor

    def begin(self, requests: Sequence[DraftedRequest]) -> int:
        return self._k if self._always_propose else super().begin(requests)

    def _best_depth(self, requests: Sequence[DraftedRequest]) -> int:
        return max(self._counts(requests, list(range(len(requests))), is_exact=False), default=0)

    def _counts_of_guesses(self, requests: Sequence[DraftedRequest], running: list[int], is_exact: bool) -> list[int]:
        """Return the number of drafts of each request, for a drafter whose proposals take no time. A request that has
        had no draft for a while tries one draft."""
        wanted = self._counts(requests, running, is_exact)
        plain, one = (self._step_seconds(count, len(running)) for count in (0, 1)) if running else (0.0, 0.0)
        if one - plain >= HOPELESS * plain / max(1, len(running)):  # an accepted draft would hardly pay
            return wanted
        for index, gains in self._gains_of(requests, running, is_exact):
            if not wanted[index] and gains:
                wanted[index] = int(self.acceptance.is_probe_due(requests[index].id))
        return wanted

    def _counts(self, requests: Sequence[DraftedRequest], running: list[int], is_exact: bool) -> list[int]:
        """Return the number of drafts of each request with which the step is expected to yield most tokens per second;
        0 for requests not in `running`. All depths of a proposal are compared. For each, the drafts are taken that are
        most likely to be reached and accepted."""
        counts, num_running = [0] * len(requests), len(running)
        if not running:
            return counts
        gains = self._gains_of(requests, running, is_exact)
        steps = [self._step_seconds(count, num_running) for count in range(1 + sum(len(own) for _, own in gains))]
        best: list[tuple[float, int]] = []
        best_rate = num_running / steps[0] * self._least_gain
        for depth in range(1, self._k + 1) if self._costs.drafting else (self._k,):
            drafts = [(gain, index) for index, own in gains for gain in own[:depth]]
            drafts.sort(key=lambda pair: -pair[0])
            drafting, expected = self._draft_seconds(depth, num_running), float(num_running)
            for count, (gain, _) in enumerate(drafts, start=1):
                expected += gain
                rate = expected / (steps[count] + drafting)
                if rate > best_rate:
                    best, best_rate = drafts[:count], rate
        for _, index in best:
            counts[index] += 1
        return counts

    def _likely_counts(self, requests: Sequence[DraftedRequest], running: list[int]) -> list[int]:
        """Return the number of proposed drafts of each request to check, by the drafter's confidence in each. A draft
        is checked if the tokens that it is expected to add would take longer in steps with usual drafts."""
        depth = self._depth.proposed
        usual = sorted((gain for _, own in self._gains_of(requests, running, False) for gain in own[:depth]),
                       reverse=True)
        found = [(gain, index) for index, own in self._gains_of(requests, running, True) if self._sees(requests[index])
                 for gain in (self._waiting_gains(requests[index]) if requests[index].levels else own)]
        found.sort(key=lambda pair: -pair[0])
        count, most = len(running), max(len(usual), len(found))
        step = [self._step_seconds(n, count) for n in range(1 + most)]
        drafting = self._draft_seconds(depth, count)
        rate = max(expected / (step[n] + (drafting if n else 0.0))
                   for n, expected in enumerate(accumulate(usual, initial=float(count))))
        values = [expected - rate * step[n]
                  for n, expected in enumerate(accumulate((gain for gain, _ in found), initial=0.0))]
        counts = [0] * len(requests)
        for _, index in found[: values.index(max(values))]:
            counts[index] += 1
        return counts

    def _gains_of(self, requests: Sequence[DraftedRequest], running: list[int],
                  is_exact: bool) -> list[tuple[int, list[float]]]:
        """Return the indexes in `running`, each with the chances that the drafts of its request are reached and
        accepted."""
        return list(zip(running, self._gains([requests[index] for index in running], is_exact), strict=True))

    def _step_seconds(self, num_drafts: int, num_running: int) -> float:
        """Return the expected seconds of a step of `num_running` requests with `num_drafts` drafts in all. The slowness
        factor applies only to the time that drafts add."""
        plain = self._costs.step(num_running, num_running)
        return plain + self._slowness.factor * (self._costs.step(num_running + num_drafts, num_running) - plain)

    def _draft_seconds(self, depth: int, num_running: int) -> float:
        return self._slowness.factor * self._costs.draft(depth, num_running)
