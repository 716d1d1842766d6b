"""Ctrl-C on any line of a call that reads an adapter again: another caller's request goes on with the load that it
began with, the next calls are right, and no load is left behind."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from outrider.adapter_loading import load
from outrider.async_llm import AsyncLLM
from outrider.features.adapters.store import AdapterStore
from outrider.llm import LLM
from outrider.lora_request import LoRARequest
from tests.adapters.folders import write_adapter
from tests.adapters.test_engine import ADAPTERS, model_of, registry_of, text_of
from tests.engine.harness import Rig, greedy, prompt_of
from tests.engine.test_interrupts import Tracer, traced, within_limit

PROMPT = prompt_of(3, 20) * 2
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("interrupts")
    return [write_adapter(path / f"own{index}", model_of("llama"), index, 4) for index in range(3)]


@contextmanager
def served(path: Path) -> Iterator[tuple[Rig, LLM, LoRARequest]]:
    with Rig(model_of("llama"), poison=False, **ADAPTERS) as rig:
        yield rig, LLM.around(rig.engine), LoRARequest("own", 1, str(path))


def put(path: Path, folder: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder, path)


def text(llm: LLM, adapter: LoRARequest | None, num_tokens: int = NUM_TOKENS) -> list[int]:
    (output,) = llm.generate([PROMPT], greedy(num_tokens), lora_request=adapter, use_tqdm=False)
    assert output.outputs[0].error is None
    return output.outputs[0].token_ids


def reloading(asked: LoRARequest) -> LoRARequest:
    return LoRARequest(asked.lora_name, 1, asked.lora_path, load_inplace=True)


def assert_nothing_is_held(rig: Rig) -> None:
    """The one load that is served is known alike everywhere, and nothing keeps it."""
    registry, store = registry_of(rig), rig.step.deltas
    assert isinstance(store, AdapterStore) and rig.runner.in_order(int).result() == 0
    assert len(registry._loads) == len(registry.sizes) == len(registry._labels) == store.num_loaded == 1
    assert list(registry._current.values()) == list(registry._loads)
    assert all(each.is_idle and not each.is_replaced for each in registry._loads.values())
    assert not rig.engine.has_work and rig.engine.scheduler.cache.usage() == 0
    rig.engine.scheduler.check_integrity()


def test_an_interrupt_leaves_a_request_its_adapter_that_was_read_again(folders: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "own"
    put(path, folders[0])
    with served(path) as (rig, llm, asked):
        running = llm.stream(PROMPT, greedy(NUM_TOKENS), lora_request=asked)
        next(running)
        put(path, folders[1])
        assert text(llm, reloading(asked), 2) == text_of("llama", folders[1], tuple(PROMPT))[:2]

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm._loop.run(interrupted)
        *_, last = running
        assert (last.outputs[0].error, last.outputs[0].token_ids) == (None, text_of("llama", folders[0], tuple(PROMPT)))
        assert text(llm, None) == text_of("llama", None, tuple(PROMPT))
        assert text(llm, asked) == text_of("llama", folders[1], tuple(PROMPT))
        assert_nothing_is_held(rig)


def test_a_request_whose_adapter_is_gone_never_reaches_the_scheduler(folders: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "own"
    put(path, folders[0])
    with served(path) as (rig, llm, asked):
        running = llm.stream(PROMPT, greedy(NUM_TOKENS), lora_request=asked)
        next(running)
        (followed,) = llm._loop._followed.values()
        running.close()
        registry_of(rig).remove("own")
        with pytest.raises(ValueError, match="adapter is not loaded any more: load the adapter again"):
            rig.engine.resume("gone", followed.queued, {0: []})
        assert not rig.engine.has_work and text(llm, None) == text_of("llama", None, tuple(PROMPT))


def test_an_interrupt_lets_no_load_go_that_another_call_waits_for(folders: list[Path], tmp_path: Path) -> None:
    """Another thread's call, say, whose request is about to be added; loads that only the interrupted call held go."""
    path = tmp_path / "own"
    put(path, folders[0])
    with served(path) as (rig, llm, asked):
        registry = registry_of(rig)
        waiting, lost = registry.begin(asked), [registry.begin(reloading(asked))]
        while not registry.is_ready(waiting.number):
            rig.engine.step()

        def interrupted() -> None:
            raise KeyboardInterrupt

        for expected in ([waiting.number, lost[0].number], [waiting.number]):
            with pytest.raises(KeyboardInterrupt):
                llm._loop.run(interrupted)
            llm._loop.run(lambda: None)
            assert list(registry._loads) == expected
            lost.clear()
        assert not registry._loads[waiting.number].is_idle
        registry.release(waiting)
        assert_nothing_is_held(rig)


def test_a_task_that_is_cancelled_while_it_asks_holds_no_load(folders: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "own"
    put(path, folders[0])

    async def main() -> None:
        with Rig(model_of("llama"), poison=False, **ADAPTERS) as rig:
            async with AsyncLLM.around(rig.engine) as llm:
                registry, begun = registry_of(rig), asyncio.Event()
                loop = asyncio.get_running_loop()

                def begin() -> object:
                    hold = registry.begin(LoRARequest("own", 1, str(path)))
                    loop.call_soon_threadsafe(begun.set)
                    return hold

                task = asyncio.ensure_future(load(registry, llm._owner.call, begin))  # type: ignore[arg-type]
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                del task
                await asyncio.wrap_future(llm._owner.call(lambda: None))
                assert all(each.is_idle for each in registry._loads.values())

    asyncio.run(main())


def interrupt_at_random_lines(folders: list[Path], path: Path, num_cases: int, seed: int) -> int:
    """Returns how many interrupts landed."""
    rng, num_landed = Random(seed), 0
    texts = [text_of("llama", folder, tuple(PROMPT)) for folder in folders]
    put(path, folders[0])
    with served(path) as (rig, llm, asked), within_limit():
        with traced(Tracer()) as tracer:
            assert text(llm, reloading(asked)) == texts[0]
        lines, before = tracer.count, 0
        for case in range(num_cases):
            other = llm.stream(PROMPT, greedy(NUM_TOKENS), lora_request=asked)
            assert next(other).outputs[0].token_ids
            after = (before + 1) % len(folders)
            put(path, folders[after])
            try:
                with traced(Tracer(rng.randint(1, lines))) as tracer:
                    text(llm, reloading(asked))
            except KeyboardInterrupt:
                num_landed += 1
            where = (case, tracer.where)
            if case % 2:
                text(llm, reloading(asked))
            *_, last = other
            assert (last.outputs[0].error, last.outputs[0].token_ids) == (None, texts[before]), where
            assert text(llm, None) == text_of("llama", None, tuple(PROMPT)), where
            assert text(llm, reloading(asked)) == texts[after] == text(llm, asked), where
            assert_nothing_is_held(rig)
            before = after
    return num_landed


def test_an_interrupt_on_any_line_of_a_reload_harms_nothing(folders: list[Path], tmp_path: Path) -> None:
    assert interrupt_at_random_lines(folders, tmp_path / "own", 8, 1) > 4


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_interrupts_of_reloads(folders: list[Path], tmp_path: Path, seed: int) -> None:
    assert interrupt_at_random_lines(folders, tmp_path / "own", 120, seed) > 60
