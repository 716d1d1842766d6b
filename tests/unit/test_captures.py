"""How batches run on captured steps, and when a graph is captured: while the engine is idle, or when its steps have
lost what a capture takes. The chooser decides by the test's clock, and the runner's own code carries out what it
decides, with captures that take a given time and know nothing but their keys."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core import StepForm, Uncaptured
from outrider.runner.graphs import captures, cuda_runner
from outrider.runner.graphs.captures import FILLED_ROWS, StepGraphs
from outrider.runner.graphs.chooser import (
    LONG_QUIET,
    MOST_LATER,
    QUIET,
    CaptureChooser,
    CaptureOrder,
    Launch,
    Replay,
    RunEagerly,
    StepChoice,
)
from outrider.runner.graphs.cuda_runner import CudaRunner
from outrider.runner.graphs.keys import GraphKey, GraphKeys, SamplerForm
from outrider.runner.graphs.losses import LONG, PAUSE, Losses, LossRates
from outrider.runner.rank_link import RankLink
from tests.unit.test_graph_keys import LIMITS, PLAIN, batch_of, rows_of
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
    for module in (captures, cuda_runner):
        monkeypatch.setattr(module.time, "perf_counter", made)
    monkeypatch.setattr(cuda_runner, "PendingStep", lambda batch, result, reason=None: reason or result)
    monkeypatch.setattr(cuda_runner, "pack_captured", lambda batch, shape: None)
    monkeypatch.setattr(cuda_runner, "fill", lambda ints, packed: None)
    for name in ("graph_pool_handle", "Stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return made


class Runner(CudaRunner):
    """Notes what it does in `done`. There is memory for so many captures, each of which takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float = SHORT, *, memory: int = 1000) -> None:
        own: Any = StepGraphs.__new__(StepGraphs)
        self._clock, self._seconds, self._memory, self.done = clock, seconds, memory, list[Any]()
        self.own, self.graphs, self.num_replays, self._link = own, own, 0, RankLink()
        own.keys, own.loaded, own.captured = make_keys(), set(), {}
        own._dropped, own._reserved, own._reserved_bytes = [], None, 0
        own.load, own.capture = own.loaded.add, self._made
        own.captured |= {key: self._graph(key) for key in (WIDE, WIDE_PROMPT)}
        self.device_step: Any = SimpleNamespace(host_turn=lambda batch: None)
        self.chooser = CaptureChooser(own.keys, own.captured, own.loaded)
        self.chooser._num_at_start = 2
        self.losses = self.chooser.losses = Losses(clock)
        self.losses.times, self.losses.capture_seconds = TIMES, seconds

    def _graph(self, key: GraphKey) -> Any:
        return SimpleNamespace(shape=None, ints=None, result=SimpleNamespace(key=key, logprobs=None),
                               replay=lambda host_turn: self.done.append(key))

    def _made(self, key: GraphKey) -> Any:
        if len(self.own.captured) - 2 >= self._memory:
            raise torch.OutOfMemoryError
        self._clock.now += self._seconds
        self.done.append(("captured", key))
        return self._graph(key)

    def _launch(self, batch: Any, choice: Launch, graphs: Any) -> Any:
        self.done.append(choice)
        graphs.loaded.add(choice.key)
        return choice.reason

    def _count_padding(self, batch: Any, size: Any) -> None: ...

    def carry_out(self, choice: StepChoice) -> GraphKey | Uncaptured:
        """The key whose graph served the step, or why none did."""
        served: Any = self._carry_out(None, choice, self.own)  # type: ignore[arg-type]
        return served if isinstance(served, Uncaptured) else served.key

    def step(self, key: GraphKey) -> GraphKey | Uncaptured:
        return self.carry_out(self.chooser.choose_for(key))

    @property
    def later(self) -> list[GraphKey]:
        return list(self.own.captured)[2:]


def steps_until_captured(own: Runner, key: GraphKey, most: int = 1000) -> list[Any]:
    """What served the steps before the key's own graph did."""
    served = []
    for _ in range(most):
        served.append(own.step(key))
        if served[-1] == key:
            return served[:-1]
    raise AssertionError(f"still {served[-1]}")


