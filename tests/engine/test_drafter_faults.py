"""A drafter can never change the text, whatever it raises, returns or writes: requests give the tokens of an engine
without a drafter, the log names the drafter, and after some faults the engine goes on without it."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.config import EngineConfig
from outrider.core.drafter_faults import MAX_DRAFTER_FAULTS, MAX_MESSAGE, FaultKind, words_of
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.start import start_engine
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.runner.graphs.captures import StepGraphs
from outrider.sched.scheduler import Scheduler
from outrider.server.metrics import ServerMetrics
from outrider.speculation.step_drafts import StepDrafts
from tests.engine.faulty_drafter import Edit, FaultyDrafter, K
from tests.engine.harness import CONFIGS, VOCAB, Ask, Rig, greedy, prompt_of, save_folder, tiny_model, tokens_of

EXTREMES = [-(2**63), -47, -1, K + 1, 10**6, 2**63 - 1]
PROMPTS = [prompt_of(1, 9), [5, 6, 7] * 5, prompt_of(2, 20)]
ASKS = [Ask(PROMPTS[0], greedy(9)), Ask(PROMPTS[1], SamplingParams(seed=4, max_tokens=12)), Ask(PROMPTS[2], greedy(6))]


@functools.cache
def expected() -> list[list[list[int]]]:
    with Rig(tiny_model("llama"), overlap=False) as rig:
        return tokens_of(rig.run(ASKS))


def drafts_nothing(scheduler: Scheduler) -> bool:
    return not scheduler.speculation.makes_drafts


def written(step: Step, tensor: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> Drafts:
    tensor.fill_(1)
    return Drafts(tokens, counts)


@dataclass(frozen=True)
class Fault:
    edit: Edit
    kind: FaultKind
    words: str  # in the log


def at(place: int, tensor: torch.Tensor, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[place % tensor.numel()] = value
    return tensor


FORMS = {
    "None": Fault(lambda s, t, c: None, FaultKind.FORM, "NoneType, not Drafts"),
    "a pair": Fault(lambda s, t, c: (t, c), FaultKind.FORM, "tuple, not Drafts"),
    "a list": Fault(lambda s, t, c: Drafts(t.tolist(), c), FaultKind.FORM, "tokens of type list"),  # type: ignore[arg-type]
    "float counts": Fault(lambda s, t, c: Drafts(t, c * torch.nan), FaultKind.FORM, "counts of float32"),
    "int32 tokens": Fault(lambda s, t, c: Drafts(t.int(), c), FaultKind.FORM, "tokens of int32"),
    "bool counts": Fault(lambda s, t, c: Drafts(t, c > 0), FaultKind.FORM, "counts of bool"),
    "flat tokens": Fault(lambda s, t, c: Drafts(t[:, 0], c), FaultKind.FORM, "tokens of int64 ["),
    "too wide": Fault(lambda s, t, c: Drafts(t.repeat(1, 2), c), FaultKind.FORM, "is wanted"),
    "too few": Fault(lambda s, t, c: Drafts(t[1:], c[1:]), FaultKind.FORM, "is wanted"),
    "one count": Fault(lambda s, t, c: Drafts(t, c.sum()), FaultKind.FORM, "counts of int64 []"),
    "elsewhere": Fault(lambda s, t, c: Drafts(t.to("meta"), c), FaultKind.FORM, "on meta"),
    "sparse": Fault(lambda s, t, c: Drafts(t.to_sparse(), c), FaultKind.FORM, "tokens of type Tensor"),
}
WRITES = {
    "tokens": lambda s, t, c: written(s, s.tokens, t, c),
    "known": lambda s, t, c: written(s, s.known[1:2], t, c),
    "temperature": lambda s, t, c: written(s, s.sampling.temperature, t, c),
    "seed": lambda s, t, c: written(s, s.sampling.seed, t, c),
}
SHAPES: dict[str, Callable[[Step], object]] = {
    "resized": lambda s: s.tokens.resize_(1, 1), "transposed": lambda s: s.tokens.t_(),
    "one dimension more": lambda s: s.known.unsqueeze_(0),
    "other memory": lambda s: s.known.set_(torch.zeros(2, dtype=torch.int64)),  # type: ignore[call-overload]
    "other temperatures": lambda s: s.sampling.temperature.set_(torch.zeros(9)),  # type: ignore[call-overload]
}
HARMLESS_WRITES = {  # the engine has copies
    "run": lambda s, t, c: written(s, s.accepted.run, t, c),
    "goes_on": lambda s, t, c: written(s, s.goes_on, t, c),
    "rows": lambda s, t, c: written(s, s.batch.padded.rows, t, c),
    "hidden": lambda s, t, c: written(s, s.hidden.final, t, c),
}


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings that the engine logs meanwhile; `caplog` cannot be used with hypothesis."""
    lines: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("outrider")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def assert_harmless(drafter: Drafter, num_rounds: int = 2, **options: Any) -> tuple[Rig, list[str]]:
    """Requests give the expected tokens, several times. Returns the closed rig and the log's warnings."""
    with logged() as lines, Rig(tiny_model("llama"), expects_faults=True, drafter=drafter, **options) as rig:
        for _ in range(num_rounds):
            assert tokens_of(rig.run(ASKS)) == expected()
    return rig, lines


