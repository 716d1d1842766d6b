"""How many drafts each request gets in the next step: costs and acceptance in, k out.

A draft pays if the tokens it is expected to add are worth the time it adds to the step. Costs are measured at start-up;
acceptance is kept per request and position, with decay, and drifts back to what requests usually show, so that one that
has stopped drafting tries again now and then. Knows no drafter by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core import RequestResult, ScheduledBatch, StepResult
from outrider.core.costs import StepCosts
from outrider.sched.request import Request, State

DECAY = 0.9  # of one request's counts, per observation
SHARED_DECAY = 0.999  # of the counts over all requests
PRIOR_WEIGHT = 2.0  # observations that the shared rate is worth to a new request
FORGETTING = 0.95  # of a request's counts, per step without drafts
PROBE_AFTER = 32  # steps without drafts until a request tries one, whatever the rates say
PROBE_ALL_AFTER = 64  # the same for all requests at once, where one alone would cost as much as all
PROBE_DEPTH_AFTER = 128  # steps until all requests try one draft more than has paid
MIN_GAIN = 1.03  # less than this is within the noise of the costs

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


def is_running(request: Request) -> bool:
    """Whether its prompt is computed, or will be by the steps in flight."""
    return request.state is State.RUNNING and request.known <= request.bound.at_most


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

    def observe(self, drafted: int, accepted: int, decay: float, forgetting: float = FORGETTING) -> None:
        """Places beyond the drafts were not tried: what is known of them grows old, or bad luck would last."""
        for j in range(min(accepted + 1, drafted, len(self.tried))):
            self.tried[j] = self.tried[j] * decay + 1
            self.hit[j] = self.hit[j] * decay + (j < accepted)
        for j in range(drafted, len(self.tried)):
            self.tried[j] *= forgetting
            self.hit[j] *= forgetting

    def fade(self, factor: float) -> None:
        self.tried = [t * factor for t in self.tried]
        self.hit = [h * factor for h in self.hit]


class Depth:
    """One number of drafts for all requests, step after step: what pays, no more than was proposed in the step before,
    and now and then one draft more, to see whether it pays by now."""

    def __init__(self, k: int) -> None:
        self._k = k
        self.proposed = 0  # by the last step
        self._tried = 0  # drafts that the last step proposed for a try
        self._since = 0  # steps since the last try

    def next(self, best: int) -> int:
        """Drafts for the coming step, when `best` would pay."""
        now = max(min(best, self.proposed), self._tried)
        interval = PROBE_DEPTH_AFTER if best else PROBE_ALL_AFTER
        self._since += 1
        self._tried = 0
        if self._since >= interval and best < self._k:
            self._since, self._tried = 0, best + 1
        self.proposed = max(best, self._tried)
        return now


class AutoDrafts:
    """For every step the counts with the most expected tokens per second, none included."""

    def __init__(self, k: int, costs: StepCosts, *, always_propose: bool) -> None:
        self._k = k
        self._costs = costs
        self._always_propose = always_propose  # a proposal costs nothing worth saving
        self._shared = Rates([PRIOR_WEIGHT] * k, [PRIOR_WEIGHT * 0.7] * k)
        self._rates: dict[int, Rates] = {}
        self._probes_alone = always_propose  # where the drafter rests while nobody drafts, all try together
        self._since_drafts = 0  # steps in which drafting did not pay
        self._depth = Depth(k)
        self.chosen = [0] * (k + 1)  # how often each k was chosen

    def choose(self, requests: list[Request], exact: bool) -> int:
        """Sets `drafts_wanted`; returns how many drafts to propose for the step after."""
        propose = self._choose_depth(requests, exact) if self._costs.is_padded else self._choose_each(requests, exact)
        for request in requests:
            self.chosen[request.drafts_wanted] += 1
        return propose

    def _choose_depth(self, requests: list[Request], exact: bool) -> int:
        """Where a step is padded to equal counts, a draft of one request costs what a draft of each of them costs: the
        same number for all."""
        now = self._depth.next(self._best_depth(requests))
        for request in requests:
            request.drafts_wanted = min(now, cap(request, self._k, exact)) if is_running(request) else 0
        return self._k if self._always_propose else self._depth.proposed

    def _best_depth(self, requests: list[Request]) -> int:
        """Those that still compute their prompts count too: they will run soon, and the drafter must see them."""
        count = len(requests)
        if not count:
            return 0
        expected = [0.0] * self._k  # drafts accepted at each place, over all requests
        for request in requests:
            for j, gain in enumerate(self._gains(request)[: cap(request, self._k, False)]):
                expected[j] += gain
        reading = self._costs.read([request.bound.at_most for request in requests])
        tokens = float(count)
        best, best_rate = 0, tokens / (self._costs.step(count, count) + reading) * MIN_GAIN
        for depth, gain in enumerate(expected, start=1):
            tokens += gain
            seconds = self._costs.step(count * (1 + depth), count) + reading + self._costs.draft(depth, count)
            if tokens / seconds > best_rate:
                best, best_rate = depth, tokens / seconds
        return best

    def _choose_each(self, requests: list[Request], exact: bool) -> int:
        running = [request for request in requests if is_running(request)]
        for request in requests:
            request.drafts_wanted = 0
        if not running:  # a drafter must see the prompts if it is to guess what follows them
            return self._proposal(self._best_count(len(requests), self._candidates(requests, exact=False)))
        candidates = self._candidates(running, exact)
        best = self._best_count(len(running), candidates)
        for _, request in candidates[:best]:
            request.drafts_wanted += 1
        if self._probes_alone:
            for request in {request.id: request for _, request in candidates[best:]}.values():
                if not request.drafts_wanted:
                    self._maybe_probe(request)
        elif best == 0 and self._since_drafts and self._since_drafts % PROBE_ALL_AFTER == 0:
            for _, request in candidates:
                request.drafts_wanted = 1
        return self._proposal(best)

    def observe(self, request: Request, result: RequestResult) -> None:
        if result.num_drafted:
            rates = self._rates.get(request.id)
            if rates is None:
                rates = self._rates[request.id] = Rates.of(self._k)
            rates.observe(result.num_drafted, result.num_accepted, DECAY)
            rates.gains = []
            self._shared.observe(result.num_drafted, result.num_accepted, SHARED_DECAY, forgetting=1.0)

    def observe_step(self, batch: ScheduledBatch, result: StepResult) -> None: ...

    def forget(self, request: Request) -> None:
        self._rates.pop(request.id, None)

    def _candidates(self, requests: list[Request], exact: bool) -> list[tuple[float, Request]]:
        return [(gain, request) for request in requests
                for gain in self._gains(request)[: cap(request, self._k, exact)]]  # fmt: skip

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
            rate = expected / (self._costs.step(running + count, running) + self._costs.draft(most, running))
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
