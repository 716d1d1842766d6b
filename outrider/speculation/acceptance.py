"""Acceptance: estimates how likely drafts are to be accepted, by request and position, from the results of steps.

Counts are kept by request and position, and decay. Without new drafts a request's estimate drifts back to that of all
requests, so that a request that has stopped drafting tries again now and then. Knows no drafter by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

FIRST_RATE = 0.7  # of drafts before any was checked
SHARED_DECAY = 0.999  # factor on the counts over all requests, per observation
USUAL_DEVIATION = 2.0  # squared deviations of a request from what is usual, in variances, that are nothing unusual
LEAST_VARIANCE = 0.01  # of one observation
FORGETTING = 0.95  # factor on a request's counts, per step without drafts
PROBE_AFTER = 32  # steps without drafts until a request tries one, whatever the rates say


class Memory(NamedTuple):
    """How much a request's own acceptance counts weigh against the acceptance rates of all requests."""

    decay: float  # factor on the counts, per observation
    prior_weight: float  # observations that the shared rate is worth to a new request
    first_weight: float  # observations that the rate of the first request is worth


# A text begins to repeat itself at any time, and stops as suddenly.
QUICK = Memory(0.9, 2.0, 2.0)
# A request that stops drafting cannot easily begin again if the drafter misses the text since: some unlucky drafts in a
# row must not stop it, nor those of the first request the drafts of all others.
PATIENT = Memory(0.98, 16.0, 8.0)


@dataclass(slots=True)
class Rates:
    """Acceptance counts by position: how many drafts were reached (all before them were accepted), and how many of
    these were accepted."""

    tried: list[float]
    hit: list[float]
    gains: list[float] = field(default_factory=list)  # chance that draft j is reached and accepted
    idle: int = 0  # steps without drafts

    def observe(self, drafted: int, accepted: int, decay: float) -> None:
        """Count the drafts of one step. Counts of positions without a draft fade, so that a few early rejections do not
        keep a request from trying these positions again."""
        tried, hit = self.tried, self.hit  # runs for every request in every step: plain statements are fastest
        for j in range(min(accepted + 1, drafted, len(tried))):
            tried[j] = tried[j] * decay + 1
            hit[j] = hit[j] * decay + (j < accepted)
        for j in range(drafted, len(tried)):
            tried[j] *= FORGETTING
            hit[j] *= FORGETTING

    def expect(self, gains: Sequence[float], decay: float) -> None:
        """Count drafts that were not checked, by their chances of being reached and accepted (`gains`)."""
        tried, hit, reached = self.tried, self.hit, 1.0
        for j, gain in enumerate(gains):
            tried[j] = tried[j] * decay + reached
            hit[j] = hit[j] * decay + gain
            reached = gain

    def add(self, num: Sequence[int], tried: Sequence[float], hit: Sequence[float]) -> None:
        """Add the drafts of all requests of a step to the rates over all requests. By position: `num`, the number of
        drafts; `tried` and `hit`, what they add to the counts."""
        for j, own in enumerate(num):
            if own:
                self.tried[j] = add_decayed(self.tried[j], SHARED_DECAY, own, tried[j])
                self.hit[j] = add_decayed(self.hit[j], SHARED_DECAY, own, hit[j])

    def fade(self, factor: float) -> None:
        self.tried = [t * factor for t in self.tried]
        self.hit = [h * factor for h in self.hit]


def add_decayed(total: float, decay: float, num: int, added: float) -> float:
    """The value of a decaying sum after `num` more observations that add up to `added`. The observations have no order,
    so each counts as their mean."""
    kept = decay**num
    return total * kept + added * (1 - kept) / ((1 - decay) * num)


def believed_weight(weight: float, deviation: float, variance: float) -> float:
    """The weight that the rate of all requests has for one request, as a number of observations: `weight`, or less if
    the request deviates from that rate by more than chance explains. variance: that of a deviation by chance."""
    return weight / max(1.0, deviation * deviation / variance / USUAL_DEVIATION)