# Choices


def test_a_batch_runs_as_it_is_or_at_its_own_size_or_on_a_graph(clock: Clock) -> None:
    chooser = Runner(clock).chooser
    assert chooser.choose(batch_of([0]), rows_of(logprobs=-1)) == RunEagerly(Uncaptured.MANY_LOGPROBS)
    assert chooser.choose(batch_of([0] * 64), PLAIN) == Replay(WIDE)
    drafting: Any = SimpleNamespace(has_layers=True)
    large = CaptureChooser(GraphKeys(replace(LIMITS, max_batched_tokens=4096), drafting), {}, set())
    prompt, key = batch_of([0], num_known=2600), GraphKey(1, 3072, 0, False, has_prompts=True)
    assert large.choose(prompt, PLAIN) == Launch(key, Uncaptured.NEW_SIZE)
    large.losses.times = TIMES
    assert large.choose(prompt, PLAIN) == Launch(replace(key, tokens=2624), Uncaptured.OWN_SIZE)


def test_a_choice_is_plain_data_and_says_all(clock: Clock) -> None:
    """A runner that is sent the choices of another runs every step at the same size, whatever it has itself: here it
    has no memory for any capture, and its clock stands still."""
    leading, following = Runner(clock), Runner(Clock(), memory=0)
    following.graphs = None  # so that it cannot choose
    sizes = []
    for key in [OWN, SPLIT, PROMPT, OTHER, replace(SPLIT, requests=8, tokens=8), LARGE, OWN] * 40:
        choice: Any = leading.chooser.choose_for(key)
        leading.carry_out(choice)
        following.carry_out(pickle.loads(pickle.dumps(choice)))
        ran = [[done for done in own.done if not isinstance(done, tuple) or isinstance(done, Launch)]
               for own in (leading, following)]
        own_size, other_size = ((last.key if isinstance(last, Launch) else last) for last in (ran[0][-1], ran[1][-1]))
        assert own_size == other_size == choice.key
        sizes.append(own_size)
    assert {OWN, SPLIT, WIDE} <= set(sizes) and leading.later and not following.later


@pytest.mark.parametrize(("seconds", "reason"), [(SHORT, SHORT / 2), (LONG, LONG / 2), (2 * LONG, 2 * LONG)])
def test_a_size_gets_its_own_graph_when_it_has_lost_half_of_what_a_capture_takes(clock: Clock, seconds: float,
                                                                          reason: float) -> None:
    """A step of 40 tokens on a graph of 64 loses 24 tokens. A capture that others notice needs a larger reason."""
    served = steps_until_captured(Runner(clock, seconds), OWN)
    assert set(served) == {WIDE}
    lost = (len(served) - 2) * 24 * TIMES.token_seconds  # before the step behind which its kernels were loaded
    assert lost < reason <= lost + 24 * TIMES.token_seconds + 1e-9


def test_a_new_size_of_prompts_runs_in_whatever_way_is_cheaper(clock: Clock) -> None:
    own, few = Runner(clock), replace(PROMPT, requests=1, tokens=64)
    assert own.step(PROMPT) == WIDE_PROMPT, "64 tokens too many take less time than the launches"
    assert own.step(few) is Uncaptured.NEW_SIZE, "here the launches do"
    assert own.step(replace(PROMPT, sampler=SamplerForm.FULL)) is Uncaptured.NEW_SIZE, "none is wider"
    assert own.step(few) == few, "and now they have taken as long as a capture"
    for _ in range(100):
        assert own.step(LARGE) is Uncaptured.NEW_SIZE, "the device takes longer than the launches: nothing is lost"


def test_a_step_that_is_launched_loads_for_its_capture(clock: Clock) -> None:
    """However much its steps have lost, the first one is launched: a capture would have to load before it."""
    own, few = Runner(clock), replace(PROMPT, requests=1, tokens=64)
    own.losses.add(few, 1.0)
    assert own.step(few) is Uncaptured.NEW_SIZE and own.done == [Launch(few, Uncaptured.NEW_SIZE)]
    assert own.step(few) == few


def test_a_decode_step_that_no_graph_serves_is_captured_at_once(clock: Clock) -> None:
    assert Runner(clock, 10 * LONG).step(SPLIT) == SPLIT


