"""Two ways to run one thing, measured in turns: made speeds of a quiet machine and of busy ones."""

from __future__ import annotations

import random

import pytest

from outrider.commands.turns import LEAST_TURNS, MOST_SECONDS, MOST_TURNS, Turns


def taken(gain: float, noise: float, seed: int = 0, seconds: float = 0.5) -> Turns:
    """Turns on a machine that slows each measurement by a factor of its own, up to 1 + noise."""
    chance, turns = random.Random(seed), Turns()
    while not turns.is_over(seconds * len(turns.speeds)):
        turns.add(70 / (1 + noise * chance.random()), 70 * gain / (1 + noise * chance.random()))
    return turns


def test_a_quiet_machine_needs_the_fewest_turns() -> None:
    turns = taken(1.28, 0.05)
    assert len(turns.speeds) == LEAST_TURNS and turns.ratio == pytest.approx(1.28, rel=0.05)
    assert "its drafter: 1.2" in turns.line("its drafter") and f"{LEAST_TURNS} turns)" in turns.line("its drafter")


@pytest.mark.parametrize("seed", range(20))
def test_a_figure_is_right_or_not_given(seed: int) -> None:
    """One turn of drafts that gain 28% reads 0.5x to 3x here, and a few of them agree by chance."""
    turns = taken(1.28, 2.0, seed)
    if turns.is_settled:
        assert 1.28 / 1.25 < turns.ratio < 1.28 * 1.25
    else:
        assert len(turns.speeds) == MOST_TURNS


def test_which_is_faster_is_told_if_that_is_clear_though_the_figure_is_not() -> None:
    far = Turns([(25.0, 58.1), (40.4, 70.1), (33.0, 64.0), (28.0, 66.0), (40.0, 69.0), (38.0, 60.0)])
    assert not far.is_settled and " 1.9" in far.line("drafts") and "±" in far.line("drafts")
    near = Turns([(25.0, 58.1), (40.4, 30.1), (33.0, 64.0), (58.0, 36.0)])
    assert "25.0 to 58.0 tokens/s without drafts, 30.1 to 64.0 with drafts in 4 turns" in near.line("drafts")
    assert "too busy to tell" in near.line("drafts")


def test_a_disturbance_that_passes_leaves_a_figure() -> None:
    turns = Turns([(70.0, 30.0), (70.0, 90.0), (71.0, 91.0), (70.0, 90.0), (70.0, 89.0)])
    assert turns.is_settled and turns.ratio == pytest.approx(1.28, rel=0.02)


def test_a_slow_machine_ends_in_time() -> None:
    assert len(taken(1.28, 3.0, seconds=MOST_SECONDS).speeds) == LEAST_TURNS
