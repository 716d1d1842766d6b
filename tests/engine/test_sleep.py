"""Sleeping and waking: memory is given back, requests wait and go on with equal tokens, and every misuse has an answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import sys
import threading
import weakref
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.async_llm import AsyncLLM
from outrider.config import EngineConfig
from outrider.core.outputs import RequestOutput
from outrider.engine.assembly import engine_around
from outrider.engine.start import start_engine
from outrider.engine.worker_line import EngineError
from outrider.kernels import cpu as native
from outrider.layers import Linear, find_modules
from outrider.runner import storages
from outrider.runner.commands import WakeReport
from outrider.runner.storages import FreedMemory, find_storages
from outrider.runner.worker import Worker
from tests import garbage
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import CONFIGS, greedy, prompt_of, random_model, save_folder, tokens_of
from tests.engine.recurrent_rig import HYBRIDS
from tests.engine.test_interrupts import Tracer, traced, within_limit
from tests.learning.rigs import prompts as language_prompts
from tests.models.test_hybrid_mtp import CASES, make_checkpoint

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 3,
                            "max_num_batched_tokens": 48, "num_pages": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
WIDE = CONFIGS["llama"] | {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256}
PROMPTS = [prompt_of(1, 40), prompt_of(2, 6) * 4]


def generated(llm: LLM) -> list[list[list[int]]]:
    return tokens_of(llm.generate([list(p) for p in PROMPTS], greedy(12, ignore_eos=True)))


def let_memory_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was freed comes back elsewhere, as on a GPU. Only for float64, which native code does not serve: on a
    CPU it holds addresses."""
    monkeypatch.setattr(storages, "_can_move", lambda storage: True)
    monkeypatch.setattr(storages, "_to_host", torch.clone)
    monkeypatch.setattr("outrider.kernels.buffers.DIRECT_BYTES", 1 << 40)  # torch allocates all, and can resize it


def resident_bytes(held: list[torch.UntypedStorage]) -> int:
    """Bytes of whole pages of these storages that lie in memory."""
    total = 0
    for storage in held:
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            pages = (ctypes.c_ubyte * ((last - first) // mmap.PAGESIZE))()
            assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pages) == 0
            total += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return total


@pytest.mark.parametrize("family", ["llama", "gated_delta"])
@pytest.mark.parametrize("level", [1, 2])
def test_requests_are_preempted_and_go_on_with_equal_tokens(tmp_path: Path, family: str, level: int) -> None:
    folder = str(save_folder(tmp_path / family, (CONFIGS | HYBRIDS)[family], seed=3))
    with LLM(folder, **SETTINGS, speculative_config=NGRAM) as llm:
        expected, stream = generated(llm), llm.follow([list(p) for p in PROMPTS], greedy(12, ignore_eos=True))
        outputs: dict[str, RequestOutput] = {}
        while not outputs or not outputs[min(outputs)].outputs[0].token_ids:
            output = next(stream)
            outputs[output.request_id] = output
        llm.sleep(level)
        assert llm.is_sleeping() and llm.engine.scheduler.num_running == 0
        llm.engine.scheduler.check_integrity()
        llm.wake_up()
        assert not llm.is_sleeping()
        outputs |= {output.request_id: output for output in stream}
        assert tokens_of([outputs[key] for key in sorted(outputs, key=int)]) == expected
        assert any(output.metrics.num_preemptions for output in outputs.values())
        hits = llm.engine.stats.num_hit_tokens
        llm.sleep(level)
        llm.wake_up()
        assert generated(llm) == expected, "something was found in pages that have lost their content"
        assert llm.engine.stats.num_hit_tokens == hits


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("case", ["llama, eagle3", pytest.param("states, mtp", marks=pytest.mark.long)])
def test_memory_that_comes_back_elsewhere_holds_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               case: str, level: int) -> None:
    let_memory_move(monkeypatch)
    if case == "llama, eagle3":
        drafts = make_drafter("eagle3", "llama", tmp_path / "eagle3").speculative(2)
        folder = save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)
    else:
        folder = make_checkpoint("nemotron_h", CASES["nemotron_h"], tmp_path / "nemotron_h")
        drafts = {"method": "mtp", "num_speculative_tokens": 2, "auto": False}
    with LLM(str(folder), **SETTINGS | {"dtype": "float64"}, speculative_config=drafts) as llm:
        worker: Any = llm.engine.runner
        expected, accepted = generated(llm), llm.engine.stats.num_accepted_tokens
        roots = [worker.device_step.model, worker.device_step.drafter.modules(), worker.device_step.pool.data]
        places = {key: (storage, storage.data_ptr(), storage.nbytes())
                  for key, storage in find_storages(roots).items()}
        weights = sum(slot.nbytes for slot in worker.device_step.model.weights().values())
        report = llm.sleep(level)
        assert report.freed_bytes == report.total_bytes and (report.host_bytes >= weights) == (level == 1)
        assert not any(storage.nbytes() for storage, _, _ in places.values())
        junk = [torch.full((size,), 255, dtype=torch.uint8) for _, _, size in places.values()]  # in their places
        llm.wake_up()
        assert all(storage.nbytes() == size for storage, _, size in places.values())
        assert sum(storage.data_ptr() != place for storage, place, _ in places.values()) > len(junk) // 2
        assert generated(llm) == expected and llm.engine.stats.num_accepted_tokens == 2 * accepted
        held = list(find_storages(roots).values())  # some tensors were derived anew
        llm.sleep(level)
        with pytest.raises(ValueError, match="no weights of these names"):
            llm.update_weights({"nothing": torch.ones(1)})
        assert not any(storage.nbytes() for storage in held), "it sleeps on"
        llm.update_weights(folder)
        llm.wake_up()
        assert generated(llm) == expected and llm.engine.stats.num_accepted_tokens == 3 * accepted


