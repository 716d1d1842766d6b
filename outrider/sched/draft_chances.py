"""How likely a draft is to be accepted, by how sure its drafter is of it: learned from the drafts that were checked.

A level (`core/draft_confidence.py`) says what the drafter thinks; how often drafts of that level are accepted is
counted here, over all requests. Two factors correct it: one for the draft's place in the chain, one for the request.
If levels say nothing (a drafter that is wrong about itself), all levels have the mean rate, and the factors are what
is left: each request's own acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.draft_confidence import MOST_CHANCE, NUM_LEVELS, levels_of
from outrider.sched.acceptance import FIRST_RATE, SHARED_DECAY, believed_weight

MEAN_WEIGHT = 4.0  # observations that the mean rate is worth to a level
PLACE_WEIGHT = 32.0  # accepted drafts that a factor of 1 is worth to a place
OWN_WEIGHT = 20.0  # checked drafts that a factor of 1 is worth to a request
OWN_DECAY = 0.98  # factor on what was counted of one request, per observation
RENEWED_AFTER = 16  # observations after which the rates of levels are computed anew


@dataclass(slots=True)
class _Ratio:
    """Accepted drafts beside those that were expected."""

    accepted: float
    expected: float

    @property
    def factor(self) -> float:
        return self.accepted / self.expected

    def observe(self, expected: float, is_accepted: bool, decay: float) -> None:
        self.accepted = self.accepted * decay + is_accepted
        self.expected = self.expected * decay + expected


class DraftChances:
    """Chances of drafts by level, place and request."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._tried = [0.0] * NUM_LEVELS
        self._hit = [0.0] * NUM_LEVELS
        self._all = _Ratio(MEAN_WEIGHT * FIRST_RATE, MEAN_WEIGHT)
        self._places = [_Ratio(PLACE_WEIGHT, PLACE_WEIGHT) for _ in range(k)]
        self._own: dict[int, _Ratio] = {}
        self._rates: list[float] = []  # of each level
        self._num_new = 0  # observations since they were computed

    def observe(self, request_id: int, packed: int, num_drafted: int, num_accepted: int) -> None:
        """Drafts of these levels were checked. Those behind the first rejected one were not reached."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Ratio(0.0, 0.0)
        rates = self.rates
        tried, hit = self._tried, self._hit
        for place, level in enumerate(levels_of(packed, min(num_accepted + 1, num_drafted, self._k))):
            is_accepted = place < num_accepted
            at_place = self._places[place]
            own.observe(rates[level] * at_place.factor, is_accepted, OWN_DECAY)
            at_place.observe(rates[level], is_accepted, SHARED_DECAY)
            tried[level] = tried[level] * SHARED_DECAY + 1
            hit[level] = hit[level] * SHARED_DECAY + is_accepted
            self._all.observe(1.0, is_accepted, SHARED_DECAY)
        self._num_new += 1
        if self._num_new >= RENEWED_AFTER or self._all.expected < RENEWED_AFTER:
            self._rates, self._num_new = [], 0

    def forget(self, request_id: int) -> None:
        self._own.pop(request_id, None)

    @property
    def rates(self) -> list[float]:
        """The rate at which drafts of each level are accepted."""
        if not self._rates:
            mean = self._all.factor
            self._rates = [(hit + MEAN_WEIGHT * mean) / (tried + MEAN_WEIGHT)
                           for hit, tried in zip(self._hit, self._tried, strict=True)]
        return self._rates

    def table(self) -> list[list[float]]:
        """[place][level] the chance of a draft that was reached, of a request without a factor of its own."""
        return [[rate * place.factor for rate in self.rates] for place in self._places]

    def factor(self, request_id: int) -> float:
        """The factor of a request: the fewer of its drafts were checked, the nearer to 1."""
        own = self._own.get(request_id)
        if own is None:
            return 1.0
        weight = OWN_WEIGHT * self._all.factor
        weight = believed_weight(weight, own.accepted - own.expected, own.expected * (1 + own.expected / weight))
        return (own.accepted + weight) / (own.expected + weight)

    def gains(self, request_id: int, packed: int, count: int) -> list[float]:
        """The chance that draft j of the request is reached and accepted, for its `count` drafts of these levels."""
        gains, reached, factor, rates = [], 1.0, self.factor(request_id), self.rates
        for place, level in zip(self._places, levels_of(packed, count), strict=False):
            reached *= min(rates[level] * place.factor * factor, MOST_CHANCE)
            gains.append(reached)
        return gains
