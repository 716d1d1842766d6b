"""DraftChances: estimates how likely a draft is to be accepted, from its drafter's confidence and earlier drafts.

A drafter with a network gives each draft a probability. The kernel that draws the draft keeps it as a level from 1 to
15 (`core/draft_confidence.py`). The scheduler counts how often drafts of each level are accepted over all requests, and
corrects this rate by one factor for the draft's place and one for the request. The chance that a draft is reached and
accepted is the product of the rates up to it. If the confidence of a drafter says nothing, all levels get the same
rate, and each request's own acceptance remains.

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
either one at the request's temperature, says less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.core.draft_confidence import LEVEL_BITS, MOST_CHANCE, MOST_PLACES, NUM_LEVELS, TOP_LEVEL
from outrider.speculation.acceptance import FIRST_RATE, SHARED_DECAY, add_decayed, believed_weight

Ints: TypeAlias = NDArray[np.int64]

MEAN_WEIGHT = 4.0  # observations that the mean rate is worth to a level
PLACE_WEIGHT = 32.0  # accepted drafts that a factor of 1 is worth to a place
OWN_WEIGHT = 20.0  # checked drafts that a factor of 1 is worth to a request
OWN_DECAY = 0.98  # factor on what was counted of one request, per draft


@dataclass(slots=True)
class _Ratio:
    """A factor: the number of accepted drafts divided by the number that was expected to be accepted."""

    accepted: float
    expected: float

    @property
    def factor(self) -> float:
        return self.accepted / self.expected

    def add(self, num: int, num_accepted: int, expected: float) -> None:
        """Count `num` drafts of a step, over all requests."""
        self.accepted = add_decayed(self.accepted, SHARED_DECAY, num, num_accepted)
        self.expected = add_decayed(self.expected, SHARED_DECAY, num, expected)


class DraftChances:
    """The chance that a draft is accepted, by the drafter's confidence level, the draft's place and the request."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._tried = [0.0] * NUM_LEVELS
        self._hit = [0.0] * NUM_LEVELS
        self._all = _Ratio(MEAN_WEIGHT * FIRST_RATE, MEAN_WEIGHT)
        self._places = [_Ratio(PLACE_WEIGHT, PLACE_WEIGHT) for _ in range(k)]
        self._own: dict[int, _Ratio] = {}
        self._table: list[list[float]] = []  # see `table`; empty if it must be computed anew

    def observe(self, drafts: Iterable[tuple[int, int, int, int]]) -> None:
        """Count the checked drafts of a step. `drafts` has, for each request: its id, the confidence levels of its
        drafts, how many were checked, and how many accepted. Drafts after the first rejected one do not count."""
        rates, factors, k = self.rates, [place.factor for place in self._places], self._k
        num_tried, num_hit = [0] * NUM_LEVELS, [0] * NUM_LEVELS
        num_reached, num_accepted_at, expected_at = [0] * k, [0] * k, [0.0] * k
        for request_id, packed, num_drafted, num_accepted in drafts:  # all requests, in every step
            own = self._own.get(request_id)
            if own is None:
                own = self._own[request_id] = _Ratio(0.0, 0.0)
            accepted, expected = own.accepted, own.expected
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
            own.accepted, own.expected = accepted, expected
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

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    @property
    def rates(self) -> list[float]:
        """The rate at which drafts of each level are accepted."""
        mean = self._all.factor
        return [(hit + MEAN_WEIGHT * mean) / (tried + MEAN_WEIGHT)
                for hit, tried in zip(self._hit, self._tried, strict=True)]

    def table(self) -> list[list[float]]:
        """[place][level] The chance that a draft is accepted if all drafts before it are, without the factor of its
        request."""
        if not self._table:
            rates = self.rates
            self._table = [[rate * factor for rate in rates] for factor in [place.factor for place in self._places]]
        return self._table

    def factor(self, request_id: int) -> float:
        """The factor of a request on the chances of its drafts. The fewer were checked, the nearer it is to 1."""
        own = self._own.get(request_id)
        if own is None:
            return 1.0
        weight = OWN_WEIGHT * self._all.factor
        weight = believed_weight(weight, own.accepted - own.expected, own.expected * (1 + own.expected / weight))
        return (own.accepted + weight) / (own.expected + weight)

    def gains(self, request_id: int, packed: int, count: int) -> list[float]:
        """For each of `count` drafts of the request: the chance that it is reached and accepted. packed: their
        confidence levels."""
        gains, reached, factor = [], 1.0, self.factor(request_id)
        for place, rates in enumerate(self.table()[:count]):
            chance = rates[packed >> LEVEL_BITS * place & TOP_LEVEL] * factor
            reached *= chance if chance < MOST_CHANCE else MOST_CHANCE
            gains.append(reached)
        return gains

    def gains_of_chains(self, request_ids: list[int], owner: Ints, packed: Ints, counts: Ints) -> NDArray[np.float64]:
        """[chain, place] Like `gains`, for many chains of drafts at once; 0 for places after the last draft of a chain.
        owner: the index of each chain's request in `request_ids`."""
        places = np.arange(self._k)
        levels = packed[:, None] >> LEVEL_BITS * np.minimum(places, MOST_PLACES) & TOP_LEVEL
        factors = np.array([self.factor(request_id) for request_id in request_ids])
        chances = np.array(self.table())[places, levels] * factors[owner, None]
        chances = np.where(places < counts[:, None], np.minimum(chances, MOST_CHANCE), 0.0)
        return np.multiply.accumulate(chances, axis=1)