class Acceptance:
    """Acceptance rates of every request that has drafted, and the rates of all requests together."""

    probe_after = PROBE_AFTER

    def __init__(self, k: int, memory: Memory = QUICK) -> None:
        self._k, self._memory = k, memory
        self._shared = Rates([memory.first_weight] * k, [memory.first_weight * FIRST_RATE] * k)
        self._rates: dict[int, Rates] = {}

    def observe(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        """Count the drafts of a step. `drafts` has, for each request: its id, how many were checked, and how many
        accepted."""
        decay, k = self._memory.decay, self._k
        by_accepted, num_rejected = [0] * (k + 1), [0] * k  # requests with so many accepted; rejected at each place
        for request_id, num_drafted, num_accepted in drafts:
            rates = self._rates.get(request_id) or self._rates_of(request_id, idle=0)
            rates.observe(num_drafted, num_accepted, decay)
            rates.gains = []
            by_accepted[num_accepted if num_accepted < k else k] += 1  # a host's guess may be longer
            if num_accepted < num_drafted and num_accepted < k:
                num_rejected[num_accepted] += 1
        num_hit = [sum(by_accepted[place + 1 :]) for place in range(k)]
        num_reached = [rejected + hits for rejected, hits in zip(num_rejected, num_hit, strict=True)]
        self._shared.add(num_reached, num_reached, num_hit)

    def expect(self, proposed: Sequence[tuple[int, list[float]]]) -> None:
        """Count proposed drafts of requests, by their chances of being reached and accepted. Counting checked drafts
        alone would be biased, because drafts with good chances are the ones that are checked."""
        decay, num, tried, hit = self._memory.decay, [0] * self._k, [0.0] * self._k, [0.0] * self._k
        for request_id, gains in proposed:
            rates = self._rates.get(request_id) or self._rates_of(request_id, idle=0)
            rates.expect(gains, decay)
            rates.gains = []
            reached = 1.0
            for place, gain in enumerate(gains):
                num[place] += 1
                tried[place] += reached
                hit[place] += gain
                reached = gain
        self._shared.add(num, tried, hit)

    @property
    def usual_rate(self) -> float:
        """The rate at which first drafts are accepted, over all requests."""
        return self._shared.hit[0] / self._shared.tried[0]

    @property
    def usual_gains(self) -> list[float]:
        """The chance that draft j is reached and accepted, over all requests."""
        rates = [hit / tried for hit, tried in zip(self._shared.hit, self._shared.tried, strict=True)]
        return list(accumulate(rates, mul))

    def forget(self, request_id: int) -> None:
        self._rates.pop(request_id, None)

    def gains(self, request_id: int) -> list[float]:
        """The chance that draft j of the request is reached and accepted, for every j."""
        rates = self._rates.get(request_id)
        if rates is not None and rates.gains:
            return rates.gains
        if rates is None:
            return self.usual_gains
        shared, gains, reached = self._shared, [], 1.0
        weight = self._own_weight(rates)
        for shared_hit, shared_tried, hit, tried in zip(shared.hit, shared.tried, rates.hit, rates.tried, strict=True):
            reached *= (hit + weight * (shared_hit / shared_tried)) / (tried + weight)
            gains.append(reached)
        rates.gains = gains
        return gains

    def _own_weight(self, rates: Rates) -> float:
        """The weight of the shared rate, as a number of observations, for a request with these rates."""
        weight, tried = self._memory.prior_weight, rates.tried[0]
        if not tried:
            return weight
        shared = self.usual_rate
        chance = max(shared * (1 - shared), LEAST_VARIANCE) * (1 / tried + 1 / weight)
        return believed_weight(weight, rates.hit[0] / tried - shared, chance)

    def is_probe_due(self, request_id: int) -> bool:
        """Count a step of the request without drafts. Returns True if the request should try a draft: a text may begin
        to repeat itself at any time, which is only noticed with drafts."""
        rates = self._rates_of(request_id, idle=self.probe_after * 3 // 4)  # a new request is tried soon
        self._fade(rates)
        rates.gains = []
        rates.idle += 1
        if rates.idle < self.probe_after:
            return False
        rates.idle = 0
        return True

    def _fade(self, rates: Rates) -> None:
        """Let the counts of a request fade after a step without drafts."""
        rates.fade(FORGETTING)

    def _rates_of(self, request_id: int, *, idle: int) -> Rates:
        """The rates of a request. A new request begins as if after `idle` steps without drafts."""
        if request_id not in self._rates:
            self._rates[request_id] = Rates([0.0] * self._k, [0.0] * self._k, idle=idle)
        return self._rates[request_id]
