"""A pause in four modes: running requests end, run to their ends, are computed again, or go on with what they have."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM, AsyncLLM, RequestOutput
from outrider.core.outputs import CompletionOutput
from outrider.engine.pause import PauseWait
from outrider.engine.worker_line import EngineError
from outrider.mixers.recurrent import RecurrentRows
from tests.engine.harness import greedy, prompt_of, with_other_weights
from tests.engine.test_update_weights import llama, mtp, speculative
from tests.models.oracle import hf_model, make_folder

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 128, "max_num_seqs": 3,
                            "num_pages": 128, "enable_prefix_caching": True}
MODELS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "attention, ngram": lambda path: (make_folder("llama", path / "llama"), speculative("ngram")),
    "Mamba-2, mtp": mtp("nemotron_h"),
    "gated delta, mtp": mtp("qwen3_5_moe"),
}
LENGTH = 40
FEW = [5, 6, 7, 8]  # tokens of answers in which drafts of n-grams are accepted
PROMPTS = [prompt_of(3, 20), prompt_of(4, 8) * 4]


@dataclass
class Made:
    folder: Path
    other: Path
    settings: dict[str, Any]


@pytest.fixture(params=[*list(MODELS)[:2], pytest.param("gated delta, mtp", marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    folder, drafts = MODELS[request.param](tmp_path)
    return Made(folder, with_other_weights(folder, tmp_path / "other"), SETTINGS | {"speculative_config": drafts})


def whole(llm: LLM, prompts: list[list[int]], length: int = LENGTH, **fields: Any) -> list[CompletionOutput]:
    params = greedy(length, ignore_eos=True, **fields)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def begin(llm: LLM, prompts: list[list[int]], least: int = 8, **fields: Any) -> list[str]:
    """Add requests, and make steps until each has some tokens. Returns their ids."""
    ids = [f"{len(prompt)}-{index}" for index, prompt in enumerate(prompts)]
    for name, prompt in zip(ids, prompts, strict=True):
        llm.llm_engine.add_request(name, prompt, greedy(LENGTH, ignore_eos=True, **fields))
    found: dict[str, RequestOutput] = {}
    while len(found) < len(ids) or min(len(output.outputs[0].token_ids) for output in found.values()) < least:
        found |= {output.request_id: output for output in llm.llm_engine.step()}
    return ids


def step_to_ends(llm: LLM) -> dict[str, CompletionOutput]:
    found: dict[str, CompletionOutput] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0]
    return found


def no_page_is_known(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    return scheduler.cache.pool.forget_cached()


def test_abort_ends_requests_with_what_they_have(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        expected = whole(llm, PROMPTS)
        ids = begin(llm, PROMPTS)
        llm.pause_generation()
        ended = step_to_ends(llm)
        for name, each in zip(ids, expected, strict=True):
            tokens = ended[name].token_ids
            assert ended[name].finish_reason == "abort" and 8 <= len(tokens) < LENGTH
            assert tokens == each.token_ids[: len(tokens)]
        assert no_page_is_known(llm) and llm.is_paused()
        llm.resume_generation()
        assert whole(llm, PROMPTS) == expected


def test_wait_runs_requests_to_their_ends(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        expected = whole(llm, PROMPTS)
        ids = begin(llm, PROMPTS)
        llm.pause_generation("wait")
        assert not llm.engine.num_requests
        ended = step_to_ends(llm)
        assert [ended[name].token_ids for name in ids] == [each.token_ids for each in expected]
        assert {each.finish_reason for each in ended.values()} == {"length"}
        llm.llm_engine.add_request("late", PROMPTS[0], greedy(LENGTH, ignore_eos=True))
        assert llm.llm_engine.step() == [] and llm.is_paused()
        with pytest.raises(ValueError, match="none can run: the engine is paused"):
            llm.pause_generation("wait")
        llm.resume_generation()
        assert step_to_ends(llm)["late"].token_ids == expected[0].token_ids


@contextmanager
def waiting(llm: LLM) -> Iterator[Future[None]]:
    """A thread that waits for the ends of two requests, which nobody steps but the thread."""
    begin(llm, PROMPTS)
    with held_steps(llm) as go_on, ThreadPoolExecutor(1) as thread:
        waiter = thread.submit(llm.pause_generation, "wait")
        while not llm.engine.pause.is_coming:
            time.sleep(0.001)
        try:
            yield waiter
        finally:
            go_on()


@contextmanager
def held_steps(llm: LLM) -> Iterator[Callable[[], None]]:
    """Steps take no effect until the function is called that this yields."""
    step, is_held = llm.engine.step, threading.Event()
    is_held.set()
    llm.engine.step = lambda: [] if is_held.is_set() else step()  # type: ignore[method-assign]
    yield is_held.clear
    llm.engine.step = step  # type: ignore[method-assign]


def test_who_comes_while_others_run_to_their_ends_waits(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm:
        with waiting(llm) as waiter:
            late = threading.Thread(target=lambda: whole(llm, PROMPTS[:1]))
            late.start()
        waiter.result()
        assert late.is_alive() and not llm.engine.num_requests
        llm.resume_generation()
        late.join()


def test_a_wait_that_fails_leaves_the_pause_of_another_caller(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm:
        with waiting(llm) as waiter:
            llm.pause_generation("keep")
            with pytest.raises(ValueError, match="another call paused the engine before all requests had ended"):
                waiter.result()
            assert llm.is_paused() and llm.engine.num_requests
        llm.resume_generation()
        assert len(step_to_ends(llm)) == len(PROMPTS)


def test_resume_ends_a_wait(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm:
        with waiting(llm) as waiter:
            llm.resume_generation()
            with pytest.raises(ValueError, match="resume_generation was called before all requests had ended"):
                waiter.result()
        assert not llm.is_paused() and not llm.engine.pause.is_coming
        assert len(step_to_ends(llm)) == len(PROMPTS)


def test_a_wait_that_is_interrupted_on_any_line_holds_back_no_request(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm:
        expected = whole(llm, PROMPTS)
        begin(llm, PROMPTS)
        waits = [PauseWait(clears_cache=True)]
        llm._loop.run(lambda: llm._maintenance.begin_wait(waits[0]))
        assert llm.engine.pause.is_coming
        waits.clear()
        assert whole(llm, PROMPTS) == expected


def test_whoever_waits_hears_of_the_end_of_the_engine(tmp_path: Path) -> None:
    with LLM(str(llama(tmp_path)), **SETTINGS) as llm, ThreadPoolExecutor(1) as thread:
        begin(llm, PROMPTS)
        wait = PauseWait(clears_cache=True)
        llm._loop.run(lambda: llm._maintenance.begin_wait(wait))
        late = thread.submit(whole, llm, PROMPTS[:1])
        llm.close()
        with pytest.raises(EngineError):
            late.result()
        with pytest.raises(EngineError):
            llm._loop.step_until(lambda: llm._maintenance.pause_if_done(wait))


def test_kept_requests_are_computed_again_under_new_weights(made: Made) -> None:
    with LLM(str(made.folder), **made.settings) as llm:
        ids = begin(llm, PROMPTS)
        llm.pause_generation("keep")
        llm.update_weights(made.other)
        assert not llm.engine.has_work or llm.llm_engine.step()
        llm.resume_generation()
        ended = step_to_ends(llm)
        hits = whole(llm, PROMPTS)
    with LLM(str(made.other), **made.settings) as fresh:
        for name, prompt in zip(ids, PROMPTS, strict=True):
            (_, start, first), (version, again, end) = ended[name].weight_versions
            assert (start, version, again, end) == (0, 1, first, LENGTH) and first >= 8
            tokens = ended[name].token_ids
            assert whole(fresh, [prompt + tokens[:first]], LENGTH - first)[0].token_ids == tokens[first:]
        assert [each.token_ids for each in whole(fresh, PROMPTS)] == [each.token_ids for each in hits]


@pytest.mark.parametrize("mode", ["abort", "keep", "running", "idle"])
def test_drafts_are_folded_only_where_requests_go_on_in_place(tmp_path: Path, mode: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MODELS["Mamba-2, mtp"](tmp_path)[0]
    other = with_other_weights(folder, tmp_path / "other")
    monkeypatch.setattr(RecurrentRows, "fold_pending", lambda rows: pytest.fail("no request needs this"))
    with LLM(str(folder), **SETTINGS | {"speculative_config": speculative("ngram")}) as llm:
        begin(llm, PROMPTS, allowed_token_ids=FEW)
        if mode in ("abort", "keep"):
            llm.pause_generation(mode)
        if mode == "idle":
            step_to_ends(llm)
            llm.pause_generation("keep", clear_cache=False)
        for weights in (other, load_file(folder / "model.safetensors")):
            llm.update_weights(weights)
        llm.load_weights(load_file(other / "model.safetensors"))
        llm.reset_prefix_cache()
        llm.resume_generation()
        step_to_ends(llm)
        tokens = whole(llm, PROMPTS)
    with LLM(str(other), **SETTINGS) as fresh:
        assert [each.token_ids for each in whole(fresh, PROMPTS)] == [each.token_ids for each in tokens]


def continued(made: Made, prompt: list[int], old: list[int], length: int) -> list[int]:
    """What transformers generate: the cache of all tokens but the last is the old model's."""
    before, after = (hf_model(folder, torch.float64, experts_implementation="eager")
                     for folder in (made.folder, made.other))
    ids, tokens = torch.tensor([prompt + old]), []
    with torch.no_grad():
        cache = before(ids[:, :-1], use_cache=True).past_key_values
        given = ids[:, -1:]
        while len(tokens) < length:
            logits = after(given, past_key_values=cache, use_cache=True).logits[0, -1]
            tokens.append(FEW[int(logits[FEW].argmax())])
            given = torch.tensor([tokens[-1:]])
    return tokens


