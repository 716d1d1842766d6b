"""Every classic family against transformers: logits, greedy text, and the text of an engine that chunks prompts,
batches, preempts, takes prefix hits and verifies drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters.ngram import NgramDrafter
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from outrider.models.sources.safetensors_files import safetensors_tensors
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tokens_of
from tests.engine.test_exact_mode import bits_of
from tests.models import oracle
from tests.models.classics import CLASSICS, LONGROPE
from tests.models.oracle import (
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_config,
    hf_logits,
    hf_model,
    load,
    make_folder,
)

Folders = Callable[[str], Path]
# One config of each architecture; the others are its switches.
FIRST = {name: family for family, (name, _) in reversed(CLASSICS.items())}
CASES = [pytest.param(family, marks=[] if family in FIRST.values() else pytest.mark.long) for family in CLASSICS]
PROMPTS = [prompt_of(1, 45) + prompt_of(1, 10), prompt_of(2, 7), prompt_of(3, 30)]
LENGTH = 20
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 16, "num_pages": 256,
}


@pytest.mark.parametrize("family", CLASSICS)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=80)  # five windows of 16; beyond 64 positions ropes are scaled


@pytest.mark.parametrize("family", CASES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 60, (1, 15, 1, 2, 30), 1e-11)


@pytest.mark.long
@pytest.mark.parametrize("family", CLASSICS)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


@pytest.mark.parametrize("family", [*CASES, "mistral4"])
@torch.inference_mode()
def test_an_engine_says_what_transformers_does(folder_of: Folders, family: str) -> None:
    assert_engine_says(folder_of(family), hf_model(folder_of(family)))


def assert_engine_says(folder: Path, model: Any) -> None:
    asks = [Ask(prompt, greedy(LENGTH, ignore_eos=True)) for prompt in PROMPTS]
    texts = [[generate(model, prompt)] for prompt in PROMPTS]
    with Rig(load(folder), drafter=NgramDrafter(3, min_n=1, max_n=3), **SETTINGS) as rig:
        preempted = rig.run(asks, after_step=rig.preempt)
        assert rig.scheduler.stats.num_preemptions > 0
        again = rig.run(asks)
        assert again[0].metrics.num_cached_tokens >= 32, "a prefix hit"
        assert any(not samples for batch in rig.batches for samples in batch.samples), "prompts come in chunks"
        assert any(part.num_drafted for result in rig.results for part in result.requests)
    assert tokens_of(preempted) == tokens_of(again) == texts
    assert len({token for (text,) in texts for token in text}) > 4, "a constant text would hide mistakes"


# Families with blocks of their own; the others are built of blocks that these or other tests go through.
EXACT = ["mistral4", "gpt_oss", "olmo2", "cohere_normed", "hunyuan", "granite"]


@pytest.mark.parametrize("family", [pytest.param(family, marks=[] if family in EXACT else pytest.mark.long)
                                    for family in (*CLASSICS, "mistral4")])
def test_exact_mode_has_the_same_bits_alone_and_among_others(folder_of: Folders, family: str) -> None:
    """Log-probabilities of all tokens: one request at a time, and all in chunks, with drafts, after preemptions."""
    asks = [Ask(prompt, greedy(6, ignore_eos=True, logprobs=oracle.VOCAB)) for prompt in PROMPTS]
    model, options = load(folder_of(family)), {**SETTINGS, "exact": True, "max_logprobs": oracle.VOCAB}
    with Rig(model, **options | {"max_num_batched_tokens": 128}, enable_prefix_caching=False) as alone:
        expected = bits_of(alone.run_one_by_one(asks))
    with Rig(model, drafter=NgramDrafter(3, min_n=1, max_n=3), **options) as rig:
        assert bits_of(rig.run(asks, after_step=rig.preempt)) == expected
        assert bits_of(rig.run(asks)) == expected
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False,
                         eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


@pytest.mark.parametrize("family", CLASSICS)
def test_every_tensor_of_a_checkpoint_has_its_place(folder_of: Folders, family: str) -> None:
    model, saved = load(folder_of(family)), dict(safetensors_tensors(folder_of(family)))
    assert {name: tuple(tensor.shape) for name, tensor in saved.items() if not model.ignores(name)} == {
        name: slot.shape for name, slot in model.weights().items()}


# Ropes of long contexts


@pytest.mark.parametrize(("max_len", "count"), [(64, 64), (65, 80), (512, 80)])
def test_longrope_depends_on_the_length_that_is_served(tmp_path: Path, max_len: int, count: int) -> None:
    """transformers goes by the text's own length, which equals ours where both are short or both are long."""
    folder, tokens = make_folder("phi3", tmp_path, **LONGROPE), oracle.tokens_of(seed=9, count=count)
    logits = all_logits(load(folder, max_len=max(max_len, count)), tokens)
    assert (logits - hf_logits(folder, tokens)).abs().max() < 1e-4
    if max_len > 64:  # a short text in an engine that serves long ones has the long divisors
        short = all_logits(load(folder, max_len=max_len), tokens[:40])
        assert (short - hf_logits(folder, tokens[:40])).abs().max() > 1e-2
        assert (short - logits[:40]).abs().max() < 1e-4


