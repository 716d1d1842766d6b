"""Callers of one LLM beside each other: in several threads, in a forked process, gone at an awkward moment, or with
arguments of a wrong type. Nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.beam_search import BeamSearchParams
from outrider.core.params import RequestOutputKind
from outrider.engine import engine_thread
from outrider.engine.output import SampleOutput
from outrider.engine.worker_line import EngineError
from tests.engine.harness import CONFIGS, greedy, prompt_of, save_folder
from tests.engine.test_interrupts import generate, make_llm

SOME_PROMPT = prompt_of(5, 9)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("mamba2", drafts=True) as made:
        yield made


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.num_requests and not llm._loop._followed and not llm._loop._changed


def test_threads_take_turns(llm: LLM) -> None:
    expected, found = generate(llm), []

    def work() -> None:
        for _ in range(3):
            found.append(generate(llm))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 9
    assert_idle(llm)


def assert_nothing_is_held(llm: LLM) -> None:
    assert_idle(llm)
    assert not llm.engine.has_work, "a step is in flight, or its result was not taken"
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.cache.usage() == 0


def test_no_way_of_ending_leaves_a_step_in_flight(llm: LLM) -> None:
    """Texts that the host ends (a stop string), several callers whose last requests end in one step, an iterator that
    is closed beside another call, requests that are aborted one by one."""
    whole = llm.generate([list(SOME_PROMPT)], greedy(12, ignore_eos=True))[0].outputs[0].text
    assert_nothing_is_held(llm)
    for end in range(1, len(whole), 4):
        llm.generate([list(SOME_PROMPT)], greedy(12, ignore_eos=True, stop=[whole[:end]]))
        assert_nothing_is_held(llm)
    for num_steps in (1, 2, 5):
        closed = llm.follow([list(SOME_PROMPT)] * 2, greedy(12, ignore_eos=True))
        for _ in range(num_steps):
            next(closed)
        closed.close()
        assert_nothing_is_held(llm)
        first, second = (llm.stream(prompt_of(seed, 7), greedy(6, ignore_eos=True)) for seed in (1, 2))
        for stream in (first, second):
            next(stream)
        list(first)
        if num_steps % 2:
            second.close()
        list(second)
        assert_nothing_is_held(llm)
        engine = llm.llm_engine
        for name in "ab":
            engine.add_request(name, {"prompt_token_ids": SOME_PROMPT}, greedy(num_steps, stop=[whole[:3]]))
        while engine.has_unfinished_requests():
            ended = [output.request_id for output in engine.step() if output.finished]
            engine.abort_request("b" if "a" in ended else "")
        assert_nothing_is_held(llm)


@pytest.mark.parametrize("family", ["llama", pytest.param("gated_delta", marks=pytest.mark.long)])
def test_the_last_call_of_several_threads_leaves_no_step_in_flight(family: str) -> None:
    with make_llm(family, drafts=family == "llama") as llm:
        expected = generate(llm)
        for round_ in range(2):
            closed = llm.follow([list(SOME_PROMPT)] * 3, greedy(40, ignore_eos=True)) if round_ % 2 else None
            found: list[Any] = []
            threads = [threading.Thread(target=lambda found=found: found.append(generate(llm))) for _ in range(2)]
            for thread in threads:
                thread.start()
            if closed is not None:
                next(closed)
                closed.close()
            for thread in threads:
                thread.join()
            assert found == [expected] * 2
            assert_nothing_is_held(llm)


def test_outputs_that_grow_do_not_go_to_callers_that_want_ends_alone(llm: LLM) -> None:
    def seen(kind: RequestOutputKind) -> list[bool]:
        params = [replace(greedy(length), output_kind=kind) for length in (3, 12)]
        outputs = llm.follow([{"prompt_token_ids": SOME_PROMPT}] * 2, params, before_step=lambda: steps.append(kind))
        return [output.finished for output in outputs]

    steps: list[RequestOutputKind] = []
    assert seen(RequestOutputKind.CUMULATIVE).count(False) > 2
    assert seen(RequestOutputKind.FINAL_ONLY) == [True, True]
    assert steps.count(RequestOutputKind.FINAL_ONLY) == steps.count(RequestOutputKind.CUMULATIVE) > 2
    assert_idle(llm)


@pytest.mark.parametrize("leave", ["close", "drop"])
@pytest.mark.parametrize("method", ["follow", "stream"])
def test_requests_end_with_an_iterator_that_was_never_asked(llm: LLM, method: str, leave: str) -> None:
    prompt = list(SOME_PROMPT) if method == "stream" else [list(SOME_PROMPT)] * 3
    outputs = getattr(llm, method)(prompt, greedy(9))
    assert llm.engine.num_requests
    if leave == "close":
        outputs.close()
    del outputs
    gc.collect()
    assert_idle(llm)


def test_a_stream_refuses_a_prompt_when_it_is_asked_for(llm: LLM) -> None:
    with pytest.raises(ValueError, match="token id"):
        llm.stream([-1], greedy(2))
    assert_idle(llm)


def test_an_async_stream_that_is_closed_unread_starts_nothing() -> None:
    async def main() -> None:
        async with AsyncLLM.around(make_llm("llama", drafts=False).engine) as async_llm:
            for opened in (async_llm.generate(list(SOME_PROMPT), greedy(9), request_id="mine"),
                           async_llm.increments(async_llm.engine.checks.check(list(SOME_PROMPT), greedy(9)), "mine"),
                           async_llm.chat([{"role": "user", "content": "x"}], request_id="mine"),
                           async_llm.encode(list(SOME_PROMPT), request_id="mine")):
                await opened.aclose()
                assert not async_llm.engine.num_requests
            async for output in async_llm.generate(list(SOME_PROMPT), greedy(2), request_id="mine"):
                assert output.request_id == "mine"

    asyncio.run(main())


def run_in_fork(call: Callable[[], object]) -> str:
    """What the call raises in a forked process, or "" if it ends. A process that hangs is ended by its alarm."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which is the case to be tried
        child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            call()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        message = told.read()
    assert os.waitpid(child, 0)[1] == 0, "it hangs"
    return message


