"""Engines with adapters: each request has the text of its own adapter, whatever runs beside it or before it."""

from __future__ import annotations

import functools
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.adapters import LoRARequest
from outrider.beam_search import BeamSearchParams
from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.step_messages import DeltaReach
from outrider.engine.start import start_engine
from outrider.features.adapters.loads import AdapterRegistry
from outrider.features.adapters.placements import AdapterPlacement, AdapterPlacements
from outrider.features.adapters.step_adapters import StepAdapters
from outrider.features.adapters.store import AdapterStore
from outrider.llm import LLM
from outrider.lora_request import AdapterHold
from outrider.models.base import Model
from outrider.runner.graphs.warm_up import run_dead
from tests.adapters.folders import merged, write_adapter, write_adapter_of_all
from tests.engine.captured import AsCaptured
from tests.engine.harness import CONFIGS, SETTINGS, Rig, greedy, prompt_of, random_model, save_folder
from tests.engine.recurrent_rig import HYBRIDS
from tests.ranks.families import make_model

ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "prompt_lookup_min": 1}
RANKS = (4, 2, 8, 3)
PROMPT = prompt_of(3, 20) * 2


@functools.cache
def model_of(family: str) -> Model:
    config = HYBRIDS[family] if family in HYBRIDS else CONFIGS[family]
    return random_model(config | {"tie_word_embeddings": False}, torch.float64, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("adapters")
    return [write_adapter(path / f"own{index}", model_of("llama"), index, rank) for index, rank in enumerate(RANKS)]


@functools.cache
def text_of(family: str, folder: Path | None, prompt: tuple[int, ...], count: int = 12) -> list[int]:
    """The text of a model with the adapter merged into its weights, in an engine without adapters."""
    model = model_of(family) if folder is None else merged(model_of(family), folder)
    with Rig(model, poison=False) as rig:
        return LLM.around(rig.engine).generate([list(prompt)], greedy(count), use_tqdm=False)[0].outputs[0].token_ids


def placements_of(rig: Rig) -> list[AdapterPlacement]:
    """The adapters that the device was told to copy, in order."""
    parts = [batch.part(AdapterPlacements) for batch in rig.batches]
    return [placed for part in parts if part is not None for placed in part.placements]


def request_for(folder: Path | None, **fields: Any) -> LoRARequest | None:
    return None if folder is None else LoRARequest(folder.name, 1, str(folder), **fields)


def registry_of(rig: Rig) -> AdapterRegistry:
    found = rig.engine.keepers.find(AdapterRegistry)
    assert found is not None
    return found


@contextmanager
def served(family: str = "llama", **settings: Any) -> Iterator[tuple[Rig, LLM]]:
    with Rig(model_of(family), **ADAPTERS | settings) as rig:
        yield rig, LLM.around(rig.engine)
        rig.assert_clean()


def generated(llm: LLM, prompts: Sequence[list[int]], folders: Sequence[Path | None]) -> list[list[int]]:
    outputs = llm.generate(list(prompts), greedy(12), lora_request=[request_for(each) for each in folders],
                           use_tqdm=False)
    assert all(output.outputs[0].error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family, drafts", [("llama", None), ("llama", DRAFTS), ("gemma3", DRAFTS), ("mamba2", DRAFTS)])
def test_each_request_has_the_text_of_its_own_adapter(family: str, drafts: dict[str, Any] | None,
                                                      tmp_path: Path) -> None:
    """One prompt for all, so that hits across adapters, or of base pages, would show; drafts change no text."""
    own = [None, *(write_adapter(tmp_path / str(seed), model_of(family), seed) for seed in (1, 2))]
    wanted = [text_of(family, folder, tuple(PROMPT)) for folder in own]
    assert len(set(map(tuple, wanted))) == 3, "the adapters change nothing"
    with served(family, speculative_config=drafts, pad_requests=(4,), pad_tokens=(8, 64)) as (rig, llm):
        assert generated(llm, [PROMPT] * 3, own) == wanted
        assert generated(llm, [PROMPT] * 3, own[::-1]) == wanted[::-1]
        hits = llm.generate([PROMPT], greedy(12), lora_request=request_for(own[1]), use_tqdm=False)[0]
        assert (hits.num_cached_tokens or 0) > 0, "requests of one adapter share pages"
        assert drafts is None or any(any(batch.num_drafts) for batch in rig.batches)


def test_captured_steps_read_their_adapters_on_the_device(folders: list[Path]) -> None:
    """One graph serves any adapters, and steps without an adapter are never padded to it."""
    own = [folders[0], None, folders[1]]
    wanted = [text_of("llama", folder, tuple(PROMPT)) for folder in own]
    with served(speculative_config=DRAFTS) as (rig, llm):
        captured = AsCaptured(rig, takes_adapters=True)
        assert generated(llm, [PROMPT] * 3, own) == wanted
        assert captured.met and all(key.deltas for key in captured.met) and not captured.reasons
        captured.met.clear()
        assert generated(llm, [PROMPT] * 3, own[::-1]) == wanted[::-1]
        assert generated(llm, [PROMPT], [None]) == [wanted[1]]
        assert any(not key.deltas for key in captured.met)
        with_adapters = next(key for key in captured.met if key.deltas)
        without = next(key for key in captured.met if not key.deltas)
        assert not with_adapters.covers(replace(with_adapters, deltas=DeltaReach.NOTHING))
        assert captured.keys.wider(without, [replace(without, deltas=DeltaReach.LINEARS)]) is None


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_captured_steps_take_adapters_of_every_product(family: str, tmp_path: Path) -> None:
    """Adapters of experts, embeddings and latent attention have graphs of their own, beside those of linear layers."""
    model = make_model(family, None)
    linear = write_adapter(tmp_path / "linear", model, 1, names=("o_proj",))
    whole = write_adapter_of_all(tmp_path / "whole", model, 2)
    texts = []
    for is_captured in (False, True):
        with Rig(model, **ADAPTERS | {"lora_memory_bytes": 16 << 20}) as rig:
            captured, llm = AsCaptured(rig, takes_adapters=True) if is_captured else None, LLM.around(rig.engine)
            texts.append(generated(llm, [PROMPT], [linear]) + generated(llm, [PROMPT] * 3, [whole, None, linear]))
            if captured is not None:
                assert not captured.reasons and {key.deltas for key in captured.met} == {
                    DeltaReach.LINEARS, rig.step.deltas.captured_reach}
                assert DeltaReach.EXPERTS | DeltaReach.EMBEDDINGS in rig.step.deltas.captured_reach
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == 3


def test_the_largest_step_is_measured_with_adapters(tmp_path: Path) -> None:
    """Dead tokens pass through all that an adapter may change: it computes, and changes no row."""
    with Rig(make_model("deepseek_v3", None), **ADAPTERS | {"lora_memory_bytes": 16 << 20}) as rig:
        reach, changed = rig.step.deltas.possible_reach, list[DeltaReach]()
        assert reach == ~DeltaReach.NOTHING and rig.step.deltas.reach == DeltaReach.LINEARS
        within = StepAdapters.within

        def watched(own: StepAdapters, met: DeltaReach) -> StepAdapters:
            changed.append(met)
            return within(own, met)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepAdapters, "within", watched)
            run_dead(rig.step, [5, 1], bound=64, deltas=reach)
        assert changed == [reach] and not rig.step.state.known.any()
    with Rig(model_of("llama")) as rig:
        assert rig.step.deltas.possible_reach == DeltaReach.NOTHING


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_outlive_sleep_and_new_weights(folders: list[Path], tmp_path: Path, level: int) -> None:
    """Their memory stays while weights and pages go. With other weights, no page of before is found."""
    config = CONFIGS["llama"] | {"tie_word_embeddings": False}
    paths = [save_folder(tmp_path / str(seed), config, seed=seed) for seed in (7, 8)]
    other = random_model(config, torch.float64, 8)
    settings = {name: value for name, value in SETTINGS.items() if name != "max_logprobs"}
    engine_config = EngineConfig(str(paths[0]), skip_tokenizer_init=True, dtype="float64", **settings | ADAPTERS)
    asked = [request_for(folder) for folder in (folders[0], None)]
    with LLM.around(start_engine(engine_config, in_process=True)) as llm:
        def texts() -> list[list[int]]:
            outputs = llm.generate([PROMPT] * 2, greedy(8), lora_request=asked, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

        before = texts()
        llm.sleep(level)
        llm.wake_up()
        assert texts() == before
        llm.update_weights(paths[1])
        after = texts()
        llm.sleep(level)
        with pytest.raises(ValueError, match="is no adapter"):  # loads are refused while the engine sleeps, too
            llm.generate([PROMPT], greedy(4), lora_request=request_for(tmp_path), use_tqdm=False)
        llm.update_weights(paths[1])
        llm.wake_up()
        assert texts() == after
    with Rig(merged(other, folders[0])) as rig:
        (alone,) = LLM.around(rig.engine).generate([PROMPT], greedy(8), use_tqdm=False)
    assert before[0] != after[0] == alone.outputs[0].token_ids


def test_adapters_of_a_worker_in_its_own_process(folders: list[Path], tmp_path: Path) -> None:
    """Loads, refusals and steps go through the pipe."""
    config = CONFIGS["llama"] | {"tie_word_embeddings": False}
    model = save_folder(tmp_path / "model", config, seed=7)
    settings = {name: value for name, value in SETTINGS.items() if name != "max_logprobs"}
    engine_config = EngineConfig(str(model), skip_tokenizer_init=True, dtype="float64", **settings | ADAPTERS)
    asked = [request_for(folder) for folder in (folders[0], None, folders[1])]
    texts = []
    for in_process in (True, False):
        with LLM.around(start_engine(engine_config, in_process=in_process)) as llm:
            with pytest.raises(ValueError, match="is no adapter"):
                llm.generate([PROMPT], greedy(4), lora_request=request_for(tmp_path), use_tqdm=False)
            outputs = llm.generate([PROMPT] * 3, greedy(8), lora_request=asked, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == 3


def test_more_adapters_than_slots_take_turns(folders: list[Path]) -> None:
    wanted = [text_of("llama", folder, tuple(PROMPT)) for folder in folders]
    with served() as (rig, llm):
        assert generated(llm, [PROMPT] * 8, folders * 2) == wanted * 2
        placed = placements_of(rig)
        assert len(placed) >= 4 and {placement.slot for placement in placed} == {0, 1}


def test_a_slot_keeps_nothing_of_the_adapter_before(folders: list[Path], tmp_path: Path) -> None:
    """The new adapter changes fewer layers. The one beside it changes them all, so that steps compute them."""
    narrow = write_adapter(tmp_path / "narrow", model_of("llama"), 9, scale=0.5, names=("o_proj",))
    wanted = [text_of("llama", folder, tuple(PROMPT)) for folder in (narrow, folders[1])]
    with served() as (rig, llm):
        generated(llm, [PROMPT] * 2, folders[:2])
        generated(llm, [PROMPT], folders[1:2])  # the other slot is the least recently used
        assert generated(llm, [PROMPT] * 2, [narrow, folders[1]]) == wanted
        slots = {placed.number: placed.slot for placed in placements_of(rig)}
        assert slots[3] == slots[1] != slots[2]


def test_an_adapter_may_change_more_layers_than_the_one_before_in_its_slot(folders: list[Path], tmp_path: Path) -> None:
    narrow = write_adapter(tmp_path / "narrow", model_of("llama"), 9, scale=0.5, names=("o_proj",))
    with served(max_loras=1) as (_, llm):
        for folder in (narrow, folders[0], narrow):
            assert generated(llm, [PROMPT], [folder]) == [text_of("llama", folder, tuple(PROMPT))]


def test_adapters_that_differ_in_their_config_alone_share_no_pages(folders: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(folders[0], tmp_path / "other"))
    config = other / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1}))
    with served(enable_prefix_caching=False) as (_, llm):
        wanted = generated(llm, [PROMPT] * 2, [folders[0], other])
        assert wanted[0] != wanted[1]
    with served() as (_, llm):
        assert [*generated(llm, [PROMPT], [folders[0]]), *generated(llm, [PROMPT], [other])] == wanted