def assert_noted(rig: Rig, lines: list[str], kind: FaultKind, words: str, num: int = MAX_DRAFTER_FAULTS) -> None:
    """The faults were counted, the log has named the drafter once for the kind, and said that it is off."""
    stats = rig.engine.stats
    ((drafter, found),) = stats.drafter_faults
    assert found is kind and stats.num_drafter_faults == num and "FaultyDrafter" in drafter
    told, *off = [line for line in lines if line.startswith("drafter ")]
    assert "faulty (" in told and words in told and kind.advice in told
    if num < MAX_DRAFTER_FAULTS and kind is not FaultKind.WROTE:
        assert not off and not stats.drafters_off
        return
    assert len(off) == 1 and "switched off" in off[0] and words in off[0]
    assert [name for name, _ in stats.drafters_off] == [drafter]
    assert drafts_nothing(rig.scheduler) and not rig.batches[-1].drafting.num_wanted


VALUES = given(st.sampled_from(["count", "token"]), st.sampled_from(EXTREMES), st.integers(0, 20), st.integers(0, 8),
               st.booleans())


def check_values(what: str, value: int, place: int, start: int, overlap: bool) -> None:
    if what == "token":
        value = VOCAB + value if 0 < value < 2**40 else value
    edits: dict[str, Edit] = {"count": lambda s, t, c: Drafts(t, at(place, c, value)),
                              "token": lambda s, t, c: Drafts(at(place, t, value), c)}
    # Two rounds: in one of 11 steps, fewer faults than switch a drafter off may follow a late start.
    rig, lines = assert_harmless(FaultyDrafter(edits[what], at=range(start, 10**6)), 2, overlap=overlap)
    kind = FaultKind.COUNT if what == "count" else FaultKind.TOKEN
    assert_noted(rig, lines, kind, str(value))


test_wrong_values_are_dropped_on_the_device = settings(max_examples=4, deadline=None)(VALUES(check_values))
test_many_wrong_values = pytest.mark.long(settings(max_examples=100, deadline=None)(VALUES(check_values)))


@pytest.mark.parametrize("name", FORMS)
def test_drafts_of_a_wrong_form_are_dropped(name: str) -> None:
    fault = FORMS[name]
    rig, lines = assert_harmless(FaultyDrafter(fault.edit, at=range(1, 10**6)), num_rounds=1)
    assert_noted(rig, lines, fault.kind, fault.words)


METHODS = ["propose", "admit", "reset", "skip", "fill_slots"]


@pytest.mark.parametrize("method", METHODS)
def test_exceptions_of_any_method_are_the_drafters_alone(method: str) -> None:
    check_exceptions(method, 1, 4)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(0, 2), st.integers(1, 4))
def test_many_exceptions(method: str, start: int, times: int) -> None:
    check_exceptions(method, start, times)


