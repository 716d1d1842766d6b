"""Costs of steps are measured at a first start, and later starts check them; a busy machine leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.costs import DraftCost, StepCosts
from outrider.runner import remembered_costs as module

LIMITS = Limits(4, 64, 64, 4, 100)
COSTS = StepCosts((1, 2, 5, 20), (0.010, 0.011, 0.014, 0.030), drafting=(DraftCost(1, 0.001, 0.0005),))
STEP: Any = SimpleNamespace(ranks=SimpleNamespace(count=1))


class Machine:
    """What a start measures: all costs, or single steps, each at its own slowness."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: dict[str, Any] = {}
        self.num_measured, self.num_timed, self.costs = 0, 0, COSTS
        self.disturbed: set[int] = set()  # numbers of timed steps that something else held up
        self.slowness = {(1, 0): 1.0, (5, 0): 1.0, (1, 4): 1.0}
        monkeypatch.setattr(module.native, "available", lambda: True)
        monkeypatch.setattr(module, "recall", self.stored.get)
        monkeypatch.setattr(module, "remember", lambda name, value: self.stored.update({name: value}))
        monkeypatch.setattr(module, "measure_costs", self._measure)
        monkeypatch.setattr(module, "step_seconds", self._seconds)

    def _measure(self, *args: Any) -> StepCosts:
        self.num_measured += 1
        return self.costs

    def _seconds(self, step: Any, limits: Limits, graphs: None, tokens: int, num_wanted: int, repeats: int) -> float:
        assert repeats == 1, "steps take turns"
        self.num_timed += 1
        disturbed = 3.0 if self.num_timed in self.disturbed else 1.0
        return disturbed * self.slowness[tokens, num_wanted] * (COSTS.step(tokens) + COSTS.draft(num_wanted))

    def start(self, **settings: Any) -> StepCosts:
        return module.remembered_costs(EngineConfig("smollm2", **settings), STEP, LIMITS)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_first_start_measures_and_the_second_remembers(machine: Machine) -> None:
    assert machine.start() == COSTS and machine.start() == COSTS and machine.num_measured == 1


def test_a_machine_that_is_slower_by_one_factor_has_all_costs_by_that_factor(machine: Machine) -> None:
    machine.start()
    machine.slowness = dict.fromkeys(machine.slowness, 2.0)
    slower = machine.start()
    assert slower.seconds == pytest.approx([2 * seconds for seconds in COSTS.seconds])
    assert slower.draft(4) == pytest.approx(2 * COSTS.draft(4)) and machine.num_measured == 1


def test_a_quiet_machine_times_three_steps_and_a_busy_one_some_more(machine: Machine) -> None:
    machine.start()
    machine.start()
    assert machine.num_timed == 3
    machine.disturbed = {4, 8}  # the first step of the first round, the second of the second
    assert machine.start() == COSTS and machine.num_measured == 1 and machine.num_timed == 3 + 6


@pytest.mark.parametrize("changed", [(1, 0), (5, 0), (1, 4)])
def test_steps_that_changed_by_different_factors_are_measured_again(machine: Machine, changed: tuple[int, int]) -> None:
    machine.start()
    machine.slowness[changed] = 1.5
    machine.start()
    assert machine.num_measured == 2


def test_other_settings_have_costs_of_their_own(machine: Machine) -> None:
    machine.start()
    machine.start(activation_bits=8)
    assert machine.num_measured == 2 and len(machine.stored) == 2


@pytest.mark.parametrize("costs", [
    StepCosts((1, 2), (0.010, 0.021), drafting=COSTS.drafting),
    StepCosts((1, 2), (0.010, 0.011), drafting=(DraftCost(1, 0.05, 0.01),)),
])
def test_implausible_times_are_not_remembered(machine: Machine, costs: StepCosts) -> None:
    machine.costs = costs
    assert machine.start() == costs and not machine.stored


def test_an_entry_that_is_damaged_is_measured_again(machine: Machine) -> None:
    machine.start()
    (name,) = machine.stored
    for damaged in (None, 3, {}, {"tokens": [], "seconds": [], "drafting": []},
                    {"tokens": [1], "seconds": ["x"], "drafting": []}):
        machine.stored[name] = damaged
        assert machine.start() == COSTS
    assert machine.num_measured == 6
