"""Sleeping, waking and other weights on the card: memory goes back to the driver, and captured steps are made anew."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from tests import garbage
from tests.engine.harness import CONFIGS, greedy, prompt_of, tokens_of, with_other_weights
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import DEVICE, SETTINGS
from tests.gpu.test_engines import DRAFTERS, folder_of

pytestmark = [pytest.mark.gpu]
PROMPTS = [prompt_of(i, n) for i, n in enumerate((40, 61, 9, 33))]
WIDE = CONFIGS["llama"] | {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
                           "num_attention_heads": 8}


def generated(llm: LLM) -> list[list[list[int]]]:
    return tokens_of(llm.generate([list(p) for p in PROMPTS], greedy(20, ignore_eos=True), use_tqdm=False))


@pytest.mark.together("sleep memory")
def test_the_driver_has_the_memory_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    with LLM(str(tmp_path), device=str(DEVICE), dtype="bfloat16", load_format="dummy", max_model_len=256,
             kv_cache_memory_bytes=256 << 20) as llm:
        worker: Any = llm.engine.runner
        weights = {name: slot.target.clone().cpu() for name, slot in worker.device_step.model.weights().items()}
        generated(llm)
        num_bytes = sum(tensor.nbytes for tensor in weights.values()) + worker.device_step.pool.num_bytes
        for level in (1, 2):
            before = torch.cuda.mem_get_info(DEVICE)[0] if HAS_CARD else 0
            report = llm.sleep(level)
            print(f"level {level}: {report}")
            if HAS_CARD:
                assert torch.cuda.mem_get_info(DEVICE)[0] - before >= 0.95 * num_bytes
                assert report.freed_bytes >= 0.95 * report.total_bytes >= 0.95 * num_bytes
                assert (report.host_bytes > 0.9 * sum(tensor.nbytes for tensor in weights.values())) == (level == 1)
            wake = llm.wake_up()
            print(f"level {level}: {wake}")
            assert not HAS_CARD or wake.num_captured > 0
            slots = worker.device_step.model.weights()
            assert all(torch.equal(slots[name].target.cpu(), weights[name]) for name in weights)
            generated(llm)


@pytest.mark.skipif(not HAS_CARD, reason="only memory of a GPU is given back")
@pytest.mark.together("sleep memory")
def test_a_closed_engine_gives_its_memory_back_while_it_is_referenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the tensors of this process: others may take some of the device's memory at the same time, and memory that
    earlier tests left in pieces is used again."""
    monkeypatch.setattr(gc, "unfreeze", garbage.unfreeze)  # tests otherwise leave what engines made out of collections
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    held = []
    for _ in range(2):
        with LLM(str(tmp_path), device=str(DEVICE), dtype="bfloat16", load_format="dummy", max_model_len=256,
                 kv_cache_memory_bytes=256 << 20) as llm:
            generated(llm)
            opened = torch.cuda.memory_allocated(DEVICE)
        held.append(torch.cuda.memory_allocated(DEVICE))
        assert opened - held[-1] > 400 << 20  # weights and pages alone
    assert llm.engine.has_ended and held[1] - held[0] < 64 << 20


@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param("llama", "ngram", marks=pytest.mark.together("steady llama, ngram")),
    pytest.param("gemma3", "none", marks=pytest.mark.together("sleep gemma3")),
    pytest.param("gemma4_shared", "assistant", marks=pytest.mark.together("steady gemma4, assistant")),
    pytest.param("nemotron_h", "mtp", marks=pytest.mark.together("steady nemotron_h, mtp")),
    pytest.param("qwen3_moe", "none", marks=pytest.mark.together("steady qwen3_moe, plain")),
])
def test_tokens_are_those_of_the_weights_that_are_there(family: str, drafter: str, tmp_path: Path) -> None:
    folder = folder_of(family)
    other = with_other_weights(folder, tmp_path / "other")
    settings = SETTINGS | {"device": str(DEVICE), "dtype": "float32", "speculative_config": DRAFTERS[drafter](family)}
    with LLM(str(other), **settings) as llm:
        theirs = generated(llm)
    with LLM(str(folder), **settings) as llm:
        ours, worker = generated(llm), llm.engine.runner
        assert ours != theirs
        runner: Any = worker.runner  # type: ignore[attr-defined]
        for level in (1, 2):
            stream = llm.follow([list(p) for p in PROMPTS], greedy(20, ignore_eos=True))
            next(stream)
            llm.sleep(level)
            llm.wake_up()
            last = {output.request_id: output for output in stream}
            assert tokens_of([last[key] for key in sorted(last, key=int)]) == ours
            assert generated(llm) == ours
        print(llm.update_weights(other))
        replays = getattr(runner, "num_replays", 0)
        assert generated(llm) == theirs
        assert not HAS_CARD or runner.num_replays > replays, "captured steps were made anew"
        llm.sleep(level=2)
        llm.update_weights(folder)
        llm.wake_up()
        assert generated(llm) == ours
