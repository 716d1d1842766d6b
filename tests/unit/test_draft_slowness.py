"""Drafts on a machine that other processes disturb: they are dropped where they do not pay, within a few steps, and
taken up again when the machine is quiet. Made costs; no clock."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from outrider.core.costs import DraftCost, StepCosts
from outrider.speculation.choosers import auto_drafts
from tests.unit.test_resting_drafter import Served, Serving

K = 3
MEASURED = StepCosts((1, 2, 4, 16), (1.0, 1.04, 1.12, 2.5), drafting=(DraftCost(1, 0.2, 0.07),))
LOOKUP = StepCosts((1, 2, 4, 16), (1.0, 1.1, 1.3, 2.5))
BUSY = (300, 700)  # steps


@dataclass
class Disturbed:
    """Costs of which what drafts add takes `stretch` times as long now."""

    quiet: StepCosts
    stretch: float = 1.0
    is_padded = False

    def step(self, tokens: int, requests: int = 1) -> float:
        plain = self.quiet.step(requests, requests)
        return plain + self.stretch * (self.quiet.step(tokens, requests) - plain)

    def draft(self, most: int, requests: int = 1) -> float:
        return self.stretch * self.quiet.draft(most, requests)


def run(costs: StepCosts, rate: float, *, stretch: float, slowness: float, noise: float, batch: int = 1,
        has_levels: bool = False, length: int = 90, steps: int = 1000) -> list[Served]:
    """Steps of which those in BUSY take `slowness` times as long, and what drafts add `stretch` times that. noise: the
    deviation of the logarithm of a busy step's time; a quiet one has a twentieth."""
    true, chance = Disturbed(costs), random.Random(3)

    def is_busy(step: int) -> bool:
        return BUSY[0] <= step < BUSY[1]

    def seen(step: int) -> float:
        return (slowness if is_busy(step) else 1.0) * math.exp(chance.gauss(0, noise if is_busy(step) else noise / 20))

    chooser = auto_drafts(K, costs, always_propose=not costs.drafting)
    serving = Serving(chooser, true, batch, lambda request, place: rate, length=length,  # type: ignore[arg-type]
                      has_levels=has_levels, slowness=seen)
    served = []
    for step in range(steps):
        true.stretch = stretch if is_busy(step) else 1.0
        served.append(serving.step())
    return served


def speed(served: list[Served]) -> float:
    return sum(step.tokens for step in served) / sum(step.seconds for step in served)


def best(costs: StepCosts, rate: float, stretch: float, batch: int) -> float:
    true = Disturbed(costs, stretch)
    return max(batch * sum(rate**place for place in range(1 + drafts))
               / (true.step(batch * (1 + drafts), batch) + true.draft(drafts, batch)) for drafts in range(K + 1))


kinds = pytest.mark.parametrize(("costs", "batch", "has_levels"), [
    (MEASURED, 1, False), (MEASURED, 1, True), (MEASURED, 3, True), (LOOKUP, 1, False), (LOOKUP, 3, False)])


@kinds
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_do_not_pay_on_a_busy_machine_are_dropped_within_a_few_steps(
        costs: StepCosts, batch: int, has_levels: bool, noise: float) -> None:
    served = run(costs, 0.6, stretch=10.0, slowness=2.0, noise=noise, batch=batch, has_levels=has_levels)
    assert sum(step.num_drafts for step in served[200:300]) > 60 * batch, "they pay before"
    dropped = [step.num_drafts for step in served[BUSY[0] :]]
    settled = served[BUSY[0] + 40 : BUSY[1]]
    assert sum(dropped[:40]) <= 12 * K * batch, "no more than a dozen steps have all their drafts"
    assert speed(settled) > 0.93 * batch / costs.step(batch, batch), "that is the speed without drafts"
    assert speed(served[BUSY[1] + 100 :]) > 0.9 * speed(served[100 : BUSY[0]]), "they are taken up again"


def test_a_long_answer_is_drafted_again_when_the_machine_is_quiet() -> None:
    served = run(MEASURED, 0.6, stretch=10.0, slowness=2.0, noise=0.2, length=20000)
    assert sum(step.num_drafts for step in served[BUSY[0] + 40 : BUSY[1]]) < 40
    assert sum(step.num_drafts for step in served[BUSY[1] + 60 :]) > 150


@kinds
def test_drafts_that_pay_on_a_busy_machine_are_kept(costs: StepCosts, batch: int, has_levels: bool) -> None:
    """All steps take three times as long, and each a time of its own. To find that out costs some steps."""
    served = run(costs, 0.6, stretch=1.0, slowness=3.0, noise=0.4, batch=batch, has_levels=has_levels)
    still = run(costs, 0.6, stretch=1.0, slowness=1.0, noise=0.0, batch=batch, has_levels=has_levels)
    assert speed(served[BUSY[0] : BUSY[1]]) > 0.9 * speed(still[BUSY[0] : BUSY[1]])


@kinds
def test_a_quiet_machine_keeps_its_speed(costs: StepCosts, batch: int, has_levels: bool) -> None:
    """Times that agree with the measured costs change no choice."""
    noisy, still = (run(costs, 0.6, stretch=1.0, slowness=1.0, noise=noise, batch=batch, has_levels=has_levels)
                    for noise in (0.05, 0.0))
    assert speed(noisy) > 0.97 * speed(still)
    assert speed(still[100:]) > 0.9 * best(costs, 0.6, 1.0, batch)
