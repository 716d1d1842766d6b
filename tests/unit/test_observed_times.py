"""Drafts by the times that steps really take, where the costs that were measured at start-up are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider.core.costs import DraftCost, StepCosts
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.observed_times import ENOUGH, FORGET_AFTER, LAST, READING, ObservedTimes
from tests.unit.test_resting_drafter import Serving

K = 4
# Null rows all go to the same experts; the rows of drafts go to others, and read as many weights again.
MEASURED = StepCosts((1, 8, 40), (1.0, 1.05, 1.1), drafting=(DraftCost(1, 0.05, 0.05),), is_padded=True)
TRUE = StepCosts((1, 2, 8, 16, 40), (1.0, 1.6, 2.4, 3.8, 5.0), drafting=(DraftCost(1, 0.3, 0.3),), is_padded=True)


def run(true: StepCosts, batch: int, rate: float, host: Callable[[int], float] = lambda num_wanted: 0.0, *,
        slowness: Callable[[int], float] = lambda step: 1.0,
        steps: int = 3000) -> tuple[float, float]:
    """What the chooser reaches of the speed without drafts, and with every number of drafts, at best."""
    chooser = auto_drafts(K, MEASURED, always_propose=False)
    serving = Serving(chooser, true, batch, lambda request, place: rate, length=2000, has_levels=False, host=host,
                      slowness=slowness)
    served = [serving.step() for _ in range(steps)][steps // 4 :]
    reached = sum(step.tokens for step in served) / sum(step.seconds for step in served)

    def speed(drafts: int) -> float:
        seconds = true.step(batch * (1 + drafts), batch) + true.draft(drafts, batch)
        return batch * sum(rate**place for place in range(1 + drafts)) / max(seconds, host(drafts))

    return reached / speed(0), reached / max(map(speed, range(K + 1)))


@pytest.mark.parametrize("rate", [0.2, 0.5])
@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_that_seemed_cheap_are_given_up(batch: int, rate: float) -> None:
    of_plain, _ = run(TRUE, batch, rate)
    assert of_plain > 0.965


@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_a_machine_whose_speed_changes_drafts_on(rate: float) -> None:
    """All steps take up to 1.6 times as long for some hundred steps. Only those with drafts are seen meanwhile."""
    _, of_best = run(MEASURED, 1, rate, slowness=lambda step: (1.0, 1.6, 0.9, 1.3)[step // 300 % 4])
    assert of_best > 0.95


def test_a_host_that_is_slower_with_drafts_counts() -> None:
    """The device would be 1.6 times as fast with drafts; the host takes three times as long for such a step."""
    of_plain, _ = run(MEASURED, 16, 0.6, lambda num_wanted: 4.5 if num_wanted else 1.5)
    assert of_plain > 0.95, "each try costs as much as eight steps"
    _, of_best = run(MEASURED, 16, 0.6, lambda num_wanted: 2.0 if num_wanted else 1.5)
    assert of_best > 0.95, "drafts still pay, and more of them cost no time"


def test_right_costs_are_not_doubted() -> None:
    _, of_best = run(MEASURED, 1, 0.8)
    assert of_best > 0.97


def test_a_few_long_steps_change_nothing() -> None:
    times, chance = ObservedTimes(), random.Random(0)
    for _ in range(100):
        times.observe(4, 2, 9, 1.0, 50.0 if chance.random() < 0.2 else 1.5)
    assert times.estimate(4, 2) == times.estimate(7, 2) == (1.5, True)


def test_what_was_not_seen_is_estimated_by_what_is_nearest() -> None:
    times = ObservedTimes()
    assert times.estimate(4, 2) == (1.0, False), "as foreseen"

    def see(num_requests: int, depth: int, ratio: float) -> None:
        for _ in range(ENOUGH):
            times.observe(num_requests, depth, num_requests, 1.0, ratio)

    see(4, 2, 1.5)
    assert times.estimate(4, 3) == times.estimate(4, 0) == times.estimate(4, READING) == (1.5, False)
    assert times.estimate(8, 2) == (1.5, True) and times.estimate(64, 2) == (1.5, False), "sizes that are far apart"
    see(4, READING, 1.2)
    assert times.estimate(4, 0) == (1.2, True), "a drafter that reads along shows what steps without drafts take"
    see(8, 2, 3.0)
    assert times.estimate(8, READING) == (pytest.approx(2.4), True), "depths compare as in steps of half the requests"
    see(4, 0, 1.0)
    assert times.estimate(4, 0) == (1.0, True) and times.estimate(4, READING) == (1.2, True)


def test_what_was_not_seen_for_long_is_tried_again() -> None:
    times = ObservedTimes()
    for _ in range(ENOUGH - 1):
        times.observe(1, 1, 9, 1.0, 3.0)
    assert times.ratio(1, 1) == 1.0, "too few to go by"
    times.observe(1, 1, 9, 1.0, 3.0)
    assert times.ratio(1, 1) == 3.0
    for _ in range(FORGET_AFTER):
        times.observe(1, 0, 9, 1.0, 1.0)
    assert times.ratio(1, 1) == 3.0
    times.observe(1, 0, 9, 1.0, 1.0)
    assert times.ratio(1, 1) == 1.0
    for _ in range(LAST):
        times.observe(1, 1, 9, 1.0, 2.0)
    assert times.ratio(1, 1) == 2.0


@pytest.mark.parametrize("seed", range(4))
def test_noise_over_many_short_runs_is_no_slowness(seed: int) -> None:
    """Sizes change every few steps, and each step is up to 10% off. The machine keeps its speed for 5,000 steps, then
    takes 1.5 times as long for everything."""
    times, chance = ObservedTimes(), random.Random(seed)

    def observe(steps: int, slowness: float) -> None:
        while steps > 0:
            requests, depth = chance.choice((3, 6, 12, 24)), chance.randrange(K)
            for _ in range(min(steps, chance.randrange(5, 11))):
                times.observe(requests, depth, requests * (1 + depth), 1.0, slowness * (1 + chance.gauss(0, 0.05)))
                steps -= 1

    observe(5000, 1.0)
    assert times.slowness == pytest.approx(1.0, abs=0.05)
    for _ in range(12):
        times.observe(12, 2, 36, 1.0, 1 + chance.gauss(0, 0.05))
    for _ in range(12):
        times.observe(12, 2, 36, 1.0, 1.5 * (1 + chance.gauss(0, 0.05)))
    assert times.slowness == pytest.approx(1.5, abs=0.2), "one size tells of a machine that is slower for all"
