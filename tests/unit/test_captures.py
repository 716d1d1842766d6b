"""When a graph is captured: while nobody waits, or when its steps have lost what a capture takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import StepForm, Uncaptured
from outrider.runner.graphs import captures
from outrider.runner.graphs.captures import FILLED_ROWS, LONG_QUIET, MOST_LATER, QUIET, StepGraphs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.losses import LONG, PAUSE, Losses, LossRates
from tests.unit.test_graph_keys import graphs as make_keys

WIDE, OWN, OTHER = (GraphKey(requests, requests, 0, False) for requests in (64, 40, 24))
SPLIT = replace(OWN, form=StepForm.SPLIT)
WIDE_PROMPT, PROMPT, LARGE = (GraphKey(64, tokens, 0, False, has_prompts=True) for tokens in (256, 192, 512))
SHORT = 0.01  # seconds of a capture
TIMES = LossRates(launch_seconds=SHORT, token_seconds=35e-6)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(captures.time, "perf_counter", made)
    return made


def made(clock: Clock, seconds: float = SHORT, *, memory: int = 1000) -> Any:
    """Graphs whose captures take `seconds` and are their keys. There is memory for so many."""
    own: Any = StepGraphs.__new__(StepGraphs)
    own.keys, own.losses = make_keys(), Losses(clock)
    own.losses.times, own.losses.capture_seconds = TIMES, seconds
    own._captured, own._refused, own._stand_ins = {key: key for key in (WIDE, WIDE_PROMPT)}, set(), {}
    own._num_at_start, own._usual, own._goes_ahead, own._loaded, own._due = 2, [], True, set(), None
    own.run_empty = own._loaded.add

    def get(key: GraphKey) -> GraphKey:
        if len(own._captured) - 2 >= memory:
            raise torch.OutOfMemoryError
        clock.now += seconds
        own._stand_ins.clear()
        own._captured[key] = key
        return key

    own.get = get
    return own


def step(own: Any, key: GraphKey) -> Any:
    """What serves a step of the key, which is queued then."""
    served = own.serve(key)
    own.capture_due()
    return served


def steps_until_captured(own: Any, key: GraphKey, most: int = 1000) -> list[Any]:
    """What served the steps before the key's own graph did."""
    served = []
    for _ in range(most):
        served.append(step(own, key))
        if served[-1] == key:
            return served[:-1]
    raise AssertionError(f"still {served[-1]}")


@pytest.mark.parametrize(("seconds", "reason"), [(SHORT, SHORT / 2), (LONG, LONG / 2), (2 * LONG, 2 * LONG)])
def test_a_size_gets_its_own_graph_when_it_has_lost_half_of_what_a_capture_takes(clock: Clock, seconds: float,
                                                                          reason: float) -> None:
    """A step of 40 tokens on a graph of 64 loses 24 tokens. A capture that others notice needs a larger reason."""
    served = steps_until_captured(made(clock, seconds), OWN)
    assert set(served) == {WIDE}
    lost = (len(served) - 2) * 24 * TIMES.token_seconds  # before the step behind which its kernels were loaded
    assert lost < reason <= lost + 24 * TIMES.token_seconds + 1e-9


def test_a_new_size_of_prompts_runs_in_whatever_way_is_cheaper(clock: Clock) -> None:
    own = made(clock)
    own._loaded |= {PROMPT, replace(PROMPT, requests=1, tokens=64)}
    assert own.serve(PROMPT) == WIDE_PROMPT, "64 tokens too many take less time than the launches"
    few = replace(PROMPT, requests=1, tokens=64)
    assert own.serve(few) is Uncaptured.NEW_SIZE, "here the launches do"
    assert own.serve(replace(PROMPT, sampler=captures.SamplerForm.FULL)) is Uncaptured.NEW_SIZE, "none is wider"
    assert own.serve(few) == few, "and now they have taken as long as a capture"
    for _ in range(100):
        assert own.serve(LARGE) is Uncaptured.NEW_SIZE, "the device takes longer than the launches: nothing is lost"


def test_a_decode_step_that_no_graph_serves_is_captured_at_once(clock: Clock) -> None:
    assert made(clock, 10 * LONG).serve(SPLIT) == SPLIT


@pytest.mark.parametrize(("first", "pauses"), [(OWN, True), (SPLIT, False)], ids=["served", "not served"])
def test_captures_pause_after_one_that_could_have_waited(clock: Clock, first: GraphKey, pauses: bool) -> None:
    """A graph that no other could replace says nothing about how often others are captured."""
    own = made(clock)
    own._loaded |= {OWN, OTHER}
    for key in (OWN, OTHER):
        own.losses.add(key, 1.0)
    step(own, first)
    assert step(own, first) == first
    step(own, OTHER)
    assert step(own, OTHER) == (OWN if pauses else OTHER)
    clock.now += PAUSE * SHORT + 0.01
    step(own, OTHER)
    assert step(own, OTHER) == OTHER


def test_a_step_on_a_wider_graph_is_queued_before_its_own_is_captured(clock: Clock) -> None:
    """The device is busy meanwhile. A later step that has lost nothing does not capture what an earlier one lacked."""
    own = made(clock)
    own._loaded.add(OWN)
    own.losses.add(OWN, 1.0)
    assert own.serve(OWN) == WIDE and OWN not in own._captured
    assert own.serve(OTHER) == WIDE
    own.capture_due()
    assert OWN not in own._captured and OTHER not in own._captured
    assert step(own, OWN) == WIDE and OWN in own._captured