def test_a_forked_process_is_told_that_the_engine_is_not_its_own(llm: LLM) -> None:
    expected = generate(llm)
    opened = llm.stream(list(SOME_PROMPT), greedy(9))
    next(opened)
    for call in (lambda: generate(llm), lambda: next(opened), lambda: llm.engine.step()):
        assert run_in_fork(call).startswith("EngineError: the engine belongs to process")
    assert run_in_fork(llm.close) == "" and run_in_fork(opened.close) == ""
    *_, last = opened
    assert last.finished and generate(llm) == expected, "it goes on where it was"


def test_a_forked_process_and_async_llm() -> None:
    async_llm = AsyncLLM.around(make_llm("llama", drafts=False).engine)

    def ask() -> None:
        asyncio.run(anext(async_llm.generate(list(SOME_PROMPT), greedy(3))))  # type: ignore[arg-type]

    assert run_in_fork(ask).startswith("EngineError: the engine belongs to process")
    assert run_in_fork(async_llm.shutdown) == ""
    assert async_llm.is_running
    async_llm.shutdown()


def test_a_forked_process_may_have_an_engine_of_its_own(tmp_path: Path) -> None:
    """Also where torch has computed with several threads before: they are not in the forked process."""
    folder = save_folder(tmp_path, CONFIGS["llama"])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.ones(1 << 22).sum() == 1 << 22

        def work() -> None:
            with LLM(str(folder), num_pages=64) as own:
                assert own.generate([list(SOME_PROMPT)], greedy(3))[0].outputs[0].token_ids

        assert run_in_fork(work) == ""
    finally:
        torch.set_num_threads(num_threads)


def test_the_id_of_a_request_is_free_when_its_reader_has_left() -> None:
    async def main() -> None:
        async with AsyncLLM.around(make_llm("llama", drafts=False).engine) as async_llm:
            for _ in range(3):
                left = async_llm.generate(list(SOME_PROMPT), greedy(60, ignore_eos=True), request_id="mine")
                await anext(left)
                await left.aclose()
            last = [output async for output in async_llm.generate(list(SOME_PROMPT), greedy(3), request_id="mine")][-1]
            assert last.finished and last.outputs[0].finish_reason != "abort"

    asyncio.run(main())


def test_a_reader_hears_of_the_end_when_its_stream_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever looks at the engine after its last answer may still find a request there."""
    tell, left = engine_thread.tell, []

    async def main() -> None:
        async with AsyncLLM.around(make_llm("llama", drafts=False).engine) as async_llm:

            def watched(loop: Any, call: Any, *args: Any) -> bool:
                left.append(async_llm.engine.num_requests or not async_llm._owner._streams)
                return tell(loop, call, *args)

            monkeypatch.setattr(engine_thread, "tell", watched)
            async for _ in async_llm.generate(list(SOME_PROMPT), greedy(3)):
                pass

    asyncio.run(main())
    assert len(left) >= 2 and all(left)


def test_a_stream_that_is_collected_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle keeps the stream until a garbage collection, which may come on any line, also inside a step."""
    expected = generate(llm)

    class Keeper:
        stream: Any

    keeper = Keeper()
    keeper.stream = (keeper, llm.follow([list(SOME_PROMPT)], greedy(30, ignore_eos=True)))
    next(keeper.stream[1])
    del keeper
    take, collected = SampleOutput.take, []

    def collects(self: SampleOutput, *args: Any) -> Any:
        if not collected:
            collected.append(gc.collect())
        return take(self, *args)

    monkeypatch.setattr(SampleOutput, "take", collects)
    resets = []
    monkeypatch.setattr(llm.engine, "reset", lambda: resets.append(1))
    assert generate(llm) == expected
    assert collected and not resets, "the stream is dropped, and the step goes on"
    assert generate(llm) == expected
    assert_idle(llm)