def test_longrope_of_older_files(tmp_path: Path) -> None:
    from tests.models.test_oracle import edit_config

    folder, tokens = make_folder("phi3", tmp_path, **LONGROPE), oracle.tokens_of(seed=9, count=80)
    before = all_logits(load(folder), tokens)
    rope = dict(LONGROPE["rope_parameters"])
    theta, original = rope.pop("rope_theta"), rope.pop("original_max_position_embeddings")
    for kind in ("longrope", "su"):
        edit_config(folder, rope_parameters=None, rope_theta=theta, original_max_position_embeddings=original,
                    rope_scaling={"type": kind, **{key: rope[key] for key in ("short_factor", "long_factor")}})
        assert torch.equal(all_logits(load(folder), tokens), before)


@pytest.mark.parametrize(("family", "key", "value", "says"), [
    ("phi3", "rope_parameters", LONGROPE["rope_parameters"] | {"long_factor": [1.0]}, "long_factor=.* 8 numbers"),
    ("smollm3", "no_rope_layers", [1, 0], "no_rope_layers=.* one entry for each of the 4 layers"),
    ("granite", "residual_multiplier", 0, "residual_multiplier=0 .* greater than 0"),
    ("cohere2", "use_qk_norm", True, "use_qk_norm=True is not supported"),
    ("cohere", "rotary_pct", 0.5, "rotary_pct=0.5 is not supported"),
    ("hunyuan", "use_cla", True, "use_cla=True is not supported"),
    ("hunyuan_moe", "moe_topk", [3, 3], "moe_topk=.* for every layer"),
    ("hunyuan_moe", "moe_topk", 9, r"moe_topk=9.* from 1 to num_experts \(8\)"),
    ("ernie_moe", "moe_k", 9, "moe_k=9 .* at most the number of experts, 8"),
    ("minimax_m2", "attn_type_list", [0, 1, 1, 1], "attn_type_list=.* must all be 1 .full attention"),
    ("minimax_m2", "layernorm_mlp_alpha", 2.0, "layernorm_mlp_alpha=2.0 is not supported"),
    ("mixtral", "num_experts_per_tok", 9, "num_experts_per_tok=9 is not supported"),
    ("olmo2", "clip_qkv", 8.0, "clip_qkv=8.0: Outrider does not read this"),
    ("seed_oss", "hidden_act", "gelu", "hidden_act='gelu' is not supported"),
    ("gemma2", "use_bidirectional_attention", True, "use_bidirectional_attention=True is not supported"),
    ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob=True is not supported"),
    ("deepseek_v2", "topk_group", 5, "n_group=4 is not supported"),
])
def test_unsupported_values_are_refused(family: str, key: str, value: Any, says: str) -> None:
    name = oracle.ALL[family][0]
    config = hf_config(family).to_dict() | {"architectures": [f"{name}ForCausalLM"], key: value}
    with pytest.raises(ConfigError, match=f"config.json: .*{says}"):
        build_model(config, dtype=torch.float32, device="meta")
