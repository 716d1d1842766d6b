"""Acceptance: estimates how likely drafts are to be accepted, by request and position, from the results of steps.

Counts are kept by request and position, and decay. Without new drafts a request's estimate returns to the estimate of
all requests, so that a request that has stopped drafting tries again now and then. No code here depends on the kind of
drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from outrider.speculation.request_table import Floats, Ints, RequestTable

FIRST_RATE = 0.7  # of drafts before any was checked
SHARED_DECAY = 0.999  # factor on the counts over all requests, per observation
USUAL_DEVIATION = 2.0  # squared deviations of a request from what is usual, in variances, that are nothing unusual
LEAST_VARIANCE = 0.01  # of one observation
FORGETTING = 0.95  # factor on a request's counts, per step without drafts
TRIED, HIT, GAINS = range(3)  # of a request and a place: drafts reached, those accepted, and the chance of both
MANY = 16  # requests from which numpy counts them faster than loops
PROBE_AFTER = 32  # steps without drafts until a request tries one, whatever the rates say


class Memory(NamedTuple):
    """The weight of a request's own acceptance counts against the acceptance rates of all requests."""

    decay: float  # factor on the counts, per observation
    prior_weight: float  # observations that the shared rate is worth to a new request
    first_weight: float  # observations that the rate of the first request is worth


# A text begins to repeat itself at any time, and stops as suddenly.
QUICK = Memory(0.9, 2.0, 2.0)
# A request that stops drafting cannot easily begin again if the drafter misses the text since: some unlucky drafts in a
# row must not stop it, nor those of the first request the drafts of all others.
PATIENT = Memory(0.98, 16.0, 8.0)


def outcomes(k: int) -> list[tuple[int, int]]:
    """List all outcomes that a step may have for one request with up to k drafts: (number of drafts checked, number
    accepted)."""
    return [(num_drafted, num_accepted) for num_drafted in range(k + 1) for num_accepted in range(k + 1)]