@pytest.mark.parametrize(("first", "pauses"), [(OWN, True), (SPLIT, False)], ids=["served", "not served"])
def test_captures_pause_after_one_that_could_have_waited(clock: Clock, first: GraphKey, pauses: bool) -> None:
    """A graph that no other could replace says nothing about how often others are captured."""
    own = Runner(clock)
    own.own.loaded |= {OWN, OTHER}
    for key in (OWN, OTHER):
        own.losses.add(key, 1.0)
    own.step(first)
    assert own.step(first) == first
    own.step(OTHER)
    assert own.step(OTHER) == (OWN if pauses else OTHER)
    clock.now += PAUSE * SHORT + 0.01
    own.step(OTHER)
    assert own.step(OTHER) == OTHER


def test_a_step_on_a_wider_graph_is_queued_before_its_own_is_captured(clock: Clock) -> None:
    """The device is busy meanwhile. Its kernels are loaded behind one step, and it is captured behind a later one."""
    own = Runner(clock)
    own.losses.add(OWN, 1.0)
    assert own.chooser.choose_for(OWN) == Replay(WIDE, behind=CaptureOrder(OWN, only_loads=True, pauses=True))
    assert own.step(OWN) == WIDE and own.own.loaded == {OWN} and own.done == [WIDE]
    assert own.chooser.choose_for(OTHER) == Replay(WIDE), "it has lost nothing"
    assert own.step(OWN) == WIDE and own.done == [WIDE, WIDE, ("captured", OWN)]


def test_a_capture_that_fails_behind_a_step_leaves_the_step_alone(clock: Clock) -> None:
    own = Runner(clock)
    own.losses.add(OWN, 1.0)

    def fail(key: GraphKey) -> None:
        raise RuntimeError("no such kernel")

    own.own.load = fail
    assert own.step(OWN) == WIDE and own.step(OWN) == WIDE
    assert own.chooser.choose_for(OWN) == Replay(WIDE), "it is refused from then on"


def test_steps_without_memory_for_a_graph_run_without(clock: Clock) -> None:
    own = Runner(clock, memory=0)
    assert {own.step(OWN) for _ in range(50)} == {WIDE} and own.chooser.choose_for(OWN) == Replay(WIDE)
    assert own.step(SPLIT) is Uncaptured.NO_MEMORY, "its capture is tried"
    assert own.chooser.choose_for(SPLIT) == Launch(SPLIT, Uncaptured.NO_MEMORY), "once"
    assert own.idle(100.0) is None, "nothing is left to try"


def test_there_are_not_too_many(clock: Clock) -> None:
    own = Runner(clock)
    own.own.captured |= {(number,): number for number in range(MOST_LATER)}
    own.chooser.keys = type("None wider", (), {"wider": staticmethod(lambda *given: None)})  # type: ignore
    assert own.step(PROMPT) is own.step(SPLIT) is Uncaptured.TOO_MANY_CAPTURES and own.idle(9.0) is None


# Captures while the engine is idle


def test_one_capture_at_a_time_while_the_engine_is_idle(clock: Clock) -> None:
    own = Runner(clock)
    assert own.idle(100.0) is None, "no step has missed one"
    own.chooser._usual = [OTHER, WIDE]
    for _ in range(3):
        own.step(OWN)
    assert own.idle(0.0) == QUIET and own.idle(QUIET / 4) == pytest.approx(QUIET * 3 / 4)
    assert own.idle(QUIET) == 0.0 and own.later == [OWN], "met, and so first"
    assert own.idle(QUIET) == 0.0 and own.later == [OWN, OTHER]
    assert own.idle(QUIET) is None
    assert own.step(OWN) == OWN and own.step(OTHER) == OTHER


def test_long_captures_wait_for_a_long_quiet(clock: Clock) -> None:
    own = Runner(clock, 2 * LONG)
    own.step(OWN)
    assert own.idle(QUIET) == pytest.approx(LONG_QUIET - QUIET) and not own.later
    assert own.idle(LONG_QUIET) == 0.0 and own.later == [OWN]


