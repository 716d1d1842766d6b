"""Tiny hybrids of every family with an MTP module, for tests of whole engines: configs, random weights, drafters, and a
rig that counts what happens to checkpoints.

A vocabulary of a few tokens, so that random heads and lookups are right now and then.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from outrider.drafters.base import Drafter
from outrider.drafters.mtp import modules_drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.base import Model
from outrider.models.mtp import build_mtp_modules
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CPU, random_model
from tests.engine.recurrent_rig import StateRig

VOCAB = 24
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 256,
}
_DELTA = _SIZES | {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": _SIZES | {
        "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*EM-", "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
        "mtp_hybrid_override_pattern": "*E",
    },
    "qwen3_next": _DELTA | _EXPERTS | {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5": _DELTA | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_5_moe": _DELTA | _EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"]},
}
# Attention to chosen blocks, residual streams and n-gram embeddings: tests of its own kernels take it.
QWEN4_EXP: dict[str, Any] = _DELTA | _EXPERTS | {
    "architectures": ["Qwen4ExpForCausalLM"], "hc_count": 2, "hc_lowrank": 4, "ple_layer_ids": [3], "ple_embed_dim": 8,
    "ple_conv_kernel_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 20, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 8, "indexer_compress_ratio": 4, "eos_token_id": 2,
}
# Latent attention to chosen blocks of tokens and residual streams that mix.
GLM5_NEXT: dict[str, Any] = _SIZES | {
    "architectures": ["Glm5NextForConditionalGeneration"], "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 3, "layer_types": _DELTA["layer_types"], "mlp_layer_types": ["dense", "sparse", "dense"],
    "linear_head_dim": 8, "linear_num_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "n_shared_experts": 1, "hc_mult": 2, "hc_sinkhorn_iters": 4, "index_n_heads": 8, "index_head_dim": 16,
    "index_topk": 8, "index_kpool": 4, "swiglu_limit": 1.0,
}
DRAFTERS = ("mtp", "ngram", "scripted")
Script = Callable[[tuple[int, ...], int], list[int]]


@functools.cache
def hybrid_of(family: str) -> Model:
    return random_model(FAMILIES[family], torch.float64, seed=4)


def mtp_of(target: Model, k: int) -> Drafter:
    """With random weights: right by chance in greedy text, and more often where it shares the target's noise."""
    first = max(target.num_layers, *(claim.layer + 1 for claim in target.cache_layers()))
    modules = build_mtp_modules(target, first_layer=first, dtype=target.dtype, device=CPU)
    generator = torch.Generator().manual_seed(6)
    for head in modules:
        for name, slot in head.weights().items():
            center = 1.0 if "norm" in name and not head.description.norm_offset else 0.0
            slot.store(torch.empty(slot.shape, dtype=torch.float64).normal_(center, 0.25, generator=generator))
        head.finalize()
    return modules_drafter(modules, k)


def script_with_errors(right: dict[tuple[int, ...], list[int]], distances: Sequence[int]) -> Script:
    """The right continuations by prompt, with errors at these distances from each other, again and again."""
    errors = set(accumulate([*distances] * max(map(len, right.values()))))

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(token + 1) % VOCAB if i in errors else token for i, token in enumerate(right.get(prompt, ()))]

    return script


def drafter_of(name: str, target: Model, k: int, script: Script) -> Drafter:
    match name:
        case "mtp":
            return mtp_of(target, k)
        case "ngram":
            return NgramDrafter(k, min_n=1, max_n=4)
        case _:
            # How many there are changes with the length, so that some scheduled drafts are dead.
            return ScriptedDrafter(k, script, count=lambda position: k if position % 5 else position % (k + 1))


class HybridRig(StateRig):
    """Free pages and rows of nobody hold NaN."""

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.num_evicted: Counter[str] = Counter()
        pool, num_groups = self.scheduler.cache.pool, len(self.scheduler.cache.groups)
        forget = pool._forget

        def counted(page: int) -> None:
            key = pool._key[page]
            if key is not None:
                self.num_evicted["checkpoints" if key[0] == num_groups else "pages"] += 1
            forget(page)

        pool._forget = counted  # type: ignore[method-assign]

    @property
    def accepted(self) -> set[int]:
        """How many drafts stood, of all those times when there were any."""
        parts = [part for result in self.results for part in result.requests if part.num_drafted > 0]
        return {part.num_accepted for part in parts}
