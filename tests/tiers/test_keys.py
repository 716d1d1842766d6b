"""What pages depend on is a part of their keys: engines that differ in it share none."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.engine.maintenance import Maintenance
from outrider.engine.start import start_engine
from outrider.features.tiers import domain
from outrider.features.tiers.weights_turn import WeightsTurn
from outrider.llm import LLM
from tests.engine.harness import CONFIGS, SETTINGS, Ask, Rig, greedy, prompt_of, random_model, save_folder
from tests.tiers.rigs import answers_of, assert_equal, stats_of

PARAMS = greedy(5, logprobs=2)
PROMPT = prompt_of(1, 60)


def answer(model: Path, cache: Path | None, **settings: Any) -> tuple[Any, int]:
    """The answers of a new engine, and how many tokens of the prompt it found."""
    tier = {} if cache is None else {"disk_cache_dir": str(cache)}
    values = SETTINGS | {"dtype": "float64", "skip_tokenizer_init": True} | tier | settings
    llm = LLM.around(start_engine(EngineConfig(str(model), **values), in_process=False))
    try:
        outputs = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
        return answers_of(outputs), outputs[0].num_cached_tokens or 0
    finally:
        llm.engine.close()


LONGROPE = CONFIGS["llama"] | {
    "max_position_embeddings": 256, "original_max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 8.0],
                     "factor": 4.0}}


def test_ropes_that_depend_on_the_length_that_is_served(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "model", LONGROPE)
    hits = []
    for most in (64, 96, 80, 64):
        expected, _ = answer(model, None, max_model_len=most)
        found, hit = answer(model, tmp_path / "cache", max_model_len=most)
        assert_equal(found, expected)
        hits.append(hit)
    assert hits == [0, 0, 48, 48]


def test_models_in_memory_that_only_differ_in_their_config(tmp_path: Path) -> None:
    hits = []
    for name, value in (("rms_norm_eps", 1e-6), ("rms_norm_eps", 1e-2), ("rope_theta", 100.0), ("rms_norm_eps", 1e-6)):
        model = random_model(CONFIGS["llama"] | {name: value}, torch.float64, 5)
        with Rig(model, disk_cache_dir=str(tmp_path / "cache")) as rig:
            rig.run([Ask(PROMPT, PARAMS)])
            hits.append(stats_of(rig).num_loaded["disk"])
    assert hits[:3] == [0, 0, 0] and hits[3]


def test_files_that_change_while_the_engine_sleeps(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "model", CONFIGS["llama"], seed=1)
    expected = []
    for seed in (1, 2):
        expected.append(answer(save_folder(tmp_path / f"model{seed}", CONFIGS["llama"], seed=seed), None)[0])
    tier = {"disk_cache_dir": str(tmp_path / "cache")}
    values = SETTINGS | {"dtype": "float64", "skip_tokenizer_init": True} | tier
    llm = LLM.around(start_engine(EngineConfig(str(model), **values), in_process=False))

    def ask() -> Any:
        return answers_of(llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False))

    try:
        assert_equal(ask(), expected[0])
        maintenance = Maintenance(llm.engine)
        maintenance.sleep(2)
        os.replace(tmp_path / "model2" / "model.safetensors", model / "model.safetensors")
        maintenance.wake_up()
        assert_equal(ask(), expected[1])
    finally:
        llm.engine.close()
    found, hit = answer(tmp_path / "model1", tmp_path / "cache")
    assert_equal(found, expected[0])
    assert hit == 48


def test_engines_that_compute_the_same_bytes_share_pages(tmp_path: Path) -> None:
    """A copy of the files, other chunks, and drafts that have no pages of their own."""
    first = save_folder(tmp_path / "first", CONFIGS["llama"], seed=1)
    copy, cache = shutil.copytree(first, tmp_path / "copy"), tmp_path / "cache"
    expected, _ = answer(first, cache)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    for model, settings in ((copy, {}), (first, {"max_num_batched_tokens": 16}), (first, drafts)):
        found, hit = answer(model, cache, **settings)
        assert_equal(found, expected)
        assert hit == 48


def changed(folder: Path, path: Path, change: str) -> Path:
    """A copy of a model's folder with one number changed."""
    shutil.copytree(folder, path)
    if change == "weights":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        save_file(tensors, path / "model.safetensors")
    else:
        config = json.loads((folder / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return path


def test_a_model_with_one_other_number_shares_no_page(tmp_path: Path) -> None:
    first = save_folder(tmp_path / "first", CONFIGS["llama"], seed=1)
    answer(first, tmp_path / "cache")
    for change in ("weights", "config"):
        assert answer(changed(first, tmp_path / change, change), tmp_path / "cache")[1] == 0


def test_weights_sleep_when_they_have_been_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, began, ended = Ask(PROMPT, PARAMS), threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        began.set()
        time.sleep(0.3)
        checksum = checksum_of(*args)
        ended.set()
        return checksum

    checksum_of = domain.checksum_of
    monkeypatch.setattr(domain, "checksum_of", slow)
    with Rig(random_model(CONFIGS["llama"], torch.float64, 1), disk_cache_dir=str(tmp_path / "cache")) as rig:
        rig.outputs.add("first", ask.prompt, ask.params)
        rig.outputs.step()
        assert began.wait(20)
        maintenance = Maintenance(rig.engine)
        maintenance.sleep()
        assert ended.is_set(), "the memory of weights that a thread reads was freed"
        maintenance.wake_up()
        while rig.engine.has_work:
            rig.outputs.step()
        assert stats_of(rig).num_stored["disk"]


def test_an_engine_is_closed_while_weights_sleep_that_are_not_hashed(tmp_path: Path) -> None:
    turn = WeightsTurn()
    turn.pause()
    turn.pause()
    reader = threading.Thread(target=turn.lock.acquire)
    reader.start()
    turn.close()
    reader.join(20)
    assert not reader.is_alive()
