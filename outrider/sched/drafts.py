"""How many drafts each request gets in the next step: costs and acceptance in, k out.

A draft pays if the tokens it is expected to add are worth the time it adds to the step. Costs are measured at start-up;
acceptance is kept per request and position, with decay, and drifts back to what requests usually show, so that one that
has stopped drafting tries again now and then. Knows no drafter by name.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from outrider.core import RequestResult, ScheduledBatch, StepResult
from outrider.sched.request import Request

DECAY = 0.9  # of one request's counts, per observation
SHARED_DECAY = 0.999  # of the counts over all requests
PRIOR_WEIGHT = 2.0  # observations that the shared rate is worth to a new request
FORGETTING = 0.95  # of a request's counts, per step without drafts
PROBE_AFTER = 32  # steps without drafts until a request tries one, whatever the rates say
PROBE_ALL_AFTER = 64  # the same for all requests at once, where one alone would cost as much as all
MIN_GAIN = 1.03  # less than this is within the noise of the costs


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step by its tokens, and of the drafter by its drafts: sorted points, linear in between."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_fixed: float = 0.0  # a proposal's first pass
    draft_each: float = 0.0  # each further draft
    is_padded: bool = False  # steps run at equal token counts for all requests, as captured ones do

    def step(self, tokens: int, requests: int = 1) -> float:
        if self.is_padded:
            tokens = -(-tokens // requests) * requests
        at = bisect_right(self.tokens, tokens)
        if at == 0:
            return self.seconds[0]
        if at == len(self.tokens):
            if at == 1:
                return self.seconds[0]
            at -= 1  # beyond the last point: the last slope goes on
        low, high = self.tokens[at - 1], self.tokens[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (high - low)
        return self.seconds[at - 1] + slope * (tokens - low)

    def draft(self, most: int) -> float:
        return self.draft_fixed + self.draft_each * (most - 1) if most else 0.0


class FixedDrafts:
    """k drafts for everyone who allows it."""

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, requests: list[Request], exact: bool) -> int:
        for request in requests:
            request.drafts_wanted = cap(request, self._k, exact)
        return self._k

    def observe(self, request: Request, result: RequestResult) -> None: ...

    def observe_step(self, batch: ScheduledBatch, result: StepResult) -> None: ...

    def forget(self, request: Request) -> None: ...


def cap(request: Request, k: int, exact: bool) -> int:
    """`exact`: the last result is back, so the drafts that wait on the device are known."""
    if request.max_drafts is not None:
        k = min(k, request.max_drafts)
    return min(k, request.num_proposed) if exact else k


@dataclass(slots=True)
class Rates:
    """Acceptance by position: of the drafts that were reached, how many were accepted."""

    tried: list[float]
    hit: list[float]
    gains: list[float] = field(default_factory=list)  # chance that draft j is reached and accepted
    idle: int = 0  # steps without drafts

    @classmethod
    def of(cls, k: int) -> Rates:
        return cls([0.0] * k, [0.0] * k)

    def observe(self, drafted: int, accepted: int, decay: float) -> None:
        for j in range(min(accepted + 1, drafted, len(self.tried))):
            self.tried[j] = self.tried[j] * decay + 1
            self.hit[j] = self.hit[j] * decay + (j < accepted)

    def fade(self, factor: float) -> None:
        self.tried = [t * factor for t in self.tried]
        self.hit = [h * factor for h in self.hit]


class AutoDrafts:
    """For every step the counts with the most expected tokens per second, none included."""

    def __init__(self, k: int, costs: StepCosts, *, always_propose: bool) -> None:
        self._k = k
        self._costs = costs
        self._always_propose = always_propose  # a proposal costs nothing worth saving
        self._shared = Rates([PRIOR_WEIGHT] * k, [PRIOR_WEIGHT * 0.7] * k)
        self._rates: dict[int, Rates] = {}
        # Where a step is padded to equal counts, or the drafter rests while nobody drafts, all try together.
        self._probes_alone = always_propose and not costs.is_padded
        self._since_drafts = 0  # steps in which drafting did not pay
        self.chosen = [0] * (k + 1)  # how often each k was chosen

    def choose(self, requests: list[Request], exact: bool) -> int:
        """Sets `drafts_wanted`; returns how many drafts to propose for the step after."""
        candidates: list[tuple[float, Request]] = []
        running = 0
        for request in requests:
            request.drafts_wanted = 0
            if request.known > request.bound.at_most:
                continue  # still computes its prompt
            running += 1
            most = cap(request, self._k, exact)
            if most:
                candidates += [(gain, request) for gain in self._gains(request)[:most]]
        best = self._best_count(running, candidates)
        for _, request in candidates[:best]:
            request.drafts_wanted += 1
        if self._probes_alone:
            for request in {request.id: request for _, request in candidates[best:]}.values():
                if not request.drafts_wanted:
                    self._maybe_probe(request)
        elif best == 0 and self._since_drafts and self._since_drafts % PROBE_ALL_AFTER == 0:
            for _, request in candidates:
                request.drafts_wanted = 1
        for request in requests:
            self.chosen[request.drafts_wanted] += 1
        return self._proposal(best)

    def observe(self, request: Request, result: RequestResult) -> None:
        if result.num_drafted:
            rates = self._rates.get(request.id)
            if rates is None:
                rates = self._rates[request.id] = Rates.of(self._k)
            rates.observe(result.num_drafted, result.num_accepted, DECAY)
            rates.gains = []
            self._shared.observe(result.num_drafted, result.num_accepted, SHARED_DECAY)

    def observe_step(self, batch: ScheduledBatch, result: StepResult) -> None: ...

    def forget(self, request: Request) -> None:
        self._rates.pop(request.id, None)

    def _best_count(self, running: int, candidates: list[tuple[float, Request]]) -> int:
        """Drafts over all requests, taken by falling chance: where expected tokens per second are most."""
        candidates.sort(key=lambda pair: -pair[0])
        plain = running / self._costs.step(max(running, 1), max(running, 1))
        best, best_rate, expected = 0, plain * MIN_GAIN, float(running)
        deepest: dict[int, int] = {}
        most = 0
        for count, (gain, request) in enumerate(candidates, start=1):
            expected += gain
            deepest[request.id] = deepest.get(request.id, 0) + 1
            most = max(most, deepest[request.id])
            rate = expected / (self._costs.step(running + count, running) + self._costs.draft(most))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _proposal(self, best: int) -> int:
        """Cold when drafting does not pay, but for the step before everyone tries again."""
        self._since_drafts = 0 if best else self._since_drafts + 1
        is_before_probe = self._since_drafts % PROBE_ALL_AFTER == 0
        return self._k if self._always_propose or best or is_before_probe else 0

    def _gains(self, request: Request) -> list[float]:
        rates = self._rates.get(request.id)
        if rates is not None and rates.gains:
            return rates.gains
        shared, gains, reached = self._shared, [], 1.0
        for j in range(self._k):
            prior = shared.hit[j] / shared.tried[j]
            if rates is None:
                reached *= prior
            else:
                reached *= (rates.hit[j] + PRIOR_WEIGHT * prior) / (rates.tried[j] + PRIOR_WEIGHT)
            gains.append(reached)
        if rates is not None:
            rates.gains = gains
        return gains

    def _maybe_probe(self, request: Request) -> None:
        """A text may begin to repeat itself at any time, and without drafts nobody would notice."""
        rates = self._rates.get(request.id)
        if rates is None:
            rates = self._rates[request.id] = Rates.of(self._k)
            rates.idle = PROBE_AFTER * 3 // 4  # a new request is tried soon
        rates.fade(FORGETTING)
        rates.gains = []
        rates.idle += 1
        if rates.idle >= PROBE_AFTER:
            rates.idle = 0
            request.drafts_wanted = 1