def check_exceptions(method: str, start: int, times: int) -> None:
    drafter = FaultyDrafter(method=method, at=range(start, start + times))
    with logged() as lines, Rig(tiny_model("llama"), expects_faults=True, drafter=drafter) as rig:
        speculation = rig.scheduler.speculation
        assert isinstance(speculation, StepDrafts)
        plan = speculation.counts
        choose = plan.choose
        if method == "skip":  # every second step proposes nothing
            plan.choose = lambda *args, **options: choose(*args, **options)._replace(  # type: ignore[method-assign]
                num_wanted=K * (rig.scheduler.stats.num_steps % 2))
        for _ in range(4 if method == "reset" else 2):
            if method == "reset":
                rig.scheduler._generation += 1
            assert tokens_of(rig.run(ASKS)) == expected()
    num = min(times, MAX_DRAFTER_FAULTS)
    if method == "reset":
        num = min(num, max(0, 4 - start))
    assert rig.engine.stats.num_drafter_faults == num
    if num:
        words = f"{method}() raised ArithmeticError: no {method} today"
        assert_noted(rig, lines, FaultKind.RAISED, words, num)


def test_a_few_faults_leave_a_drafter_on() -> None:
    rig, lines = assert_harmless(FaultyDrafter(at=range(2, 2 + MAX_DRAFTER_FAULTS - 1)))
    assert_noted(rig, lines, FaultKind.RAISED, "propose() raised", MAX_DRAFTER_FAULTS - 1)
    assert rig.engine.stats.num_draft_tokens > 0 and rig.batches[-1].drafting.num_wanted == K


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_rows_are_noticed_and_undone(name: str) -> None:
    """The step fails, all requests are admitted anew, and the drafter is off at once."""
    rig, lines = assert_harmless(FaultyDrafter(WRITES[name], at=range(3, 10**6)))
    assert_noted(rig, lines, FaultKind.WROTE, "wrote to the tensors of the engine's rows", 1)
    assert rig.scheduler.generation == 1


@pytest.mark.parametrize("name", HARMLESS_WRITES)
def test_writes_to_the_steps_own_tensors_change_nothing(name: str) -> None:
    rig, _ = assert_harmless(FaultyDrafter(HARMLESS_WRITES[name], at=range(3, 10**6)))
    assert rig.scheduler.generation == 0


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_of_rows_keep_their_shapes_and_memory(name: str) -> None:
    def change(step: Step, tokens: torch.Tensor, counts: torch.Tensor) -> Drafts:
        SHAPES[name](step)
        return Drafts(tokens, counts)

    assert_harmless(FaultyDrafter(change, at=range(3, 10**6)))


def test_a_step_shows_no_sampling_state_but_the_keys_of_the_noise() -> None:
    """Lists, counts and masks of rows are out of a drafter's reach."""
    seen: list[object] = []
    assert_harmless(FaultyDrafter(lambda s, t, c: seen.append(s.sampling) or Drafts(t, c)))
    assert {type(keys) for keys in seen} == {SamplingKeys}


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Tensors(torch.Tensor):
    """A tensor whose methods are somebody else's."""

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        return None


@pytest.mark.parametrize(("error", "words"), [(Unprintable(), "(its message cannot be shown)"),
                                              (ValueError("x" * 10**6), f"{'x' * MAX_MESSAGE}...")])
def test_any_message_of_an_exception_is_shown_as_far_as_it_can_be(error: Exception, words: str) -> None:
    def propose(step: Step, tokens: torch.Tensor, counts: torch.Tensor) -> Drafts:
        raise error

    rig, _ = assert_harmless(FaultyDrafter(propose))
    ((_, reason),) = rig.engine.stats.drafters_off
    assert reason == f"propose() raised {words_of(error)}" == f"propose() raised {type(error).__name__}: {words}"


def test_tensors_of_subclasses_are_taken_as_tensors() -> None:
    rig, _ = assert_harmless(FaultyDrafter(lambda s, t, c: Drafts(t.as_subclass(Tensors), c.as_subclass(Tensors))))
    assert not rig.engine.stats.drafter_faults and rig.engine.stats.num_draft_tokens > 0


