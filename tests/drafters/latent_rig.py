"""Tiny models with latent and sparse attention, for tests of whole engines. They need no transformers.

A vocabulary of a few tokens, so that random heads and lookups are right now and then.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from outrider.models.base import Model
from outrider.models.mtp import build_mtp_modules
from tests.drafters.hybrid_rig import VOCAB
from tests.engine.harness import random_model, save_folder

TOP_K = 24
# An index key is as wide as the entry beside it: pages of layers with and without one are then 16 and 32 tokens.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 256, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
_INDEXED = _SIZES | {"index_topk": TOP_K, "index_head_dim": 12, "index_n_heads": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _SIZES | {"architectures": ["DeepseekV3ForCausalLM"]},
    "deepseek_v32": _INDEXED | {"architectures": ["DeepseekV32ForCausalLM"]},
    "deepseek_v32_fp8": _INDEXED | {"architectures": ["DeepseekV32ForCausalLM"], "index_key_dtype": "fp8"},
    "deepseek_v32_modules": _INDEXED | {"architectures": ["DeepseekV32ForCausalLM"], "num_nextn_predict_layers": 2},
    "glm_moe_dsa": _INDEXED | {
        "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "hy_v4": _INDEXED | {
        "architectures": ["HYV4ForCausalLM"], "num_hidden_layers": 4, "n_group": 1, "swiglu_limit": 0.3, "hc_mult": 2,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
}


@functools.cache
def latent_of(family: str) -> Model:
    return random_model(FAMILIES[family], torch.float64, seed=1)


def save_latent(family: str, path: Path, **changes: Any) -> Path:
    """A folder with the target and its multi-token-prediction module. `changes`: of the config."""
    return save_with_module(path, FAMILIES[family] | changes)


def save_with_module(path: Path, config: dict[str, Any]) -> Path:
    from safetensors.torch import load_file, save_file

    save_folder(path, config)
    (head,) = build_mtp_modules(random_model(config, torch.float32, 0), first_layer=config["num_hidden_layers"],
                                dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(6)
    tensors = {name: torch.empty(slot.shape).normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
               for name, slot in head.weights().items()}
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file)
    return path
