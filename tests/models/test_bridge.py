"""Architectures that transformers' code computes on the engine's token rows, held against transformers itself: logits,
greedy text, and the text of an engine that chunks prompts, batches, preempts, takes prefix hits and verifies drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.adapters import LoRARequest
from outrider.drafters.ngram import NgramDrafter
from outrider.llm import LLM
from outrider.models import catalog, registry
from outrider.models.base import Model
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from tests.adapters.folders import make_adapter, peft_greedy
from tests.adapters.test_families import COUNT as LORA_COUNT
from tests.adapters.test_families import PROMPT as LORA_PROMPT
from tests.adapters.test_families import SETTINGS as LORA_SETTINGS
from tests.adapters.test_families import tokens_of as lora_tokens_of
from tests.engine.harness import Ask, Rig, greedy, tokens_of
from tests.models.bridged import BRIDGED, make_bridged, model_class_of
from tests.models.oracle import (
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_model,
    load,
)
from tests.models.oracle import tokens_of as tokens_from
from tests.models.test_classics import LENGTH, PROMPTS, SETTINGS, generate

Folders = Callable[[str], Path]
# A window and biases; scaled embeddings and tied weights; experts; sinks; latents whose values are smaller than keys.
QUICK = ("starcoder2", "gemma", "qwen2_moe", "granite_swa", "minicpm3")
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in BRIDGED]
IN_ENGINES = [pytest.param(name, marks=[] if name == "qwen2_moe" else pytest.mark.long) for name in BRIDGED]


@pytest.fixture(scope="session")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("bridged")
    return cache(lambda name: make_bridged(name, root / name))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(bridged: Folders, name: str) -> None:
    assert_logits_equal(bridged(name), count=80)  # five windows of 16


@pytest.mark.long
@pytest.mark.parametrize("name", BRIDGED)
def test_greedy_text_equals_transformers(bridged: Folders, name: str) -> None:
    assert_greedy_text_equals(bridged(name))


@pytest.mark.long
@pytest.mark.parametrize("name", BRIDGED)
def test_chunked_equals_whole(bridged: Folders, name: str) -> None:
    # Norms and ropes of transformers' own code are float32 in any dtype.
    assert_chunked_equals_whole(bridged(name), 60, (1, 15, 1, 2, 30), 1e-4)


@pytest.mark.parametrize("name", IN_ENGINES)
@torch.inference_mode()
def test_an_engine_says_what_transformers_does(bridged: Folders, name: str) -> None:
    model, asks = hf_model(bridged(name)), [Ask(prompt, greedy(LENGTH, ignore_eos=True)) for prompt in PROMPTS]
    texts = [[generate(model, prompt)] for prompt in PROMPTS]
    with Rig(load(bridged(name)), drafter=NgramDrafter(3, min_n=1, max_n=3), **SETTINGS) as rig:
        preempted = rig.run(asks, after_step=rig.preempt)
        assert rig.scheduler.stats.num_preemptions > 0
        again = rig.run(asks)
        assert again[0].metrics.num_cached_tokens >= 32, "a prefix hit"
        assert any(not samples for batch in rig.batches for samples in batch.samples), "prompts come in chunks"
        assert any(part.num_drafted for result in rig.results for part in result.requests)
    assert tokens_of(preempted) == tokens_of(again) == texts
    assert len({token for (text,) in texts for token in text}) > 4, "a constant text would hide mistakes"


@torch.inference_mode()
def test_softcaps_are_those_of_the_eager_code(tmp_path: Path) -> None:
    """transformers' default attention leaves them out."""
    folder, tokens = make_bridged("gemma2", tmp_path), tokens_from(seed=1, count=40)
    bridged = load_bridged(folder)
    expected = hf_model(folder, attn_implementation="eager")(tokens[None]).logits[0]
    assert (all_logits(bridged, tokens) - expected).abs().max() < 1e-4


def load_bridged(folder: Path) -> Model:
    source = resolve(folder)
    model = build_model(source.config, dtype=torch.float32, device="cpu", model_impl="transformers")
    load_weights(model, source.read())
    return model


def test_the_catalog_lists_what_is_tested() -> None:
    assert sorted({model_class_of(name).__name__ for name in BRIDGED}) == sorted(catalog.BRIDGED)
    assert len(catalog.BRIDGED) >= 20 and not catalog.BRIDGED.keys() & registry.architectures().keys()


@pytest.mark.long
@pytest.mark.parametrize("name", ["helium", "arcee", "gpt_neox"])
def test_adapters_change_bridged_models_too(bridged: Folders, name: str, tmp_path: Path) -> None:
    """Products that are joined, blocks, and products that transformers' code calls one by one; through a whole LLM."""
    folder = bridged(name)
    adapter = make_adapter(folder, tmp_path / "adapter", 1)
    wanted = [peft_greedy(folder, each, LORA_PROMPT, LORA_COUNT) for each in (None, adapter)]
    assert wanted[0] != wanted[1], "the adapter changes nothing"
    asked = [None, LoRARequest("adapter", 1, str(adapter))]
    with LLM(str(folder), **LORA_SETTINGS) as llm:
        assert lora_tokens_of(llm, [LORA_PROMPT] * 2, asked) == wanted
