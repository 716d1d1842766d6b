"""SpreadAcceptance: estimates acceptance by request. The more requests differ, the more a request's own counts weigh.

Twenty observations of one request are noisy, and distributing token rows by noise is worse than giving all requests the
same number of drafts. So the variance between requests is estimated, minus the variance by chance. The result says how
many observations the mean of all requests is worth (empirical Bayes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.speculation.acceptance import Acceptance, Memory, Rates

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

    def __init__(self, k: int, memory: Memory = STEADY) -> None:
        super().__init__(k, memory)
        self.are_alike = True  # requests differ no more than by chance
        self._mean = 0.0  # of the first draft's rate over requests that differ
        self._weight = memory.prior_weight  # observations that the mean is worth to a request

    def observe(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        super().observe(drafts)
        for request_id, _, num_accepted in drafts:
            if num_accepted:  # a request that only tries one now and then is to try the next at once
                self._rates[request_id].idle = PROBE_PLANS

    def learn_spread(self, request_ids: Iterable[int]) -> None:
        """Estimate again how much these requests differ, from the acceptance rates of their first drafts."""
        found = [own for request_id in request_ids if (own := self._rates.get(request_id)) is not None]
        for own in found:
            own.gains = []
        tried = [(own.hit[0] / own.tried[0], own.tried[0]) for own in found if own.tried[0] >= LEAST_TRIED]
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

    def gains(self, request_id: int) -> list[float]:
        if self.are_alike:
            return super().gains(request_id)
        rates = self._rates.get(request_id)
        if rates is not None and rates.gains:
            return rates.gains
        weight, gains, reached = self._weight, [], 1.0
        for place, (hit, tried) in enumerate(zip(self._shared.hit, self._shared.tried, strict=True)):
            rate = hit / tried if place else self._mean
            if rates is not None:
                rate = (rates.hit[place] + weight * rate) / (rates.tried[place] + weight)
            reached *= rate
            gains.append(reached)
        if rates is not None:
            rates.gains = gains
        return gains

    def _fade(self, rates: Rates) -> None:
        rates.fade(IDLE_DECAY)


def effective_observations(count: float, decay: float) -> float:
    """The effective number of observations of a decayed mean whose weights sum to `count`: a mean of that many
    independent observations has the same variance."""
    return count * (1 + decay) / (2 - count * (1 - decay))