def test_requests_that_wait_for_a_slot_hold_up_no_others(folders: list[Path]) -> None:
    """As many of them as there are free rows stand before a request without an adapter, which runs at once."""
    with served(max_loras=1, max_num_seqs=3) as (_, llm):
        engine, ended = llm.llm_engine, list[str]()
        for name, folder, count in (("long", folders[0], 30), ("one", folders[1], 4), ("two", folders[2], 4),
                                    ("plain", None, 4)):
            engine.add_request(name, {"prompt_token_ids": PROMPT}, greedy(count), lora_request=request_for(folder))
        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["plain", "long", "one", "two"]


def test_an_adapter_that_is_read_again_shares_nothing_with_the_one_before(folders: list[Path], tmp_path: Path) -> None:
    """The same name and folder, other numbers: the load has another number, and so have its pages."""
    path = tmp_path / "own"
    shutil.copytree(folders[0], path)
    with served() as (_, llm):
        assert generated(llm, [PROMPT], [path]) == [text_of("llama", folders[0], tuple(PROMPT))]
        shutil.rmtree(path)
        shutil.copytree(folders[1], path)
        asked = request_for(path, load_inplace=True)
        output = llm.generate([PROMPT], greedy(12), lora_request=asked, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == text_of("llama", folders[1], tuple(PROMPT))
        assert not output.num_cached_tokens


def test_preempted_requests_go_on_with_their_adapters(folders: list[Path]) -> None:
    own = [folders[0], None, folders[1]]
    wanted = [text_of("llama", folder, tuple(PROMPT)) for folder in own]
    with served() as (rig, llm):
        asked = [request_for(folder) for folder in own]
        outputs = {}
        for output in llm.follow([PROMPT] * 3, greedy(12), lora_request=asked, before_step=rig.preempt):
            outputs[output.request_id] = output
        assert [output.outputs[0].token_ids for output in outputs.values()] == wanted
        assert rig.scheduler.stats.num_preemptions >= 3


def test_a_failed_step_brings_adapters_back(folders: list[Path]) -> None:
    """After it the device's memory is not known: adapters are copied again."""
    with served(poison=False) as (rig, llm):
        broken = iter([True])
        inner = rig.step.run

        def run(*args: Any) -> Any:
            if args[0].step == 3 and next(broken, False):
                raise RuntimeError("a step fails")
            return inner(*args)

        rig.step.run = run  # type: ignore[method-assign]
        wanted = [text_of("llama", folder, tuple(PROMPT)) for folder in folders[:2]]
        assert generated(llm, [PROMPT] * 2, folders[:2]) == wanted
        assert [placed.number for placed in placements_of(rig)] == [1, 2, 1, 2]


def test_broken_adapters_are_refused_and_harm_nobody(folders: list[Path], tmp_path: Path) -> None:
    nan = write_adapter(tmp_path / "nan", model_of("llama"), 1, scale=float("nan"))
    large = write_adapter(tmp_path / "large", model_of("llama"), 1, rank=16)
    other = write_adapter(tmp_path / "other", model_of("gemma3"), 1)
    with served() as (rig, llm):
        for folder, words in ((nan, "holds NaN or Inf"), (large, "rank 16, and max_lora_rank is 8"),
                              (other, "the adapter is for another base model"), (tmp_path, "is no adapter")):
            with pytest.raises(ValueError, match=words):
                generated(llm, [PROMPT], [folder])
        assert registry_of(rig).sizes == {} and not rig.engine.has_work
        store = rig.step.deltas
        assert isinstance(store, AdapterStore)
        store.read(99, "nan", str(nan))
        while (read := store.poll(99)) is None:
            time.sleep(0.01)
        assert read.error is not None and store.poll(99) == read, "the answer stays, for ranks that end later"
        store.drop(99)
        assert generated(llm, [PROMPT], [folders[0]]) == [text_of("llama", folders[0], tuple(PROMPT))]


def test_adapters_need_their_setting_and_their_type() -> None:
    with Rig(model_of("llama")) as rig, pytest.raises(ValueError, match="start it with enable_lora=True"):
        LLM.around(rig.engine).generate([PROMPT], greedy(2), lora_request=LoRARequest("a", 1, "b"), use_tqdm=False)
    with served() as (_, llm):
        for wrong, words in (("sql", "must be a LoRARequest"), ([None] * 2, "2 lora_requests for 1 prompts")):
            with pytest.raises(ValueError, match=words):
                llm.generate([PROMPT], greedy(2), lora_request=wrong, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_cpu_loras"):
        Rig(model_of("llama"), **ADAPTERS | {"max_cpu_loras": 1})


def test_a_reload_without_room_leaves_the_adapter_as_it_is(folders: list[Path]) -> None:
    asked, again = request_for(folders[0]), request_for(folders[0], load_inplace=True)
    assert asked is not None and again is not None
    with served(max_loras=1, max_cpu_loras=1) as (rig, llm):
        registry = registry_of(rig)
        first = registry.begin(asked)
        with pytest.raises(ValueError, match="requests use all of them: try again later, or raise max_cpu_loras"):
            registry.begin(again)
        second = registry.begin(asked)
        assert second.number == first.number, "requests may still ask for it"
        registry.release(first)
        with pytest.raises(ValueError, match="requests use all of them: try again later, or raise max_cpu_loras"):
            registry.begin(again)
        registry.release(second)
        renewed = registry.begin(again)
        assert renewed.number != first.number, "its own place is room enough once nobody has it"
        registry.release(renewed)
        assert generated(llm, [PROMPT], [folders[0]]) == [text_of("llama", folders[0], tuple(PROMPT))]


@pytest.mark.parametrize("max_cpu_loras", [2, 4])
def test_a_reload_that_fails_leaves_the_adapter_as_it_is(max_cpu_loras: int, folders: list[Path],
                                                         tmp_path: Path) -> None:
    """Also for a request that runs meanwhile, and, where there is none, if the host's memory is full."""
    path, other = tmp_path / "own", folders[1]
    shutil.copytree(folders[0], path)
    with served(max_cpu_loras=max_cpu_loras) as (rig, llm):
        assert generated(llm, [PROMPT, PROMPT], [path, other]) == [
            text_of("llama", each, tuple(PROMPT)) for each in (folders[0], other)]
        sizes = dict(registry_of(rig).sizes)
        (path / "adapter_model.safetensors").write_bytes(b"broken")
        running = llm.follow([PROMPT] * (max_cpu_loras > 2), greedy(12), lora_request=request_for(path))
        for asked in (request_for(path, load_inplace=True), LoRARequest("own", 1, str(tmp_path))):
            with pytest.raises(ValueError, match="is truncated or damaged|is no adapter"):
                llm.generate([PROMPT], greedy(2), lora_request=asked, use_tqdm=False)
        for last in list(running)[-1:]:
            assert last.outputs[0].token_ids == text_of("llama", folders[0], tuple(PROMPT))
        (again,) = llm.generate([PROMPT], greedy(12), lora_request=request_for(path), use_tqdm=False)
        assert again.outputs[0].token_ids == text_of("llama", folders[0], tuple(PROMPT))
        assert again.num_cached_tokens, "the load is another one"
        assert registry_of(rig).sizes == sizes and isinstance(rig.step.deltas, AdapterStore)
        assert rig.step.deltas.num_loaded == 2


def test_an_adapter_is_served_until_its_reload_has_been_read(folders: list[Path]) -> None:
    asked, again = request_for(folders[0]), request_for(folders[0], load_inplace=True)
    assert asked is not None and again is not None
    with served() as (rig, _):
        registry = registry_of(rig)

        def wait_for(hold: AdapterHold) -> int:
            while not registry.is_ready(hold.number):
                rig.engine.step()
            return hold.number

        def free(*holds: AdapterHold) -> None:
            for hold in holds:
                registry.release(hold)

        first = registry.begin(asked)
        wait_for(first)
        given_up = registry.begin(again)
        free(given_up)
        second, third = registry.begin(again), registry.begin(again)
        others = [registry.begin(asked), registry.begin(asked)]
        assert [hold.number for hold in others] == [first.number] * 2
        free(*others)
        newest = registry.begin(asked)
        assert newest.number == first.number and wait_for(third) != wait_for(second)
        free(newest)
        newest = registry.begin(asked)
        assert newest.number == third.number, "the newest reload is served"
        free(first, second, newest)
        assert list(registry.sizes) == [third.number], "loads before it are dropped"
        fourth = registry.begin(again)
        registry.remove(folders[0].name)
        last = registry.begin(asked)
        assert wait_for(fourth) != last.number, "a reload that began before the removal is not found"
        free(fourth, third, last)
        assert not registry.sizes


def test_a_beam_search_has_the_adapters_of_its_prompts(folders: list[Path]) -> None:
    own, params = [folders[0], None, folders[1]], BeamSearchParams(2, 6)
    wanted = []
    for folder in own:
        with Rig(model_of("llama") if folder is None else merged(model_of("llama"), folder)) as rig:
            wanted += LLM.around(rig.engine).beam_search([PROMPT], params)
    with served() as (rig, llm):
        found = llm.beam_search([PROMPT] * 3, params, lora_request=[request_for(folder) for folder in own])
        assert [[beam.tokens for beam in each.sequences] for each in found] == [
            [beam.tokens for beam in each.sequences] for each in wanted]
        (one,) = llm.beam_search(PROMPT, params, request_for(folders[1], load_inplace=True))
        assert one.sequences[0].tokens == wanted[2].sequences[0].tokens
        with pytest.raises(ValueError, match="2 lora_requests for 1 prompts"):
            llm.beam_search([PROMPT], params, lora_request=[None] * 2)
        assert all(load.is_idle for load in registry_of(rig)._loads.values())
    assert len({tuple(each.sequences[0].tokens) for each in wanted}) == 3


def test_adapters_with_requests_are_never_dropped(folders: list[Path]) -> None:
    with served(max_cpu_loras=2) as (rig, llm):
        engine = llm.llm_engine
        for index in range(2):
            engine.add_request(str(index), {"prompt_token_ids": PROMPT}, greedy(4),
                               lora_request=request_for(folders[index]))
        with pytest.raises(ValueError, match="2 adapters are loaded .* raise max_cpu_loras"):
            engine.add_request("2", {"prompt_token_ids": PROMPT}, greedy(4), lora_request=request_for(folders[2]))
        while engine.has_unfinished_requests():
            engine.step()
        assert generated(llm, [PROMPT], [folders[2]]) == [text_of("llama", folders[2], tuple(PROMPT))]
        assert len(registry_of(rig).sizes) == 2 and isinstance(rig.step.deltas, AdapterStore)
        assert rig.step.deltas.num_loaded == 2, "the least recently used one is gone"


@pytest.mark.parametrize("num_actions", [50, pytest.param(500, marks=pytest.mark.long)])
def test_random_loads_and_aborts_give_no_wrong_token(num_actions: int, folders: list[Path]) -> None:
    """Requests with any adapter come, are aborted, and adapters are removed and read again meanwhile."""
    draw, wanted = random.Random(num_actions), {}
    with served(speculative_config=DRAFTS, num_pages=24) as (rig, llm):
        engine, registry, done = llm.llm_engine, registry_of(rig), 0
        for index in range(num_actions):
            folder, prompt = draw.choice([None, *folders]), prompt_of(draw.randrange(3), 18)
            try:
                engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(8),
                                   lora_request=request_for(folder, load_inplace=draw.random() < 0.3)
                                   if folder is not None else None)
                wanted[str(index)] = text_of("llama", folder, tuple(prompt), 8)
            except ValueError as error:
                assert "raise max_cpu_loras" in str(error)
            if draw.random() < 0.2 and registry._current:
                llm._loop.run(lambda: registry.remove(draw.choice(list(registry._current))))
            if draw.random() < 0.2 and wanted:
                ended = draw.choice(list(wanted))
                engine.abort_request(ended)
                wanted.pop(ended)
            for output in (out for _ in range(draw.randrange(4)) for out in engine.step()):
                done += _check(output, wanted)
        while engine.has_unfinished_requests():
            for output in engine.step():
                done += _check(output, wanted)
        assert done > num_actions / 3
        for name in list(registry._current):
            llm._loop.run(functools.partial(registry.remove, name))
        assert registry.sizes == {}
        while rig.engine.has_work:
            rig.engine.step()
        assert isinstance(rig.step.deltas, AdapterStore) and rig.runner.in_order(lambda: 0).result() == 0
        assert rig.step.deltas.num_loaded == 0 and not registry._slots()._placed


def _check(output: Any, wanted: dict[str, list[int]]) -> bool:
    if not output.finished:
        return False
    assert output.outputs[0].error is None and output.outputs[0].token_ids == wanted.pop(output.request_id)
    return True


def test_a_request_keeps_its_parameters_beside_its_adapter(folders: list[Path]) -> None:
    """Sampling and several samples: equal to the merged model's."""
    params = SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=8)
    with Rig(merged(model_of("llama"), folders[0])) as rig:
        (plain,) = LLM.around(rig.engine).generate([PROMPT], params, use_tqdm=False)
    with served() as (_, llm):
        (own,) = llm.generate([PROMPT], replace(params), lora_request=request_for(folders[0]), use_tqdm=False)
    assert [each.token_ids for each in own.outputs] == [each.token_ids for each in plain.outputs]