@pytest.mark.parametrize("is_given", [False, True], ids=["read again", "update"])
def test_a_trained_drafter_drafts_as_before_after_a_deep_sleep(is_given: bool) -> None:
    """Its head is accepted often, which shows whether its weights came back; they are not among those of an update."""
    assets = Path(__file__).parents[1] / "assets"
    speculative = {"method": "eagle3", "model": str(assets / "eagle3"), "num_speculative_tokens": 3, "auto": False}
    settings = SETTINGS | {"dtype": "float32", "speculative_config": speculative, "skip_tokenizer_init": True}
    with LLM(str(assets / "target"), **settings) as llm:
        worker: Any = llm.engine.runner

        def answers() -> tuple[list[list[list[int]]], int]:
            before = llm.engine.stats.num_accepted_tokens
            outputs = llm.generate(language_prompts(4, seed=3), greedy(16, ignore_eos=True, detokenize=False))
            return tokens_of(outputs), llm.engine.stats.num_accepted_tokens - before

        def weights() -> list[torch.Tensor]:
            return [slot.target.clone() for module in worker.device_step.drafter.modules()
                    for slot in module.weights().values()]

        expected, held = answers(), weights()
        assert expected[1] > 16
        llm.sleep(level=2)
        if is_given:
            llm.update_weights(assets / "target")
        llm.wake_up()
        assert all(torch.equal(*pair) for pair in zip(weights(), held, strict=True))
        assert answers() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes memory back while its address stays")
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "library"])
def test_level_2_frees_weights_copies_and_pool(tmp_path: Path, is_native: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are numbers of bfloat16: copies in 16 bits, or in a library's layout, are held beside them."""
    if not (native.available() if is_native else torch.backends.mkldnn.is_available()):
        pytest.skip("there are no packed copies of this kind here")
    if not is_native:
        monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(gc, "unfreeze", garbage.unfreeze)
    folder = save_folder(tmp_path / "wide", WIDE, seed=3)
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    with LLM(str(folder), **SETTINGS | {"num_pages": 512}) as llm:
        worker: Any = llm.engine.runner
        expected, model, step = generated(llm), worker.device_step.model, worker.device_step
        step.pool.data.fill_(1.0)  # so that all of it is in memory
        weights = [slot.target for slot in model.weights().values()]
        held = list(find_storages([weights, step.pool.data]).values())
        copies = [weakref.ref(linear.format._prepared.copy) for linear in find_modules([model], Linear)]
        num_copied = sum(copy().nbytes for copy in copies if copy().layout is torch.strided)
        before = resident_bytes(held)
        report = llm.sleep(level=2)
        left, num_left = resident_bytes(held), sum(copy() is not None for copy in copies)
        assert left < 0.05 * before and num_left == 0
        assert report.freed_bytes >= 0.95 * report.total_bytes >= 0.9 * (before + num_copied)
        llm.wake_up()
        assert generated(llm) == expected
        report = llm.sleep(level=1)
        assert report.total_bytes > report.freed_bytes >= 0.95 * step.pool.data.nbytes, "weights stay on the host"
        report = llm.sleep(level=2)
        assert report.total_bytes >= report.freed_bytes > 0, "a deeper sleep drops them"
        llm.wake_up()
        assert generated(llm) == expected


def test_parts_wake_one_by_one(tmp_path: Path) -> None:
    with LLM(str(save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)), **SETTINGS) as llm:
        expected = generated(llm)
        assert llm.wake_up() == WakeReport(), "it is awake already"
        llm.sleep(level=2)
        again = llm.sleep(level=1)
        assert again.total_bytes == again.freed_bytes == 0, "it sleeps already"
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping() and llm.engine.pause.is_on
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert not llm.is_sleeping() and generated(llm) == expected
        for level in (0, 3, True, "1"):
            with pytest.raises(ValueError, match="level must be 1"):
                llm.sleep(level)  # type: ignore[arg-type]
        for tags in (["weight"], "weights", [1]):
            with pytest.raises(ValueError, match="'weights' and 'kv_cache'"):
                llm.wake_up(tags)  # type: ignore[arg-type]
        assert not llm.is_sleeping() and generated(llm) == expected


