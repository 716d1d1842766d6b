"""Estimates how likely a draft is to be accepted, from its drafter's confidence and the drafts checked so far.

A drafter with a network gives each draft a probability. The kernel that draws the draft keeps it as a level from 1 to
15 (`core/draft_confidence.py`), and the scheduler counts how often drafts of each level are accepted, over all
requests, with a factor for the place in the chain and one for each request. The chance of a draft is the product of
these rates up to it. If a drafter is wrong about itself, all levels have the same rate, and what is left is each
request's own acceptance.

- On a CPU the scheduler knows the drafts that wait. It checks a draft if the tokens that it is expected to add would
  take longer to get without it.
- On a GPU the scheduler runs ahead of the drafts. It chooses the token rows of the step, and the device shares them
  out among the drafts, likeliest first, before the batch is laid out (`share_drafts` in `kernels/step.py`); all ranks
  compute the same in whole numbers. That is done from 9 requests on, if it is expected to gain 2% over counts by
  acceptance, in steps without prompts and without masked requests.
- A user's drafter may say it too (`Drafts.levels`). A lookup says nothing.

Which drafts are checked cannot change the text: at every place the one sampler picks the token from its logits and its
noise, which depend on the tokens before and on the request's key, and a draft is accepted only if it is that token. So
the choice may look at the drafts themselves. (With rejection sampling it may not: dropping a draft because it is
improbable, and drawing from the target instead, would favour the drafter's likely tokens.)

The head knows itself: of drafts with level 1, 5, 10 and 15 it has 7%, 42%, 71% and 98% right. At a temperature the
probability at temperature 1 of the drawn token says more than that of the likeliest token, or than either at the
request's temperature.
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
    """The number of accepted drafts against the number that was expected."""

    accepted: float
    expected: float

    @property
    def factor(self) -> float:
        return self.accepted / self.expected

    def add(self, num: int, num_accepted: int, expected: float) -> None:
        """Count drafts of all requests of a step."""
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
        """Count the checked drafts of a step. For each request: the levels of its drafts, how many were checked, and
        how many accepted. Drafts after the first rejected draft were not reached and do not count."""
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
        """[place][level] the chance of a draft that was reached, without the factor of its request."""
        if not self._table:
            rates = self.rates
            self._table = [[rate * factor for rate in rates] for factor in [place.factor for place in self._places]]
        return self._table

    def factor(self, request_id: int) -> float:
        """The factor of a request. The fewer of its drafts were checked, the nearer it is to 1."""
        own = self._own.get(request_id)
        if own is None:
            return 1.0
        weight = OWN_WEIGHT * self._all.factor
        weight = believed_weight(weight, own.accepted - own.expected, own.expected * (1 + own.expected / weight))
        return (own.accepted + weight) / (own.expected + weight)

    def gains(self, request_id: int, packed: int, count: int) -> list[float]:
        """The chance that draft j of the request is reached and accepted, for its `count` drafts of these levels."""
        gains, reached, factor = [], 1.0, self.factor(request_id)
        for place, rates in enumerate(self.table()[:count]):
            chance = rates[packed >> LEVEL_BITS * place & TOP_LEVEL] * factor
            reached *= chance if chance < MOST_CHANCE else MOST_CHANCE
            gains.append(reached)
        return gains

    def gains_of_chains(self, request_ids: list[int], owner: Ints, packed: Ints, counts: Ints) -> NDArray[np.float64]:
        """[chain, place] the same for many chains of drafts; 0 for places behind the drafts of a chain. owner: which of
        the requests each chain belongs to."""
        places = np.arange(self._k)
        levels = packed[:, None] >> LEVEL_BITS * np.minimum(places, MOST_PLACES) & TOP_LEVEL
        factors = np.array([self.factor(request_id) for request_id in request_ids])
        chances = np.array(self.table())[places, levels] * factors[owner, None]
        chances = np.where(places < counts[:, None], np.minimum(chances, MOST_CHANCE), 0.0)
        return np.multiply.accumulate(chances, axis=1)