def test_usual_sizes_take_no_place_of_sizes_that_are_met(clock: Clock) -> None:
    """Memory was planned for them."""
    own = Runner(clock)
    own.own.captured |= {replace(PROMPT, tokens=1000 + number): None for number in range(MOST_LATER - 1)}
    own.chooser._usual = [OTHER]
    assert own.idle(QUIET) == 0.0 and OTHER in own.own.captured and own.step(SPLIT) == SPLIT
    assert own.step(replace(SPLIT, requests=8, tokens=8)) == SPLIT, "now there are as many as may be"


def test_no_more_is_captured_while_idle_after_a_failure(clock: Clock) -> None:
    own = Runner(clock)
    own.chooser._usual = [OWN, OTHER]
    own.own.load = None
    assert own.idle(QUIET) is None and own.idle(QUIET) is None and not own.later


# Start-up, and captures that were dropped


def test_start_up_loads_for_later_captures_while_it_waits(clock: Clock) -> None:
    """So that a capture that requests wait for takes no more than the capture."""
    own = Runner(clock)
    filled: list[int] = []
    keys, graphs = own.own.keys, own.own
    graphs._step = SimpleNamespace(load_filling=filled.append)
    likely = list(keys.likely())
    assert OWN in likely and not set(likely) & set(keys.at_start())
    later = [*keys.prompts_by_size(), *likely]
    turns = iter([True, True, True, False])
    graphs.load_while(lambda: next(turns))
    assert graphs.loaded == set(later[:2]) and next(turns, None) is None and filled == list(FILLED_ROWS)
    graphs.load_while(lambda: True)
    assert graphs.loaded == set(later)
    assert len(steps_until_captured(own, OWN)) == len(steps_until_captured(Runner(clock), OWN)) - 1


def test_start_up_times_captures_without_the_wait_for_kernels(clock: Clock) -> None:
    own = Runner(clock)
    own.losses.capture_seconds = 0.0

    def wait_for_kernels(key: GraphKey) -> None:
        clock.now += 5.0 if key not in own.own.loaded else 0.0
        own.own.loaded.add(key)

    own.own.load = wait_for_kernels
    own._capture_at_start(own.own, [OWN, OTHER, OWN])
    assert own.losses.capture_seconds == pytest.approx(SHORT) and own.later == [OWN, OTHER]


@pytest.mark.parametrize("takes_parameters", [False, True])
def test_kernels_of_sampling_parameters_are_begun_early(clock: Clock, takes_parameters: bool) -> None:
    """They take seconds to compile, and captures wait for them; no step is run twice for that, nor left out."""
    own, ran = Runner(clock).own, list[GraphKey]()
    own.keys = make_keys(takes_parameters=takes_parameters)
    own.load = ran.append
    own.run_sizes()
    wanted = {*own.keys.at_start(), *own.keys.behind_long_contexts(), *own.keys.prompts()}
    sampled = list(own.keys.with_parameters())
    assert bool(sampled) is takes_parameters and ran[1 : 1 + len(sampled)] == sampled
    assert ran[0] == next(own.keys.decoding())
    assert len(ran) == len(set(ran)) and set(ran) == wanted


def test_captures_that_were_dropped_are_made_again(clock: Clock) -> None:
    own, reserved = Runner(clock), list[int]()
    own.own._reserved, own.own._reserved_bytes, own.own.reserve = object(), 64, reserved.append
    own.step(OWN)
    held = list(own.own.captured)
    own.own.drop()
    own.own.drop()
    assert not own.own.captured and own.own._reserved is None
    assert own.capture_again() == len(held) and list(own.own.captured) == held and reserved == [64]
    assert own.step(OWN) == WIDE
    done = len(own.done)
    assert own.capture_again() == len(held) and len(own.done) == done, "none is left"


def test_captures_without_memory_are_left_out_when_they_are_made_again(clock: Clock) -> None:
    own = Runner(clock, memory=-1)
    assert own.step(PROMPT) == WIDE_PROMPT
    own.own.drop()
    assert own.capture_again() == 1 and list(own.own.captured) == [WIDE]
    assert own.step(PROMPT) is Uncaptured.NEW_SIZE, "what served it is gone"
