"""SpreadAcceptance: estimates acceptance by request. The more requests differ, the more a request's own counts weigh.

Twenty observations of one request are noisy, and distributing token rows by noise is worse than giving all requests the
same number of drafts. So the variance between requests is estimated, minus the variance by chance. The result says how
many observations the mean of all requests is worth (empirical Bayes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.speculation.acceptance import GAINS, Acceptance, Memory
from outrider.speculation.request_table import Floats

# Of a drafter that misses nothing while it rests. Counts are believed a little longer than elsewhere, because plans for
# many requests hold for some steps.
STEADY = Memory(0.95, 2.0, 2.0)
IDLE_DECAY = 0.985  # the same, per plan without drafts
PROBE_PLANS = 16  # plans without drafts until a request tries one
NOISE_MARGIN = 1.5  # requests differ if their variance exceeds this many times that of chance
LEAST_SPREAD = 0.01  # variance between requests from which it pays to tell them apart
LEAST_WEIGHT = 1.0  # observations that the mean is worth, however much requests differ
LEAST_TRIED = 1.0  # observations of a request whose rate counts for the variance
FEWEST = 4  # requests from whose rates a variance can be estimated


class SpreadAcceptance(Acceptance):
    """Acceptance rates of every request. While requests seem to be alike, these are the rates of `Acceptance`.
    Otherwise each rate is moved towards the mean of the requests, by as much as chance could have moved it away from
    the mean."""

    probe_after = PROBE_PLANS
    idle_decay = IDLE_DECAY

    def __init__(self, k: int, memory: Memory = STEADY) -> None:
        super().__init__(k, memory)
        self.are_alike = True  # requests differ no more than by chance
        self._mean = 0.0  # of the first draft's rate over requests that differ
        self._weight = memory.prior_weight  # observations that the mean is worth to a request

    def observe(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        super().observe(drafts)
        # A request that only tries one now and then is to try the next at once.
        self._idle |= {request_id: PROBE_PLANS for request_id, _, num_accepted in drafts if num_accepted}

    def learn_spread(self, request_ids: Sequence[int]) -> None:
        """Estimate again how much these requests differ, from the acceptance rates of their first drafts."""
        rows = self._counts.find_all(request_ids)
        self._counts.values[rows, GAINS] = 0.0
        firsts = self._counts.values[rows, :GAINS, 0].tolist()
        tried = [(own_hit / own_tried, own_tried) for own_tried, own_hit in firsts if own_tried >= LEAST_TRIED]
        self.are_alike, self._weight = True, self._memory.prior_weight
        if len(tried) < FEWEST:
            return
        mean = sum(rate for rate, _ in tried) / len(tried)
        of_one = mean * (1 - mean)  # variance of one observation
        variance = sum((rate - mean) ** 2 for rate, _ in tried) / (len(tried) - 1)
        chance = of_one * sum(1 / effective_observations(count, self._memory.decay) for _, count in tried) / len(tried)
        between = variance - NOISE_MARGIN * chance
        if between > LEAST_SPREAD:
            self.are_alike, self._mean = False, mean
            self._weight = max(LEAST_WEIGHT, of_one / between - 1)

    @property
    def _prior_rates(self) -> list[float]:
        rates = super()._prior_rates
        return rates if self.are_alike else [self._mean, *rates[1:]]

    def _own_weight(self, tried: float, hit: float) -> float:
        return super()._own_weight(tried, hit) if self.are_alike else self._weight

    def _own_weights(self, counts: Floats) -> Floats:
        return super()._own_weights(counts) if self.are_alike else np.full(len(counts), self._weight)


def effective_observations(count: float, decay: float) -> float:
    """Return the effective number of observations of a decayed mean whose weights sum to `count`: a mean of that many
    independent observations has the same variance."""
    return count * (1 + decay) / (2 - count * (1 - decay))
