"""A drafter with a network that rests misses the text. It is tried again, for a small share of the time, so that good
traffic wakes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from outrider.core import RequestResult, ScheduledBatch
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.decode_sizes import FEW
from outrider.core.draft_confidence import LEVEL_BITS
from outrider.core.params import SamplingParams
from outrider.core.step_messages import DraftOrders
from outrider.sched.request import Request, State
from outrider.speculation.acceptance import PATIENT, Acceptance
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import DraftCounts
from outrider.speculation.drafter_tries import READ_STEPS, TRY_SHARE, TRY_STEPS, DrafterSight, DrafterTries
from outrider.speculation.learned_drafts import LEAST_LEFT
from outrider.speculation.observed_times import ObservedTimes
from tests.unit.made_requests import made_request

K = 2
LEVEL = 9  # of every draft: a drafter that is as sure of bad drafts as of good ones
UNCAPTURED = StepCosts((1, 2, 16), (1.0, 1.08, 2.5), drafting=(DraftCost(1, 0.2, 0.1),))
CAPTURED = StepCosts((1, 64, 256), (1.0, 1.1, 1.5), drafting=(DraftCost(1, 0.15, 0.1),), is_padded=True)


class Served(NamedTuple):
    """One step of some requests."""

    seconds: float
    plain: float  # seconds of the step without a drafter
    tokens: int
    num_drafts: int


class Serving:
    """Requests of a stream that decode side by side. A draft is right by chance, if the drafter has seen the request
    from its prompt on, or its last `READ_STEPS` tokens; else it is wrong."""

    def __init__(self, chooser: DraftCounts, costs: StepCosts, batch: int, rate_of: Callable[[int, int], float], *,
                 length: int, has_levels: bool, host: Callable[[int], float] = lambda num_wanted: 0.0,
                 slowness: Callable[[int], float] = lambda step: 1.0) -> None:
        """costs: those that are true. rate_of: chance of a draft, by the request's number and position. length: tokens
        of every answer. host: seconds that the host needs for a step, by the drafts that are proposed. slowness: how
        many times as long steps take than they are counted for, by their number."""
        self._chooser, self._costs, self._batch, self._rate_of = chooser, costs, batch, rate_of
        self._length, self._has_levels, self._host, self._num_steps = length, has_levels, host, 0
        self._slowness = slowness
        self._chance, self.num_started = random.Random(7), 0
        self._live: dict[int, Request] = {}
        self._seen: dict[int, int] = {}  # tokens that the drafter has seen in a row, by request

    def step(self) -> Served:
        decoding = list(self._live.values())
        plan = self._chooser.choose(decoding, is_exact=not self._costs.is_padded)
        num_wanted = max(plan.num_wanted, self._start())
        assert all(type(number) is int for number in (*plan.num_drafts, num_wanted)), "torch takes no bool for a size"
        count, rows, tokens = max(1, len(decoding)), len(decoding) + sum(plan.num_drafts), 0
        for request, num_drafts in zip(decoding, plan.num_drafts, strict=True):
            tokens += self._decode(request, num_drafts, num_wanted)
        for request in [own for own in self._live.values() if len(own.token_ids) >= own.end_len]:
            del self._live[request.id]
            self._chooser.forget(request)
        seconds = self._costs.step(max(1, rows), count) + self._costs.draft(num_wanted, count)
        seconds = max(seconds, self._host(num_wanted))
        self._num_steps += 1
        ids, ones = [request.id for request in decoding], [1] * len(decoding)
        batch = ScheduledBatch(self._num_steps, ids, ones, ids, ones, plan.num_drafts, [True] * len(ids), ones,
                               drafting=DraftOrders(num_wanted))
        if decoding and plan.sharing is None:
            self._chooser.observe_step(batch, seconds * self._slowness(self._num_steps))
        return Served(seconds, max(self._costs.step(count, count), self._host(0)), tokens, sum(plan.num_drafts))

    def _start(self) -> int:
        """Start requests whose prompts this step computes. Returns the drafts that it must propose for them."""
        new = []
        while len(self._live) < self._batch:
            request = Request(self.num_started, made_request([5], SamplingParams()), 1 + self._length)
            request.state, request.admitted_len, request.bound.at_most = State.RUNNING, 1, 1
            self._live[request.id] = request
            new.append(request)
            self.num_started += 1
        num_wanted = self._chooser.begin(new) if new else 0
        for request in new:
            self._seen[request.id] = 1 << 30 if num_wanted else 0
            request.num_proposed = num_wanted
        return num_wanted

    def _decode(self, request: Request, num_drafts: int, num_wanted: int) -> int:
        alive, accepted = min(num_drafts, request.num_proposed), 0
        rate = self._rate_of(request.id, len(request.token_ids)) if self._seen[request.id] >= READ_STEPS else 0.0
        while accepted < alive and self._chance.random() < rate:
            accepted += 1
        request.token_ids += [1] * (1 + accepted)
        request.bound.at_most = len(request.token_ids)
        self._seen[request.id] = self._seen[request.id] + 1 + accepted if num_wanted else 0
        request.num_proposed = num_wanted
        request.checked_levels = request.levels
        request.levels = sum(LEVEL << LEVEL_BITS * place for place in range(num_wanted)) if self._has_levels else 0
        result = RequestResult(request.id, 0, [1] * (1 + accepted), 1 + accepted, alive, accepted, num_wanted)
        self._chooser.observe([(request, result, num_drafts)])
        return 1 + accepted


kinds = pytest.mark.parametrize(("costs", "batch", "has_levels"), [
    (UNCAPTURED, 1, False), (UNCAPTURED, 1, True), (UNCAPTURED, 3, True), (CAPTURED, 1, False), (CAPTURED, 4, True),
    (CAPTURED, 16, False),
])


def serving(costs: StepCosts, batch: int, has_levels: bool, rate_of: Callable[[int, int], float],
            length: int | None = None) -> Serving:
    """Answers are too short to be read along with, unless so many requests run that one that starts cannot pay alone
    for the drafter."""
    length = length or (LEAST_LEFT - 20 if batch <= FEW else LEAST_LEFT + 40)
    return Serving(auto_drafts(K, costs, always_propose=False), costs, batch, rate_of, length=length,
                   has_levels=has_levels)


@kinds
def test_a_drafter_that_never_pays_costs_two_percent_of_the_time_at_most(costs: StepCosts, batch: int,
                                                                         has_levels: bool) -> None:
    served = serving(costs, batch, has_levels, lambda request, position: 0.05)
    for _ in range(1000):  # it is given a chance
        served.step()
    steps = [served.step() for _ in range(3000)]
    assert sum(step.seconds for step in steps) < 1.02 * sum(step.plain for step in steps)
    assert sum(step.num_drafts for step in steps) > 0, "it is tried again and again"


@kinds
def test_a_drafter_that_rested_in_poor_traffic_drafts_again_when_traffic_is_good(costs: StepCosts, batch: int,
                                                                                 has_levels: bool) -> None:
    good_from = 1 << 30
    served = serving(costs, batch, has_levels, lambda request, position: 0.9 if request >= good_from else 0.05)
    poor = [served.step() for _ in range(1500)]
    assert sum(step.num_drafts for step in poor[-200:]) < 40 * batch
    good_from = served.num_started
    for _ in range(1500):
        served.step()
    good = [served.step() for _ in range(300)]
    best = max(sum(0.9 ** place for place in range(1 + count)) / (costs.step((1 + count) * batch, batch)
               + costs.draft(count, batch)) for count in range(K + 1)) * batch
    assert sum(step.tokens for step in good) / sum(step.seconds for step in good) > 0.85 * best


@pytest.mark.parametrize("costs", [UNCAPTURED, CAPTURED])
def test_a_long_answer_that_becomes_easy_is_drafted_again(costs: StepCosts) -> None:
    """No request starts. The drafter reads along for a while before its drafts are tried."""
    served = serving(costs, 1, False, lambda request, position: 0.9 if position > 1500 else 0.05, length=20000)
    poor, turning, good = ([served.step() for _ in range(count)] for count in (1450, 1500, 200))
    assert sum(step.num_drafts for step in poor[-500:]) <= 2 * TRY_STEPS
    assert sum(step.num_drafts for step in good) > 150
    assert sum(step.seconds for step in poor[500:]) < 1.02 * sum(step.plain for step in poor[500:])


def test_a_drafter_sees_a_request_from_its_start_on_or_after_reading_for_a_while() -> None:
    sight = DrafterSight(misses_rests=True)
    sight.next_step(num_wanted=0)
    sight.begin(0)
    assert sight.sees(0), "if the drafter proposes in the step in which the request begins"
    sight.next_step(num_wanted=0)
    assert not sight.sees(0)
    sight.begin(1)
    for _ in range(READ_STEPS + 1):
        assert sight.sees(1) and not sight.sees(0)
        sight.next_step(num_wanted=1)
    assert sight.sees(0) and sight.sees_all
    sight.next_step(num_wanted=0)
    assert not sight.sees(0) and not sight.sees(1), "it has rested for a step"
    assert DrafterSight(misses_rests=False).sees(5), "a lookup misses nothing"


def test_tries_cost_no_more_than_their_share_of_the_time() -> None:
    tries, count = DrafterTries(UNCAPTURED, ObservedTimes()), 0
    for step in range(10000):
        tries.rest(1)
        count += tries.begin([step], 1, 0.0)
    each = TRY_STEPS * (UNCAPTURED.step(2) + UNCAPTURED.draft(1) - UNCAPTURED.step(1)) + UNCAPTURED.draft(1)
    assert count == pytest.approx(TRY_SHARE * 10000 / each, rel=0.1)
    assert not DrafterTries(UNCAPTURED, ObservedTimes()).begin([0], 1, 1.0), "nothing is saved yet"
    hopeless = DrafterTries(StepCosts((1, 2), (1.0, 2.0)), ObservedTimes())
    for _ in range(10000):
        hopeless.rest(1)
    assert not hopeless.begin([0], 1, 1.0), "no acceptance would pay"


def test_a_request_unlike_the_others_is_believed_after_a_few_drafts() -> None:
    """All others had next to no drafts accepted, or nearly all. One that is like them is not judged by its luck."""
    for usual, own in ((0, 1), (1, 0)):
        acceptance = Acceptance(1, PATIENT)
        for _ in range(1000):
            acceptance.observe([(0, 1, usual)])
        for _ in range(TRY_STEPS):
            acceptance.observe([(1, 1, own)])
        assert abs(acceptance.gains(1)[0] - own) < 0.25
    alike = Acceptance(1, PATIENT)
    for step in range(1000):
        alike.observe([(0, 1, step % 2)])
    for step in range(TRY_STEPS):
        alike.observe([(1, 1, int(step < 2))])
    assert abs(alike.gains(1)[0] - 0.5) < 0.1
