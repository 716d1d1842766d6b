"""Load or compute: by measured times of prompt tokens, of reading pages and of a trip to another place."""

from __future__ import annotations

import pytest

from outrider.cache import load_choice
from outrider.cache.load_choice import SLOWER, TOO_SMALL, TRIED_AGAIN, LoadChoice
from outrider.core.page_moves import ReadTime

TOKEN = 1e-3  # seconds of a prompt token


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load_choice, "time", clock)
    return clock


def compute(choice: LoadChoice, clock: Clock, step: int, num_tokens: int, more: float = 0.0) -> None:
    """One step; the host schedules it, and the device needs a fixed time and some for each token."""
    clock.now += 10.0  # an idle engine: no step takes this time
    for tokens in (num_tokens // 2, num_tokens - num_tokens // 2):  # two requests
        choice.schedule_tokens(step, tokens)
    clock.now += num_tokens * TOKEN + more
    choice.end_step(step)


@pytest.fixture
def measured(clock: Clock) -> LoadChoice:
    """Prompts take 1 ms a token, the host 0.1 ms a page, the disk 50 ms, and a trip 20 ms."""
    choice = LoadChoice()
    for step in range(10):
        compute(choice, clock, step, 512)
        compute(choice, clock, 100 + step, 8, 0.05)  # small steps take their time for other things
    choice.observe_reading([ReadTime("host", 1e-4)] * 40 + [ReadTime("disk", 0.05)] * 40)
    for _ in range(3):
        began = clock.now
        clock.now += 0.02 + 4 * 0.05
        choice.observe_load(began, {"disk": 4})
    return choice


def test_times_are_those_of_large_steps(measured: LoadChoice) -> None:
    assert measured.compute_seconds(1000) == pytest.approx(1.0, rel=0.01)
    assert measured.read_seconds({"host": 10, "disk": 2}) == pytest.approx(0.101)


def test_slow_places_and_small_pages_are_not_worth_a_load(measured: LoadChoice) -> None:
    assert measured.why_not(64, {"host": 4}, {}) is None
    assert measured.why_not(64, {"disk": 4}, {}) == SLOWER
    assert measured.why_not(640, {"disk": 4}, {}) is None
    assert measured.why_not(16, {"host": 1}, {}) == TOO_SMALL
    assert measured.why_not(640, {"disk": 4}, {"disk": 10}) == TOO_SMALL, "the pages before them take long"
    assert measured.why_not(640, {"host": 4, "disk": 1}, {"host": 100}) is None


def test_what_was_declined_is_tried_again(measured: LoadChoice) -> None:
    reasons = [measured.why_not(64, {"disk": 4}, {}) for _ in range(3 * TRIED_AGAIN)]
    assert reasons.count(None) == 3
    measured.observe_reading([ReadTime("disk", 1e-4)] * 2000)
    assert measured.why_not(64, {"disk": 4}, {}) is None, "a disk that has become fast is not used"


def test_nothing_is_declined_before_it_is_measured(clock: Clock) -> None:
    choice = LoadChoice()
    choice.observe_reading([ReadTime("disk", 9.0)] * 100)
    assert choice.why_not(64, {"disk": 4}, {}) is None, "no prompt was computed"
    for step in range(10):
        compute(choice, clock, step, 512)
    assert choice.why_not(64, {"disk": 4}, {}) == SLOWER
    assert choice.why_not(64, {"new": 4}, {}) is None


def test_steps_in_flight_take_turns(clock: Clock) -> None:
    """Two steps are scheduled at once: the second one begins when the first one ends."""
    choice = LoadChoice()
    for step in range(0, 20, 2):
        clock.now += 10.0
        choice.schedule_tokens(step, 512)
        choice.schedule_tokens(step + 1, 512)
        for each in (step, step + 1):
            clock.now += 512 * TOKEN
            choice.end_step(each)
    assert choice.compute_seconds(1) == pytest.approx(TOKEN)
    choice.schedule_tokens(99, 512)
    choice.forget_steps()
    clock.now += 100
    choice.end_step(99)
    assert choice.compute_seconds(1) == pytest.approx(TOKEN)
