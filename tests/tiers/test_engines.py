"""Engines one after another on one folder: adapters, salts, inputs, exact bits, processes, preemptions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.cache import media
from outrider.core.params import SamplingParams
from outrider.engine.maintenance import Maintenance
from outrider.features.adapters.loads import AdapterRegistry
from outrider.features.tiers.disk import DiskStore
from outrider.features.tiers.mover import PageMover
from outrider.kernels import cpu as native
from outrider.llm import LLM
from outrider.lora_request import LoRARequest
from tests.adapters.folders import write_adapter
from tests.adapters.test_engine import ADAPTERS, model_of, text_of
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tokens_of
from tests.engine.test_exact_mode import VOCAB, rig_of
from tests.engine.test_worker_process import saved, started
from tests.tiers.rigs import HOST_BYTES, KINDS, Answer, answers_of, assert_equal, cached_of, stats_of


def test_an_adapter_finds_its_own_pages_alone(tmp_path: Path) -> None:
    """Each engine numbers its adapters from 1, so the number says nothing to another engine."""
    first, second = (write_adapter(tmp_path / name, model_of("llama"), seed) for name, seed in (("a", 1), ("b", 2)))
    prompt = prompt_of(3, 40)
    hits = []
    for folder in (first, second, first):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        own = shutil.copytree(folder, tmp_path / "own")
        with Rig(model_of("llama"), **ADAPTERS, disk_cache_dir=str(tmp_path / "cache")) as rig:
            asked = LoRARequest("own", 1, str(own))
            (output,) = LLM.around(rig.engine).generate([prompt], greedy(12), lora_request=asked, use_tqdm=False)
            assert output.outputs[0].token_ids == text_of("llama", folder, tuple(prompt))
            hits.append(stats_of(rig).num_loaded["disk"])
            registry = rig.engine.keepers.find(AdapterRegistry)
            assert registry is not None and list(registry.sizes) == [1]
    assert hits[:2] == [0, 0] and hits[2] > 0


def test_an_adapter_that_changes_while_pages_are_kept(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, model_of("llama"), seed) for name, seed in (("a", 1), ("b", 2)))
    own, prompt = tmp_path / "own", prompt_of(3, 40)
    shutil.copytree(first, own)
    with Rig(model_of("llama"), **ADAPTERS, host_cache_memory=HOST_BYTES) as rig:
        llm = LLM.around(rig.engine)
        for folder in (first, second, first):
            shutil.rmtree(own)
            shutil.copytree(folder, own)
            asked = LoRARequest("own", 1, str(own), load_inplace=True)
            (output,) = llm.generate([prompt], greedy(12), lora_request=asked, use_tqdm=False)
            assert output.outputs[0].token_ids == text_of("llama", folder, tuple(prompt))
            rig.engine.rest()
        assert stats_of(rig).num_loaded["host"] > 0


def test_salts_share_no_pages(tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": prompt_of(5, 60)}
    with Rig(KINDS["full"].model(), host_cache_memory=HOST_BYTES) as rig:
        llm = LLM.around(rig.engine)
        for salt, is_hit in (("one", False), ("two", False), ("one", True)):
            (output,) = llm.generate([prompt | {"cache_salt": salt}], greedy(4), use_tqdm=False)
            assert bool(output.num_cached_tokens) is is_hit
            rig.engine.rest()


def test_spans_are_a_part_of_the_key(tmp_path: Path) -> None:
    params, prompt = greedy(5, logprobs=2), prompt_of(5, 60)
    asks = [Ask(prompt, params, spans=((4, 12),)), Ask(prompt, params, spans=((20, 40),)), Ask(prompt, params)]
    with Rig(KINDS["full"].model(), enable_prefix_caching=False) as rig:
        expected = answers_of(rig.run_one_by_one(asks))
    for _ in range(2):
        with Rig(KINDS["full"].model(), disk_cache_dir=str(tmp_path / "cache")) as rig:
            outputs = rig.run_one_by_one(asks)
            assert_equal(answers_of(outputs), expected)
    assert cached_of(outputs) == [48, 48, 48]


NEEDS_KERNELS = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
EXACT_FAMILIES = ("llama", "gemma3", "gemma4", "nemotron_h", "qwen3_next", "deepseek_v32", "kimi_linear", "qwen4_exp")


def exact_asks() -> list[Ask]:
    return [Ask(prompt_of(seed, length, VOCAB), greedy(5, logprobs=4)) for seed, length in ((1, 70), (2, 64), (3, 49))]


@NEEDS_KERNELS
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_exact_engines_have_the_same_bits(family: str, tmp_path: Path) -> None:
    asks = exact_asks()
    with rig_of(family, enable_prefix_caching=False) as rig:
        expected = answers_of(rig.run_one_by_one(asks))
    for place in ("host", "disk"):
        with rig_of(family, host_cache_memory=HOST_BYTES, disk_cache_dir=str(tmp_path / "cache")) as rig:
            assert answers_of(rig.run(asks)) == expected
            rig.engine.rest()
            assert answers_of(rig.run(asks)) == expected
            assert stats_of(rig).num_loaded[place] > 0 and not stats_of(rig).num_failed


@NEEDS_KERNELS
def test_exact_and_other_engines_share_no_pages(tmp_path: Path) -> None:
    asks, hits = exact_asks(), []
    for exact in (True, False, True):
        with rig_of("llama", exact=exact, disk_cache_dir=str(tmp_path / "cache")) as rig:
            rig.run(asks)
            hits.append(stats_of(rig).num_loaded["disk"])
    assert hits[:2] == [0, 0] and hits[2] > 0


@pytest.mark.parametrize("family", ["llama", "gated_delta"])
def test_workers_in_processes_of_their_own(family: str, tmp_path: Path) -> None:
    model, found, hits = saved(tmp_path, family), list[list[Answer]](), []
    prompts, params = [prompt_of(1, 40), prompt_of(2, 70)], SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    for _ in range(2):
        with started(model, in_process=True, disk_cache_dir=str(tmp_path / "cache")) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            found.append(answers_of(outputs))
            hits.append([output.num_cached_tokens for output in outputs])
            maintenance = Maintenance(llm.engine)
            maintenance.sleep()
            maintenance.wake_up()
            again = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            assert_equal(answers_of(again), found[0])
            assert all(output.num_cached_tokens for output in again)
    assert_equal(found[1], found[0])
    assert hits == [[0, 0], [32, 64]]


def test_preempted_requests_come_back_from_the_host(tmp_path: Path) -> None:
    kind = KINDS["full"]
    asks = [Ask(prompt_of(seed, 40), greedy(30)) for seed in range(4)]
    with kind.open(tmp_path) as rig:
        expected = tokens_of(rig.run(asks))
    with kind.open(tmp_path, num_pages=12, host_cache_memory=HOST_BYTES) as rig:
        assert tokens_of(rig.run(asks)) == expected
        assert rig.scheduler.stats.num_preemptions and stats_of(rig).num_loaded["host"]


def disk_of(rig: Rig) -> DiskStore:
    """The store of an engine, whose thread writes and looks for what others have written."""
    (mover,) = [part for part in rig.step._parts if isinstance(part, PageMover)]
    (store,) = mover._media
    assert isinstance(store, DiskStore)
    return store


@pytest.mark.parametrize("name", ["full", "full and sliding", "gated delta"])
def test_a_running_engine_finds_what_another_one_stores(name: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "LONE_NEWS_SECONDS", 0.0)
    monkeypatch.setattr(media, "NEWS_SECONDS", 0.0)
    kind = KINDS[name]
    asks = [Ask(prompt_of(seed, 70, kind.vocab), greedy(4, logprobs=2)) for seed in range(3)]
    tier = {"disk_cache_dir": str(tmp_path / "cache")}
    with kind.open(tmp_path, **tier) as first, kind.open(tmp_path, **tier) as second:
        first.run([asks[0]])
        second.run([asks[0]])  # both know the folder
        for one, other, ask in ((first, second, asks[1]), (second, first, asks[2])):
            expected = answers_of(one.run([ask]))
            assert disk_of(one).flush(60) and disk_of(other).flush(60)
            outputs = other.run([ask])
            assert cached_of(outputs)[0] >= 48, "what the other engine has stored is not found"
            assert_equal(answers_of(outputs), expected)
            assert not stats_of(other).num_failed


def test_what_an_engine_has_forgotten_is_not_found_again(tmp_path: Path) -> None:
    kind = KINDS["full"]
    ask = Ask(prompt_of(1, 70), greedy(4))
    with kind.open(tmp_path, disk_cache_dir=str(tmp_path / "cache")) as rig:
        rig.run([ask])
        rig.engine.forget_cached()  # perhaps before the files are written
        disk_of(rig).flush(60)
        assert cached_of(rig.run([ask])) == [0]