def test_a_bar_that_fails_starts_nothing(llm: LLM) -> None:
    def broken(**_: Any) -> Any:
        raise OSError("no terminal")

    num_before = llm.engine.stats.num_requests
    with pytest.raises(OSError, match="no terminal"):
        llm.generate([list(SOME_PROMPT)], greedy(3), use_tqdm=broken)
    assert llm.engine.stats.num_requests == num_before
    assert_idle(llm)


class WithoutItems:
    """Iterable by its type, like a tensor without axes, but not in fact."""

    def __iter__(self) -> Any:
        raise TypeError("iteration over a 0-d tensor")


@pytest.mark.parametrize(("call", "message"), [
    (lambda llm: llm.generate(b"abc"), "prompts must be"),
    (lambda llm: llm.generate(bytearray(b"abc")), "prompts must be"),
    (lambda llm: llm.generate({5, 6}), "prompts must be"),
    (lambda llm: llm.generate(WithoutItems()), "prompts must be"),
    (lambda llm: llm.generate([[5]], greedy(2), priority=""), "priority must be an integer"),
    (lambda llm: llm.generate([[5]], greedy(2), priority=False), "priority must be an integer"),
    (lambda llm: llm.generate([[5]], greedy(2), priority=0.0), "priority must be an integer"),
    (lambda llm: llm.generate([[5]], greedy(2), priority=[]), "0 priority for 1 prompts"),
    (lambda llm: llm.generate([[5]], greedy(2), use_tqdm="yes"), "use_tqdm must be"),
    (lambda llm: llm.follow([[5]], greedy(2), before_step=5), "before_step must be"),
    (lambda llm: llm.beam_search([[5]], SamplingParams()), "params must be a BeamSearchParams"),
    (lambda llm: llm.beam_search([{"prompt_token_ids": [5], "bidirectional_spans": [[0, 1]]}], BEAMS), "not supp"),
    (lambda llm: llm.beam_search([{"prompt_token_ids": [5], "cache_salt": "x"}], BEAMS), "'cache_salt' is not supp"),
    (lambda llm: llm.beam_search([{"prompt_embeds": torch.zeros(2, 64)}], BEAMS), "'prompt_embeds' is not supp"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], add_generation_prompt="no"), "add_generation_prompt"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], continue_final_message=1), "continue_final_message must"),
    (lambda llm: llm.generate("a\ud83d"), "holds half of a character"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], continue_final_message=True, add_generation_prompt=True),
     "only one of them can be true"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"add_generation_prompt": False}),
     "must not set add_generation_prompt"),
    (lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs=[5]), "chat_template_kwargs must"),
])
def test_arguments_of_a_wrong_type(llm: LLM, call: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert_idle(llm)


def test_no_prompts_and_no_conversations_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == [] and llm.chat([]) == []


def test_beams_end_where_the_engine_does(llm: LLM) -> None:
    """As a request of `generate` does, which ends for its length too."""
    longest = llm.engine.limits.max_len
    for room in (1, 2, 3, 5):
        (output,) = llm.beam_search([prompt_of(room, longest - room)], replace(BEAMS, ignore_eos=True))
        assert {(len(own.tokens), own.finish_reason) for own in output.sequences} == {
            (min(longest, longest - room + BEAMS.max_tokens), "length")}
    with pytest.raises(ValueError, match="no room for an answer"):
        llm.beam_search([prompt_of(1, longest)], BEAMS)
    assert_idle(llm)


def test_a_beam_whose_request_fails_is_not_left_out_silently(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("no such token")

    monkeypatch.setattr(SampleOutput, "take", fails)
    with pytest.raises(RuntimeError, match="one of its requests failed.*no such token"):
        llm.beam_search([list(SOME_PROMPT)], BeamSearchParams(beam_width=2, max_tokens=3))


def test_an_ended_engine_says_so_in_every_thread() -> None:
    llm, told = make_llm("llama", drafts=False), []

    def work() -> None:
        with pytest.raises(EngineError, match="the engine was closed"):
            while True:
                generate(llm)
        told.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    llm.close()
    for thread in threads:
        thread.join()
    assert told == [1, 1]