def test_a_part_of_a_combination_misbehaves_alone() -> None:
    """The lookup behind it goes on; a faulty part is off after its faults, and drops no drafts of the other."""
    ngram = NgramDrafter(K, min_n=1, max_n=3)
    wrong_counts, wrong_form, raises = lambda s, t, c: Drafts(t, at(0, c, -1)), FORMS["too few"].edit, None
    for parts in ([FaultyDrafter(wrong_counts), ngram], [ngram, FaultyDrafter(wrong_form)],
                  [FaultyDrafter(raises), ngram]):
        rig, lines = assert_harmless(CombinedDrafter(parts), num_rounds=1)
        stats = rig.engine.stats
        assert stats.num_drafter_faults == MAX_DRAFTER_FAULTS and len(stats.drafters_off) == 1
        assert not drafts_nothing(rig.scheduler) and stats.num_draft_tokens > 0
        assert all("FaultyDrafter" in line for line in lines if line.startswith("drafter "))


def test_a_drafter_that_was_switched_off_is_never_called_again() -> None:
    drafter = FaultyDrafter()
    with Rig(tiny_model("llama"), expects_faults=True, drafter=drafter) as rig:
        rig.run(ASKS)
        assert drafter._calls == MAX_DRAFTER_FAULTS
        rig.run(ASKS)
        rig.engine.reset()
        rig.runner._before_step = None  # the rig knows only the first scheduler
        rig.outputs.add("after", PROMPTS[0], greedy(9))
        done = [output for _ in range(40) for output in rig.outputs.step() if output.finished]
        assert done[0].outputs[0].token_ids == expected()[0][0]
        assert drafter._calls == MAX_DRAFTER_FAULTS and drafts_nothing(rig.engine.scheduler)


def test_captured_steps_drop_the_drafts_of_a_drafter_that_is_off() -> None:
    """A graph goes on proposing what it was captured with: the device learns which drafters are off."""
    with Rig(tiny_model("llama"), expects_faults=True, drafter=FaultyDrafter()) as rig:
        drafting = rig.step.drafting
        for guard in drafting._guards:
            guard.record.add(FaultKind.RAISED, "raised something", at_once=True)
        assert drafting.is_on.tolist() == [1]
        rig.run(ASKS[:1])
        assert drafting.is_on.tolist() == [0]


def test_a_step_is_captured_again_without_a_drafter_that_failed_meanwhile() -> None:
    """A drafter that reads the device ends the capture: then the step is captured without it."""
    with Rig(tiny_model("llama"), expects_faults=True, drafter=FaultyDrafter()) as rig:
        graphs: Any = StepGraphs.__new__(StepGraphs)
        graphs._step = rig.step
        graphs._renew_pool = lambda: None
        record = rig.step.drafting._guards[0].record
        tries: list[str] = []

        def capture(key: str) -> str:
            tries.append(key)
            if len(tries) == 1:
                record.add(FaultKind.RAISED, "propose() raised", at_once=True)
                raise RuntimeError("the capture was invalidated")
            return "captured"

        graphs._capture = capture
        assert graphs.capture("a key") == "captured" and len(tries) == 2
        graphs._capture = lambda key: 1 / 0
        with pytest.raises(ZeroDivisionError):  # not the drafter's
            graphs.capture("a key")


def test_an_async_engine_lives_on() -> None:
    edits: list[Edit] = [lambda s, t, c: Drafts(t, c * 0 - 47), FORMS["float counts"].edit]

    async def run(edit: Edit) -> None:
        rig = Rig(tiny_model("llama"), expects_faults=True, drafter=FaultyDrafter(edit))
        async with AsyncLLM.around(rig.engine) as llm:
            for _ in range(2):
                outputs = [[output async for output in llm.generate(ask.prompt, ask.params)][-1] for ask in ASKS]
                assert tokens_of(outputs) == expected() and llm.is_running

    for edit in edits:
        asyncio.run(run(edit))