def outcome_codes(k: int, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> Ints:
    """Return the index of each request's outcome in `outcomes(k)`. If a request has more than k drafts, only k are
    counted."""
    drafted, accepted = np.array(num_drafted), np.array(num_accepted)
    codes: Ints = np.minimum(drafted, k) * (k + 1) + np.minimum(accepted, k)
    return codes


class SharedRates:
    """Acceptance counts over all requests, by position: how many drafts were reached (all before them were accepted),
    and how many of these were accepted."""

    def __init__(self, k: int, weight: float) -> None:
        """weight: how many observations the initial rate (FIRST_RATE) counts for."""
        self._tried, self._hit = [weight] * k, [weight * FIRST_RATE] * k

    @property
    def rates(self) -> list[float]:
        """Return the rate at which reached drafts are accepted, by position."""
        return [hit / tried for hit, tried in zip(self._hit, self._tried, strict=True)]

    def add(self, num: Sequence[int], tried: Sequence[float], hit: Sequence[float]) -> None:
        """Add the drafts of a step. By position: `num`, the number of drafts; `tried` and `hit`, their additions to the
        counts."""
        for j, own in enumerate(num):
            if own:
                self._tried[j] = add_decayed(self._tried[j], SHARED_DECAY, own, tried[j])
                self._hit[j] = add_decayed(self._hit[j], SHARED_DECAY, own, hit[j])


def add_decayed(total: float, decay: float, num: float, added: float) -> float:
    """Return the value of a decaying sum after `num` more observations that add up to `added`. The observations have no
    order, so each counts as their mean."""
    kept: float = decay**num
    return total * kept + added * (1 - kept) / ((1 - decay) * num)


def believed_weight(weight: float, deviation: float, variance: float) -> float:
    """Return the weight of the rate of all requests for one request, as a number of observations: `weight`, or less if
    the request deviates from that rate by more than chance explains. variance: the variance of a deviation by
    chance."""
    return weight / max(1.0, deviation * deviation / variance / USUAL_DEVIATION)


class Acceptance:
    """Acceptance rates of every request that has drafted, and the rates of all requests together."""

    probe_after = PROBE_AFTER
    idle_decay = FORGETTING  # factor on a request's counts after a step without drafts

    def __init__(self, k: int, memory: Memory = QUICK) -> None:
        self._k, self._memory = k, memory
        self._shared = SharedRates(k, memory.first_weight)
        # [request, TRIED to GAINS, place]. Gains are 0 where they must be computed anew; those of requests without
        # counts are the usual ones, and always are.
        self._counts = RequestTable(3, k)
        self._idle: dict[int, int] = {}  # steps without drafts, by request
        self._places = np.arange(k)
        self._no_gains = [0.0] * k
        # [outcome, TRIED to GAINS, place] What `_count` does to counts: it scales them, then adds.
        self._added = np.array([self._counted(0.0, *outcome) for outcome in outcomes(k)])
        self._scales = np.array([self._counted(1.0, *outcome) for outcome in outcomes(k)]) - self._added
        drafted, accepted = np.array(outcomes(k)).T[:, :, None]
        self._hits = (self._places < accepted).astype(np.int64)  # [outcome, place], as `_reached`
        self._reached = self._hits | (self._places == accepted) & (self._places < drafted)

    def observe(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        """Count the drafts of a step. `drafts` has, for each request: its id, how many were checked, and how many
        accepted."""
        if not drafts:
            return
        num_reached, num_hit = self._observe_few(drafts) if len(drafts) < MANY else self._observe_many(drafts)
        self._shared.add(num_reached, num_reached, num_hit)

    def _observe_few(self, drafts: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        """Like `_observe_many`, one request after the other, which is faster for few requests."""
        k, counts = self._k, self._counts
        num_reached, num_hit = [0] * k, [0] * k
        for request_id, num_drafted, num_accepted in drafts:
            row = counts.add(request_id)
            tried, hit, _ = counts.values[row].tolist()
            self._count(tried, hit, num_drafted, num_accepted)
            counts.values[row] = tried, hit, self._no_gains
            for place in range(min(max(num_accepted, min(num_accepted + 1, num_drafted)), k)):
                num_reached[place] += 1
                num_hit[place] += place < num_accepted
        return num_reached, num_hit

    def _observe_many(self, drafts: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
        """Count the drafts for each request. Returns how many were reached and accepted at each place."""
        request_ids, num_drafted, num_accepted = zip(*drafts, strict=True)
        rows, codes = self._counts.add_all(request_ids), outcome_codes(self._k, num_drafted, num_accepted)
        self._counts.values[rows] = self._counts.values[rows] * self._scales[codes] + self._added[codes]
        num_each = np.bincount(codes, minlength=len(self._added))
        return (num_each @ self._reached).tolist(), (num_each @ self._hits).tolist()

    def _count(self, tried: list[float], hit: list[float], num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of one request in one step. Counts of positions without a draft fade, so that a few early
        rejections do not keep a request from trying these positions again."""
        decay = self._memory.decay
        for j in range(min(num_accepted + 1, num_drafted, self._k)):
            tried[j] = tried[j] * decay + 1
            hit[j] = hit[j] * decay + (j < num_accepted)
        for j in range(num_drafted, self._k):
            tried[j] *= FORGETTING
            hit[j] *= FORGETTING

    def _counted(self, before: float, num_drafted: int, num_accepted: int) -> list[list[float]]:
        """Return the result of `_count` for counts that were all `before`: [TRIED to GAINS, place]."""
        tried, hit = [before] * self._k, [before] * self._k
        self._count(tried, hit, num_drafted, num_accepted)
        return [tried, hit, self._no_gains]

    def expect(self, request_ids: Sequence[int], gains: Floats, num_drafts: Ints) -> None:
        """Count the proposed drafts of these requests by their chances of being reached and accepted, `gains` [request,
        place], instead of by results. Results exist only for checked drafts, and drafts with good chances are the ones
        that are checked: counting these alone would be biased."""
        if not request_ids:
            return
        is_draft = self._places < num_drafts[:, None]
        reached = np.ones_like(gains)
        reached[:, 1:] = gains[:, :-1]
        added = np.where(is_draft[:, None], np.stack([reached, gains], axis=1), 0.0)
        rows = self._counts.add_all(request_ids)
        counts = self._counts.values[rows]
        counts[:, :GAINS] = counts[:, :GAINS] * np.where(is_draft, self._memory.decay, 1.0)[:, None] + added
        counts[:, GAINS] = 0.0
        self._counts.values[rows] = counts
        tried, hit = added.sum(0).tolist()
        self._shared.add(is_draft.sum(0).tolist(), tried, hit)

    @property
    def usual_rate(self) -> float:
        """Return the rate at which first drafts are accepted, over all requests."""
        return self._shared.rates[0]

    @property
    def usual_gains(self) -> list[float]:
        """Return the chance that draft j is reached and accepted, over all requests."""
        return list(accumulate(self._shared.rates, mul))

    def forget(self, request_id: int) -> None:
        self._counts.forget(request_id)
        self._idle.pop(request_id, None)

    def gains_of(self, request_ids: Sequence[int]) -> list[list[float]]:
        """Return, for each request, the chance that its draft j is reached and accepted, for every j."""
        if len(request_ids) < MANY:
            return list(map(self.gains, request_ids))
        gains: list[list[float]] = self.gain_table(request_ids).tolist()
        return gains

    def gain_table(self, request_ids: Sequence[int]) -> Floats:
        """Like `gains_of`, for many requests, as an array [request, place]."""
        rows = self._counts.find_all(request_ids)
        counts = self._counts.values[rows]
        prior = np.array(self._prior_rates)
        weights = self._own_weights(counts)[:, None]
        rates = (counts[:, HIT] + weights * prior) / (counts[:, TRIED] + weights)
        gains = np.where(counts[:, GAINS, :1] > 0, counts[:, GAINS], np.multiply.accumulate(rates, axis=1))
        self._counts.values[rows, GAINS] = np.where(counts[:, TRIED, :1] > 0, gains, 0.0)
        return gains

    def gains(self, request_id: int) -> list[float]:
        """Return the chance that draft j of the request is reached and accepted, for every j."""
        row = self._counts.find(request_id)
        tried, hit, known = self._counts.values[row].tolist()
        if known[0]:
            return list(known)
        gains: list[float] = []
        reached, weight = 1.0, self._own_weight(tried[0], hit[0])
        for rate, own_hit, own_tried in zip(self._prior_rates, hit, tried, strict=True):
            reached *= (own_hit + weight * rate) / (own_tried + weight)
            gains.append(reached)
        if tried[0]:
            self._counts.values[row, GAINS] = gains
        return gains

    @property
    def _prior_rates(self) -> list[float]:
        """Return the rates that are expected of a request before it has drafted."""
        return self._shared.rates

    def _own_weight(self, tried: float, hit: float) -> float:
        """Return the weight of the prior rates for one request, as a number of observations. tried, hit: how many first
        drafts of the request were checked and accepted."""
        weight = self._memory.prior_weight
        if not tried:
            return weight
        shared = self.usual_rate
        chance = max(shared * (1 - shared), LEAST_VARIANCE) * (1 / tried + 1 / weight)
        return believed_weight(weight, hit / tried - shared, chance)

    def _own_weights(self, counts: Floats) -> Floats:
        """Like `_own_weight`, for many requests. counts: [request, TRIED to GAINS, place]."""
        weight, shared = self._memory.prior_weight, self.usual_rate
        tried, hit = np.where(counts[:, TRIED, 0] > 0, counts[:, TRIED, 0], np.inf), counts[:, HIT, 0]
        deviations = np.where(tried < np.inf, hit / tried - shared, 0.0)
        chance = max(shared * (1 - shared), LEAST_VARIANCE) * (1 / tried + 1 / weight)
        return weight / np.maximum(1.0, deviations * deviations / chance / USUAL_DEVIATION)

    def is_probe_due(self, request_id: int) -> bool:
        """Count a step of the request without drafts. Returns True if the request should try a draft: a text may begin
        to repeat itself at any time, which is only noticed with drafts."""
        row = self._counts.add(request_id)
        own = self._counts.values[row]
        is_new = own[TRIED, 0] == 0  # and tried soon
        own[:GAINS] *= self.idle_decay
        own[GAINS] = 0.0
        idle = self._idle.get(request_id, self.probe_after * 3 // 4 if is_new else 0) + 1
        self._idle[request_id] = 0 if idle >= self.probe_after else idle
        return idle >= self.probe_after