def test_requests_go_on_in_place_with_what_they_have_computed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    fold = RecurrentRows.fold_pending

    def counted(rows: RecurrentRows) -> None:
        pending.append(int(rows.pending.sum()))
        fold(rows)

    monkeypatch.setattr(RecurrentRows, "fold_pending", counted)
    prompt = PROMPTS[1]
    for least in range(8, 20):  # until drafts were accepted just before the pause
        with LLM(str(made.folder), **made.settings | {"speculative_config": speculative("ngram")}) as llm:
            (name,) = begin(llm, [prompt], least, allowed_token_ids=FEW)
            llm.pause_generation("keep", clear_cache=False)
            llm.update_weights(made.other)
            llm.resume_generation()
            output = step_to_ends(llm)[name]
            (_, start, first), (version, then, end) = output.weight_versions
            assert (start, version, then, end) == (0, 1, first, LENGTH) and first >= least
            assert no_page_is_known(llm), "pages of two versions are not published"
            hits = whole(llm, [prompt], allowed_token_ids=FEW)[0].token_ids
        tokens = output.token_ids
        assert tokens[first:] == continued(made, prompt, tokens[:first], LENGTH - first)
        if pending[-1] or not llm.engine.scheduler.cache.takes_checkpoints:
            break
    else:
        raise AssertionError(f"no drafts were pending: {pending}")
    with LLM(str(made.other), **made.settings) as fresh:
        assert whole(fresh, [prompt], allowed_token_ids=FEW)[0].token_ids == hits
        again = whole(fresh, [prompt + tokens[:first]], LENGTH - first, allowed_token_ids=FEW)[0].token_ids
        assert again != tokens[first:], "the mode makes a difference"