@pytest.mark.long
def test_a_worker_in_a_process_says_what_its_drafter_did(tmp_path: Path) -> None:
    """The log and the statistics of the parent name the drafter of the child."""
    model = str(save_folder(tmp_path / "model", CONFIGS["llama"], seed=3))
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "max_model_len": 96, "num_pages": 64}
    drafts = {"method": "tests.engine.faulty_drafter:NegativeCounts", "num_speculative_tokens": K, "auto": False}
    found = []
    for in_process, speculative in ((False, None), (True, drafts)):
        config = EngineConfig(model, speculative_config=speculative, **options)
        with logged() as lines, LLM.around(start_engine(config, in_process=in_process)) as llm:
            outputs = llm.generate([list(prompt) for prompt in PROMPTS], [ask.params for ask in ASKS])
            found.append(tokens_of(outputs))
    assert found[0] == found[1]
    told, off = [line for line in lines if line.startswith("drafter ")]
    assert "NegativeCounts): propose() returned a count of -47" in told and "is switched off" in off
    name = "negative (tests.engine.faulty_drafter:NegativeCounts)"
    assert llm.engine.stats.drafter_faults == {(name, FaultKind.COUNT): MAX_DRAFTER_FAULTS}
    assert llm.engine.stats.drafters_off == {(name, "propose() returned a count of -47"): 1}


class FaultyHostDrafter:
    """Guesses on the host, wrongly or not at all."""

    def __init__(self, guess: Callable[[int], Any], finish: Callable[[], None] = lambda: None) -> None:
        self._guess, self._finish = guess, finish

    def propose(self, request_id: int, token_ids: Any, prompt_len: int, num_wanted: int, tenant: str) -> Any:
        return self._guess(num_wanted)

    def finish(self, request_id: int, token_ids: Any, tenant: str) -> None:
        self._finish()


HOST_GUESSES: dict[str, tuple[Callable[[int], Any], FaultKind]] = {
    "None": (lambda n: None, FaultKind.FORM), "a text": (lambda n: "abc", FaultKind.FORM),
    "floats": (lambda n: [1.0] * n, FaultKind.FORM), "NaN": (lambda n: [float("nan")], FaultKind.FORM),
    "negative": (lambda n: [-1] * n, FaultKind.TOKEN), "beyond": (lambda n: [VOCAB], FaultKind.TOKEN),
    "huge": (lambda n: [2**70], FaultKind.TOKEN), "too many": (lambda n: [4] * (n + 1), FaultKind.COUNT),
    "raises": (lambda n: [][n], FaultKind.RAISED),
}


@pytest.mark.parametrize("name", [*HOST_GUESSES, "finish"])
def test_a_drafter_on_the_host_misbehaves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guess, kind = HOST_GUESSES.get(name, (lambda n: [4] * n, FaultKind.RAISED))
    made = FaultyHostDrafter(guess, (lambda: 1 // 0) if name == "finish" else lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr("outrider.drafters.suffix.SuffixDrafter", lambda **options: made)
    config = {"method": "suffix", "num_speculative_tokens": K, "auto": False}
    with logged() as lines, Rig(tiny_model("llama"), expects_faults=True, speculative_config=config) as rig:
        for _ in range(2):
            assert tokens_of(rig.run(ASKS)) == expected()
        assert tokens_of(rig.run(ASKS[:1])) == expected()[:1]  # its result brings the last faults
    stats = rig.engine.stats
    assert {found for _, found in stats.drafter_faults} == {kind} and stats.num_drafter_faults == MAX_DRAFTER_FAULTS
    assert len(stats.drafters_off) == 1 and len(lines) == 2 and "FaultyHostDrafter" in lines[0]


def test_stats_and_metrics_say_that_a_drafter_is_off() -> None:
    rig, _ = assert_harmless(FaultyDrafter(), num_rounds=1)
    before, stats = rig.engine.stats.copy(), rig.engine.stats
    assert before == stats and f"Drafter faults: {MAX_DRAFTER_FAULTS}, faulty (" in stats.line()
    assert "is off: propose() raised ArithmeticError" in stats.line() and not stats.since(before).drafter_faults
    text = ServerMetrics("model").text(rig.engine, 0)
    assert f'drafter="faulty (tests.engine.faulty_drafter:FaultyDrafter)",kind="raised"}} {MAX_DRAFTER_FAULTS}' in text
    assert 'FaultyDrafter)",reason="propose() raised ArithmeticError: no propose today"} 1' in text