def test_a_refused_sleep_and_a_failed_wake_up_leave_things_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)
    with LLM(str(folder), **SETTINGS) as llm:
        expected = generated(llm)
        with monkeypatch.context() as patched:
            patched.setattr("outrider.runner.residence.FreedMemory", _no_memory)
            with pytest.raises(MemoryError, match="no room for a copy"):
                llm.sleep()
        assert not llm.is_sleeping() and generated(llm) == expected
        llm.sleep(level=2)
        file = folder / "model.safetensors"
        file.rename(folder / "elsewhere")
        with pytest.raises(FileNotFoundError, match="model.safetensors"):
            llm.wake_up()
        assert llm.is_sleeping()
        (folder / "elsewhere").rename(file)
        llm.wake_up()
        assert not llm.is_sleeping() and generated(llm) == expected


def _no_memory(*_: Any, **__: Any) -> FreedMemory:
    raise MemoryError("no room for a copy")


def test_a_model_without_files_sleeps_at_level_2_until_it_is_given_weights() -> None:
    config, model = EngineConfig("tiny", **SETTINGS), random_model(CONFIGS["sliding"], torch.float32, 5)
    weights = {name: slot.target.clone() for name, slot in model.weights().items()}
    with LLM.around(engine_around(config, Worker(config, model))) as llm:
        expected = generated(llm)
        llm.sleep(level=2)
        with pytest.raises(ValueError, match="give them by update_weights"):
            llm.wake_up()
        assert llm.is_sleeping()
        with pytest.raises(ValueError, match="this update lacks model.embed_tokens.weight"):
            llm.update_weights({name: weights[name] for name in weights if "embed" not in name})
        llm.update_weights(weights)
        assert llm.is_sleeping(), "the cache still sleeps"
        llm.wake_up()
        assert generated(llm) == expected


def test_requests_that_come_while_the_engine_sleeps_wait(tmp_path: Path) -> None:
    folder = str(save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3))

    async def main() -> None:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            async def ask(index: int, name: str) -> list[int]:
                stream = llm.generate(list(PROMPTS[index]), greedy(12, ignore_eos=True), request_id=name)
                *_, last = [list(output.outputs[0].token_ids) async for output in stream]
                return last

            expected = [await ask(index, f"before {index}") for index in (0, 1)]
            await llm.sleep()
            assert await llm.is_sleeping()
            steps = llm.engine.stats.num_steps
            tasks = [asyncio.create_task(ask(index, str(index))) for index in (0, 1)]
            dropped = asyncio.create_task(ask(0, "dropped"))
            while not all(llm.engine.is_live(name) for name in ("0", "1", "dropped")):
                await asyncio.sleep(0.005)
            await llm.abort("dropped")
            assert len(await dropped) == 0, "an abort waits for nobody"
            assert llm.engine.stats.num_steps == steps and not any(task.done() for task in tasks)
            report = await llm.wake_up()
            assert report.seconds > 0 and await asyncio.gather(*tasks) == expected
            await llm.sleep(level=2)  # and is shut down so

    asyncio.run(asyncio.wait_for(main(), timeout=300))