def test_a_request_in_place_that_is_preempted_is_computed_again(made: Made) -> None:
    prompt = PROMPTS[0]
    with LLM(str(made.folder), **made.settings) as llm:
        (name,) = begin(llm, [prompt])
        llm.pause_generation("keep", clear_cache=False)
        llm.update_weights(made.other)
        llm.reset_prefix_cache(reset_running_requests=True)
        llm.resume_generation()
        output = step_to_ends(llm)[name]
        first = output.weight_versions[0][2]
        assert llm.engine.scheduler.cache.pool._page_of, "its pages are of one version again"
    with LLM(str(made.other), **made.settings) as fresh:
        tokens = output.token_ids
        assert whole(fresh, [prompt + tokens[:first]], LENGTH - first)[0].token_ids == tokens[first:]


def test_asyncio_callers_pause_in_all_modes(tmp_path: Path) -> None:
    folder = llama(tmp_path)
    other = with_other_weights(folder, tmp_path / "other")

    async def main() -> None:
        async with AsyncLLM(str(folder), **SETTINGS) as llm:
            async def read(least: asyncio.Event | None = None) -> CompletionOutput:
                async for output in llm.generate(PROMPTS[0], greedy(LENGTH, ignore_eos=True)):
                    if least is not None and len(output.outputs[0].token_ids) >= 4:
                        least.set()
                return output.outputs[0]

            async def started() -> asyncio.Task[CompletionOutput]:
                has_some = asyncio.Event()
                task = asyncio.create_task(read(has_some))
                await has_some.wait()
                return task

            expected = await read()
            running = await started()
            await llm.pause_generation()
            aborted = await running
            assert aborted.finish_reason == "abort" and len(aborted.token_ids) < LENGTH
            await llm.resume_generation()
            running = await started()
            await llm.pause_generation(mode="wait")
            assert (await running) == expected
            await llm.resume_generation()
            running = await started()
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.update_weights(other)
            await llm.resume_generation()
            (old, _, first), (new, _, _) = (await running).weight_versions
            assert (old, new) == (0, 1) and 4 <= first < LENGTH

    asyncio.run(main())


LONG = 3000  # tokens of an answer that is still running when what a test does with it is done
Answers = asyncio.Task[CompletionOutput]


