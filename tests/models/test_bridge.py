"""Architectures that transformers' code computes on the engine's token rows, held against transformers itself: logits,
greedy text, and the text of an engine that chunks prompts, batches, preempts, takes prefix hits and verifies drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from outrider.drafters.ngram import NgramDrafter
from tests.engine.harness import Ask, Rig, greedy, tokens_of
from tests.models.bridged import BRIDGED, make_bridged
from tests.models.oracle import (
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_model,
    load,
)
from tests.models.test_classics import LENGTH, PROMPTS, SETTINGS, generate

Folders = Callable[[str], Path]
# A window and biases; scaled embeddings and tied weights; experts; sinks; latents whose values are smaller than keys.
QUICK = ("starcoder2", "gemma", "qwen2_moe", "granite_swa", "minicpm3")
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in BRIDGED]


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


@pytest.mark.parametrize("name", CASES)
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