def test_a_thread_waits_until_another_one_wakes_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)), **SETTINGS) as llm:
        expected, found = generated(llm), []
        llm.sleep()
        thread = threading.Thread(target=lambda: found.append(generated(llm)))
        thread.start()
        while "requests wait for wake_up" not in caplog.text:
            thread.join(0.01)
        llm.wake_up()
        thread.join(60)
        assert found == [expected]


def test_an_engine_that_is_closed_while_it_sleeps_ends_what_waits(tmp_path: Path) -> None:
    llm = LLM(str(save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)), **SETTINGS)
    stream = llm.stream(list(PROMPTS[0]), greedy(12))
    next(stream)
    llm.sleep()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    for call in (llm.sleep, llm.wake_up, llm.reset_prefix_cache):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_worker_in_a_process_sleeps_and_gets_weights(tmp_path: Path) -> None:
    folder, other = (save_folder(tmp_path / name, CONFIGS["llama"], seed) for name, seed in (("a", 3), ("b", 4)))
    with LLM(str(other), **SETTINGS) as llm:
        theirs = generated(llm)
    with LLM.around(start_engine(EngineConfig(str(folder), **SETTINGS), in_process=True)) as llm:
        expected = generated(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert generated(llm) == expected
        with pytest.raises(ValueError, match="no weights of these names: nothing.weight"):
            llm.update_weights([("nothing.weight", torch.zeros(2))])
        from safetensors.torch import load_file

        assert llm.update_weights(load_file(other / "model.safetensors")).num_tensors == 21
        assert generated(llm) == theirs
        llm.update_weights(folder)
        assert generated(llm) == expected


def test_a_reset_of_the_prefix_cache_forgets_pages_that_no_request_holds(tmp_path: Path) -> None:
    with LLM(str(save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3)), **SETTINGS) as llm:
        expected = generated(llm)
        assert llm.reset_prefix_cache() and generated(llm) == expected and llm.engine.stats.num_hit_tokens == 0
        stream = llm.stream(list(PROMPTS[0]), greedy(12, ignore_eos=True))
        next(stream)
        assert not llm.reset_prefix_cache(), "a running request holds pages of its prompt"
        assert llm.reset_prefix_cache(reset_running_requests=True)
        *_, last = stream
        assert last.outputs[0].token_ids == expected[0][0] and last.metrics.num_preemptions == 1
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("num_cases", [12, pytest.param(120, marks=pytest.mark.long)])
def test_an_interrupt_on_any_line_leaves_an_engine_that_can_be_woken(tmp_path: Path, num_cases: int) -> None:
    folder, rng, num_landed = save_folder(tmp_path / "llama", CONFIGS["llama"], seed=3), Random(num_cases), 0
    with LLM(str(folder), **SETTINGS) as llm:
        def change() -> None:
            llm.sleep(level=2)
            llm.wake_up()
            llm.update_weights(folder)
            llm.reset_prefix_cache(reset_running_requests=True)

        expected = generated(llm)
        with traced(Tracer()) as tracer:
            change()
        lines = tracer.count
        for _ in range(num_cases):
            stream = llm.stream(list(PROMPTS[0]), greedy(12, ignore_eos=True))
            next(stream)
            try:
                with traced(Tracer(rng.randint(1, lines))) as tracer:
                    change()
            except KeyboardInterrupt:
                num_landed += 1
            with within_limit():
                llm.wake_up()
                if llm.engine.pause.is_on:
                    llm.update_weights(folder)
                *_, last = stream
                assert last.outputs[0].token_ids == expected[0][0], tracer.where
                assert generated(llm) == expected, tracer.where
            assert not llm.is_sleeping() and not llm.engine.pause.is_on
            llm.engine.scheduler.check_integrity()
        assert num_landed > num_cases // 2