def test_a_capture_that_fails_behind_a_step_leaves_the_step_alone(clock: Clock) -> None:
    own = made(clock)
    own.losses.add(OWN, 1.0)

    def fail(key: GraphKey) -> None:
        raise RuntimeError("no such kernel")

    own.run_empty = fail
    assert step(own, OWN) == WIDE and OWN in own._refused and step(own, OWN) == WIDE


def test_steps_without_memory_for_a_graph_run_without(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    own = made(clock, memory=0)
    assert {step(own, OWN) for _ in range(50)} == {WIDE} and OWN in own._refused
    assert own.serve(SPLIT) is Uncaptured.NO_MEMORY
    assert own.capture_ahead(100.0) is None, "nothing is left to try"


def test_there_are_not_too_many(clock: Clock) -> None:
    own = made(clock)
    own._captured |= {(number,): number for number in range(MOST_LATER)}
    own.keys = type("None wider", (), {"wider": staticmethod(lambda key, captured: None)})
    assert own.serve(PROMPT) is own.serve(SPLIT) is Uncaptured.TOO_MANY_CAPTURES and own.capture_ahead(9.0) is None


# Captures while nobody waits


def test_one_capture_at_a_time_while_nobody_waits(clock: Clock) -> None:
    own = made(clock)
    assert own.capture_ahead(100.0) is None, "nobody has missed one"
    own._usual = [OTHER]
    for _ in range(3):
        own.serve(OWN)
    assert own.capture_ahead(0.0) == QUIET and own.capture_ahead(QUIET / 4) == pytest.approx(QUIET * 3 / 4)
    assert own.capture_ahead(QUIET) == 0.0 and own._captured.keys() - {WIDE, WIDE_PROMPT} == {OWN}, "met, and so first"
    assert own.capture_ahead(QUIET) == 0.0 and OTHER in own._captured
    assert own.capture_ahead(QUIET) is None
    assert own.serve(OWN) == OWN and own.serve(OTHER) == OTHER


def test_long_captures_wait_for_a_long_quiet(clock: Clock) -> None:
    own = made(clock, 2 * LONG)
    own.serve(OWN)
    assert own.capture_ahead(QUIET) == pytest.approx(LONG_QUIET - QUIET) and OWN not in own._captured
    assert own.capture_ahead(LONG_QUIET) == 0.0 and OWN in own._captured


def test_start_up_loads_for_later_captures_while_it_waits(clock: Clock) -> None:
    """So that a capture that requests wait for takes no more than the capture."""
    own = made(clock)
    filled: list[int] = []
    own._step = SimpleNamespace(load_filling=filled.append)
    likely = list(own.keys.likely())
    assert OWN in likely and not set(likely) & set(own.keys.at_start())
    later = [*own.keys.prompts_by_size(), *likely]
    turns = iter([True, True, True, False])
    own.load_while(lambda: next(turns))
    assert own._loaded == set(later[:2]) and next(turns, None) is None and filled == list(FILLED_ROWS)
    own.load_while(lambda: True)
    assert own._loaded == set(later)
    assert len(steps_until_captured(own, OWN)) == len(steps_until_captured(made(clock), OWN)) - 1


def test_start_up_times_captures_without_the_wait_for_kernels(clock: Clock) -> None:
    own = made(clock)
    own.losses.capture_seconds = 0.0

    def wait_for_kernels(key: GraphKey) -> None:
        clock.now += 5.0
        own._loaded.add(key)

    own.run_empty = wait_for_kernels
    own.capture_at_start([OWN, OTHER])
    assert own.losses.capture_seconds == pytest.approx(SHORT) and {OWN, OTHER} <= set(own._captured)


@pytest.mark.parametrize("takes_parameters", [False, True])
def test_kernels_of_sampling_parameters_are_begun_early(clock: Clock, takes_parameters: bool) -> None:
    """They take seconds to compile, and captures wait for them; no step is run twice for that, nor left out."""
    own, ran = made(clock), list[GraphKey]()
    own.keys = make_keys(takes_parameters=takes_parameters)
    own.run_empty = ran.append
    own.run_sizes()
    wanted = {*own.keys.at_start(), *own.keys.behind_long_contexts(), *own.keys.prompts()}
    sampled = list(own.keys.with_parameters())
    assert bool(sampled) is takes_parameters and ran[1 : 1 + len(sampled)] == sampled
    assert ran[0] == next(own.keys.decoding())
    assert len(ran) == len(set(ran)) and set(ran) == wanted


def test_captures_that_were_dropped_are_made_again(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    own = made(clock)
    own._dropped, own._reserved, own._reserved_bytes, reserved = [], object(), 64, []
    own.reserve = reserved.append
    step(own, OWN)
    held = set(own._captured)
    own.drop()
    own.drop()
    assert not own._captured and own._reserved is None
    assert own.capture_again() == len(held) and set(own._captured) == held and reserved == [64]
    assert own.capture_again() == 0


def test_captures_without_memory_are_left_out_when_they_are_made_again(clock: Clock,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("graph_pool_handle", "Stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    own = made(clock, memory=-1)
    own._dropped, own._reserved, own._reserved_bytes = [], None, 0
    own.drop()
    assert own.capture_again() == 1 and len(own._captured) == 1