def with_asyncio(tmp_path: Path, use: Callable[[AsyncLLM, Callable[..., Awaitable[Answers]]], Awaitable[None]]) -> None:
    """Run `use` with an engine and a function that starts an answer and returns when it has some tokens."""
    async def main() -> None:
        folder = llama(tmp_path, max_position_embeddings=4096)
        async with AsyncLLM(str(folder), **SETTINGS | {"max_model_len": 4096, "num_pages": 600}) as llm:
            async def read(name: str, length: int, has_some: asyncio.Event) -> CompletionOutput:
                async for output in llm.generate(PROMPTS[0], greedy(length, ignore_eos=True), name):
                    if output.outputs[0].token_ids:
                        has_some.set()
                return output.outputs[0]

            async def start(name: str, length: int = LONG, waits: bool = True) -> Answers:
                has_some = asyncio.Event()
                task = asyncio.create_task(read(name, length, has_some))
                if waits:
                    await has_some.wait()
                return task

            await use(llm, start)

    asyncio.run(main())


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


async def wait_begun(llm: AsyncLLM) -> asyncio.Task[None]:
    waiter = asyncio.create_task(llm.pause_generation(mode="wait"))
    await until(lambda: llm.engine.pause.is_coming)
    return waiter


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_an_asyncio_wait_that_ends_early_leaves_the_pause_of_another_caller(tmp_path: Path, how: str) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        running = await start("running")
        waiter = await wait_begun(llm)
        if how == "is cancelled":
            asyncio.get_running_loop().call_later(0.001, waiter.cancel)
        await llm.pause_generation(mode="keep")
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await waiter
        await asyncio.wrap_future(llm._owner.call(lambda: None))  # after what the waiter has left to do
        assert await llm.is_paused() and not running.done()
        await llm.abort("running")
        assert (await running).finish_reason == "abort"

    with_asyncio(tmp_path, use)


def test_a_cancelled_asyncio_wait_holds_back_no_request_and_leaves_no_pause(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        for turns in range(40):  # at all places, also after the pause has come
            answer = await start(f"short {turns}", 4)
            waiter = asyncio.create_task(llm.pause_generation(mode="wait"))
            for _ in range(turns):
                await asyncio.sleep(0)
            if not waiter.done():
                time.sleep(0.02 * (turns % 2))  # the engine goes on, of which the waiter does not hear yet
                waiter.cancel()
                await asyncio.wait([waiter])
            if waiter.cancelled():
                assert len((await (await start("next", 2))).token_ids) == 2
            await llm.resume_generation()
            await answer

    with_asyncio(tmp_path, use)


def test_resume_ends_an_asyncio_wait(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        running = await start("running")
        waiter = await wait_begun(llm)
        held = await start("held back", 4, waits=False)
        await llm.resume_generation()
        with pytest.raises(ValueError, match="resume_generation was called before all requests had ended"):
            await waiter
        assert len((await held).token_ids) == 4 and not running.done() and not await llm.is_paused()

    with_asyncio(tmp_path, use)


@pytest.mark.parametrize("how", ["fails", "is shut down"])
def test_asyncio_callers_who_wait_hear_of_the_end_of_the_engine(tmp_path: Path, how: str) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        running = await start("running")
        waiter = await wait_begun(llm)
        held = await start("held back", 4, waits=False)
        await asyncio.sleep(0.02)
        if how == "fails":
            llm.fail("no power")
        else:
            await asyncio.to_thread(llm.shutdown)
        for task in (running, waiter, held):
            with pytest.raises(EngineError, match="no power" if how == "fails" else "was shut down"):
                await task

    with_asyncio(tmp_path, use)


def test_an_abort_just_before_a_pause_or_in_it_ends_a_request_at_once(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        before = await start("before")
        gate = threading.Event()
        llm._owner.call(gate.wait)  # the next two commands come with no step between them
        both = asyncio.gather(llm.abort("before"), llm.pause_generation(mode="keep"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.set()
        await both
        assert (await before).finish_reason == "abort" and await llm.is_paused()
        await llm.resume_generation()
        inside, left = await start("inside"), await start("left")
        await llm.pause_generation(mode="keep")
        await llm.abort("inside")
        assert (await inside).finish_reason == "abort" and llm.engine.num_requests
        left.cancel()
        await until(lambda: not llm.engine.num_requests)
        assert await llm.is_paused()

    with_asyncio(tmp_path, use)


def test_an_abort_ends_a_request_that_is_held_back(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM, start: Callable[..., Awaitable[Answers]]) -> None:
        running = await start("running")
        waiter = await wait_begun(llm)
        held, other = await start("held back", waits=False), await start("other", waits=False)
        await until(lambda: len(llm._held_back) == 2)
        await llm.abort("held back")
        ended = await held
        assert ended.finish_reason == "abort" and not waiter.done() and not running.done() and not other.done()
        await llm.abort("running")
        await waiter
        assert await llm.is_paused() and not other.done()

    with_asyncio(tmp_path, use)
