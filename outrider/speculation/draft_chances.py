"""DraftChances: estimates how likely a draft is to be accepted, from its drafter's confidence and earlier drafts.

A drafter with a network gives each draft a probability. The kernel that draws the draft keeps it as a level from 1 to
15 (`core/draft_confidence.py`). The scheduler counts how often drafts of each level are accepted over all requests, and
corrects this rate by one factor for the draft's place and one for the request. The chance that a draft is reached and
accepted is the product of the rates up to it. If a drafter's confidence does not predict acceptance, all levels get the
same rate, and the estimate depends on each request's own acceptance only.

- On a CPU the scheduler knows the proposed drafts. It checks a draft if the tokens that it is expected to add would
  take longer to get without it.
- On a GPU the scheduler runs ahead of the drafts. It chooses the number of token rows of the step, and the device
  distributes them among the drafts, likeliest first, before the batch is laid out (`share_drafts` in
  `kernels/step.py`). It computes in integers, so that all ranks get the same result. This is done from 9 requests on,
  in steps without prompts and without masked requests, if it is expected to gain 2% over counts by acceptance.
- A user's drafter may report its confidence too (`Drafts.levels`). An n-gram lookup has none.

The choice of drafts to check cannot change the text. At every position the sampler picks the token from its logits and
its noise, which depend on the tokens before and on the request's key, and a draft is accepted only if it is that token.
So the choice may depend on the drafts. (With rejection sampling it may not: dropping an improbable draft and drawing
from the target instead would favour the drafter's likely tokens.)

A draft head's confidence is reliable: of its drafts with level 1, 5, 10 and 15, 7%, 42%, 71% and 98% are accepted. At a
temperature, the best predictor is the probability of the drawn token at temperature 1; that of the likeliest token, or
either one at the request's temperature, says less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from outrider.core.draft_confidence import LEVEL_BITS, MOST_CHANCE, MOST_PLACES, NUM_LEVELS, TOP_LEVEL
from outrider.speculation.acceptance import (
    FIRST_RATE,
    SHARED_DECAY,
    USUAL_DEVIATION,
    add_decayed,
    believed_weight,
    outcome_codes,
    outcomes,
)
from outrider.speculation.request_table import Floats, Ints, RequestTable

MEAN_WEIGHT = 4.0  # observations that the mean rate is worth to a level
PLACE_WEIGHT = 32.0  # accepted drafts that a factor of 1 is worth to a place
OWN_WEIGHT = 20.0  # checked drafts that a factor of 1 is worth to a request
MANY = 96  # requests from which numpy counts them faster than loops
SMALLEST = 1e-300  # in the place of a variance of 0, which is that of no drafts
OWN_DECAY = 0.98  # factor on what was counted of one request, per draft


@dataclass(slots=True)
class _Ratio:
    """A correction factor: the number of accepted drafts divided by the expected number."""

    accepted: float
    expected: float

    @property
    def factor(self) -> float:
        return self.accepted / self.expected

    def add(self, num: float, num_accepted: float, expected: float) -> None:
        """Count `num` drafts of a step, over all requests."""
        self.accepted = add_decayed(self.accepted, SHARED_DECAY, num, num_accepted)
        self.expected = add_decayed(self.expected, SHARED_DECAY, num, expected)


# A request's id, the confidence levels of its drafts, how many were checked, and how many accepted. Drafts after the
# first rejected one do not count.
CheckedDrafts: TypeAlias = tuple[int, int, int, int]


class _Counted(NamedTuple):
    """Counts of the checked drafts of one step, over all of its requests."""

    num_tried: list[float]  # by level
    num_hit: list[float]
    num_reached: list[float]  # by place
    num_accepted: list[float]
    expected: list[float]  # how many would be accepted by their levels alone


class DraftChances:
    """The chance that a draft is accepted, by the drafter's confidence level, the draft's place and the request."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._tried = [0.0] * NUM_LEVELS
        self._hit = [0.0] * NUM_LEVELS
        self._all = _Ratio(MEAN_WEIGHT * FIRST_RATE, MEAN_WEIGHT)
        self._places = [_Ratio(PLACE_WEIGHT, PLACE_WEIGHT) for _ in range(k)]
        self._own = RequestTable(2)  # [request, (accepted, expected)]
        # By outcome: which places were checked and accepted, what a draft there is worth after the decay by later ones,
        # the worth of the accepted ones, and the factor on what was counted before.
        drafted, accepted = np.array(outcomes(k)).T[:, :, None]
        places, num_checked = np.arange(k), np.minimum(accepted + 1, drafted)
        self._checked = (places < num_checked).astype(np.float64)
        self._hit_at = self._checked * (places < accepted)
        self._weights = self._checked * OWN_DECAY ** (num_checked - 1 - places)
        self._hits = (self._weights * self._hit_at).sum(1)
        self._fading = OWN_DECAY**num_checked
        self._table: list[list[float]] = []  # see `table`; empty if it must be computed anew

    def observe(self, drafts: Sequence[CheckedDrafts]) -> None:
        """Count the checked drafts of a step."""
        counted = self._observe_many(drafts) if len(drafts) >= MANY else self._observe_few(drafts)
        num_tried, num_hit, num_reached, num_accepted_at, expected_at = counted
        for at_place, num, hits, rate in zip(self._places, num_reached, num_accepted_at, expected_at, strict=True):
            if num:
                at_place.add(num, hits, rate)
        for level, (num, hits) in enumerate(zip(num_tried, num_hit, strict=True)):
            if num:
                self._tried[level] = add_decayed(self._tried[level], SHARED_DECAY, num, num)
                self._hit[level] = add_decayed(self._hit[level], SHARED_DECAY, num, hits)
        num = sum(num_tried)
        if num:
            self._all.add(num, sum(num_hit), num)
        self._table = []

    def _observe_few(self, drafts: Sequence[CheckedDrafts]) -> _Counted:
        """Like `_observe_many`, but without numpy, which is slower for few requests."""
        rates, factors, k = self.rates, [place.factor for place in self._places], self._k
        num_tried, num_hit = [0.0] * NUM_LEVELS, [0.0] * NUM_LEVELS
        num_reached, num_accepted_at, expected_at = [0.0] * k, [0.0] * k, [0.0] * k
        for request_id, packed, num_drafted, num_accepted in drafts:
            row = self._own.add(request_id)
            accepted, expected = self._own.values[row].tolist()
            for place in range(min(num_accepted + 1, num_drafted, k)):
                level = packed >> LEVEL_BITS * place & TOP_LEVEL
                rate = rates[level]
                accepted *= OWN_DECAY
                expected = expected * OWN_DECAY + rate * factors[place]
                num_tried[level] += 1
                num_reached[place] += 1
                expected_at[place] += rate
                if place < num_accepted:
                    accepted += 1
                    num_hit[level] += 1
                    num_accepted_at[place] += 1
            self._own.values[row] = accepted, expected
        return _Counted(num_tried, num_hit, num_reached, num_accepted_at, expected_at)

    def _observe_many(self, drafts: Sequence[CheckedDrafts]) -> _Counted:
        """Count the drafts for each request, and return their counts over all requests."""
        request_ids, packed, num_drafted, num_accepted = zip(*drafts, strict=True)
        codes, levels = outcome_codes(self._k, num_drafted, num_accepted), self._levels(np.array(packed)[:, None])
        is_checked, is_hit = self._checked[codes], self._hit_at[codes]
        rates = np.array(self.rates)[levels] * is_checked
        expected = (rates * (self._weights * [place.factor for place in self._places])[codes]).sum(1)
        rows = self._own.add_all(request_ids)
        own = self._own.values[rows] * self._fading[codes]
        own[:, 0] += self._hits[codes]
        own[:, 1] += expected
        self._own.values[rows] = own
        flat = levels.ravel()
        return _Counted(np.bincount(flat, is_checked.ravel(), NUM_LEVELS).tolist(),
                        np.bincount(flat, is_hit.ravel(), NUM_LEVELS).tolist(),
                        is_checked.sum(0).tolist(), is_hit.sum(0).tolist(), rates.sum(0).tolist())

    def _levels(self, packed: Ints) -> Ints:
        """Unpack confidence levels: one packed integer for each request, [request, 1], into [request, place]."""
        levels: Ints = packed >> LEVEL_BITS * np.minimum(np.arange(self._k), MOST_PLACES) & TOP_LEVEL
        return levels

    def forget(self, request_id: int) -> None:
        self._own.forget(request_id)

    @property
    def rates(self) -> list[float]:
        """Return the rate at which drafts of each level are accepted."""
        mean = self._all.factor
        return [(hit + MEAN_WEIGHT * mean) / (tried + MEAN_WEIGHT)
                for hit, tried in zip(self._hit, self._tried, strict=True)]

    def table(self) -> list[list[float]]:
        """Return the chance that a draft is accepted if all drafts before it are, as [place][level]. The request's
        factor is not included."""
        if not self._table:
            rates = self.rates
            self._table = [[rate * factor for rate in rates] for factor in [place.factor for place in self._places]]
        return self._table

    def factor(self, request_id: int) -> float:
        """Return the factor of a request on the chances of its drafts. The fewer drafts were checked, the nearer it is
        to 1."""
        accepted, expected = map(float, self._own.values[self._own.find(request_id)])
        if not expected:
            return 1.0
        weight = OWN_WEIGHT * self._all.factor
        weight = believed_weight(weight, accepted - expected, expected * (1 + expected / weight))
        return (accepted + weight) / (expected + weight)

    def factors(self, request_ids: Sequence[int]) -> Floats:
        """Like `factor`, for many requests."""
        accepted, expected = self._own.values[self._own.find_all(request_ids)].T
        weight = OWN_WEIGHT * self._all.factor
        variance = np.maximum(expected * (1 + expected / weight), SMALLEST)
        weights = weight / np.maximum(1.0, (accepted - expected) ** 2 / variance / USUAL_DEVIATION)
        factors: Floats = (accepted + weights) / (expected + weights)
        return factors

    def gains(self, request_id: int, packed: int, count: int) -> list[float]:
        """Return, for each of `count` drafts of the request, the chance that it is reached and accepted. packed: their
        confidence levels."""
        gains, reached, factor = [], 1.0, self.factor(request_id)
        for place, rates in enumerate(self.table()[:count]):
            chance = rates[packed >> LEVEL_BITS * place & TOP_LEVEL] * factor
            reached *= chance if chance < MOST_CHANCE else MOST_CHANCE
            gains.append(reached)
        return gains

    def gains_of_chains(self, factors: Floats, packed: Ints, counts: Ints) -> Floats:
        """Like `gains`, for many chains of drafts at once: [chain, place], with 0 for places after the last draft of a
        chain. A chain is the drafts of one request. factors: those of each chain's request."""
        places = np.arange(self._k)
        chances = np.array(self.table())[places, self._levels(packed[:, None])] * factors[:, None]
        chances = np.where(places < counts[:, None], np.minimum(chances, MOST_CHANCE), 0.0)
        return np.multiply.accumulate(chances, axis=1)
