"""Tiny random models saved by transformers, and a dense attention to run ours without pages.

Every family is held against transformers by the same `assert_...` functions.
"""

from __future__ import annotations

import zlib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.kernels.latent import TokenContexts
from outrider.kernels.latent_inputs import RopeRows
from outrider.layers import NothingAttends, StepContext, TokenHistory
from outrider.mixers.indexed.indexed_mixer import BlockInputs, IndexedLayer
from outrider.mixers.latent.latent_mixer import (
    BoundLatentLayer,
    ChosenPositions,
    EveryPosition,
    GroupPlan,
    LatentLayer,
    LatentNorms,
    PooledPositions,
)
from outrider.mixers.recurrent.recurrent_mixer import RecurrentState
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.models.sources.folder import read_config
from tests.models.classics import CLASSICS, PARTS

# The context of token rows that make logits, or of products alone: nothing attends and nothing is adapted.
LOGIT_ROWS = StepContext(NothingAttends(), torch.zeros(1, dtype=torch.int64))

VOCAB = 256

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}

# name -> (transformers class without its suffix, config values beyond the base)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN_ROPE}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", _GEMMA),
    "gemma3_capped": ("Gemma3", _GEMMA | {"final_logit_softcapping": 5.0, "attention_bias": True}),
}
_QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
# Apart from the others: transformers holds experts in other tensors than it saves, so names cannot be compared.
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        _QWEN3_MOE | {"mlp_only_layers": [1], "attention_bias": True, "use_sliding_window": True, "sliding_window": 16},
    ),
    "qwen3_moe_every_second": ("Qwen3Moe", _QWEN3_MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
}
_MAMBA: dict[str, Any] = {
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    # transformers takes this for a limit of the time step, in prefill alone, where the models' own code has none.
    "time_step_min": 1e-30,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_DELTA_MOE = _DELTA | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_BAMBA: dict[str, Any] = {
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_FALCON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 0.7,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [1.4, 0.6],
}
_OLMO: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_LFM2_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "tie_word_embeddings": False,
}
HYBRID_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronH", _MAMBA | {"hybrid_override_pattern": "M*-EME"}),
    "nemotron_h_latent": (
        "NemotronH",
        _MAMBA
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
            "moe_latent_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "use_conv_bias": False,
            "mlp_bias": True,
            "use_bias": True,
            "n_groups": 8,
        },
    ),
    "qwen3_next": ("Qwen3Next", _DELTA_MOE | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_bias": (
        "Qwen3_5",
        _DELTA
        | {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA_MOE),
    "bamba": ("Bamba", _BAMBA),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16,
                      "block_ffn_dim_multiplier": 1.5, "tie_word_embeddings": False}),
    "lfm2_bias": (
        "Lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_moe": ("Lfm2Moe", _LFM2_MOE | {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "lfm2_moe_direct": (
        "Lfm2Moe",
        _LFM2_MOE
        | {
            "layer_types": ["conv", "conv", "full_attention", "full_attention"],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "conv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("FalconH1", _FALCON),
    "falcon_h1_norm": (
        "FalconH1",
        _FALCON
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite_hybrid": ("GraniteMoeHybrid", _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "granite_hybrid_dense": (
        "GraniteMoeHybrid",
        _GRANITE
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "embedding_multiplier": 0.5,  # else every token predicts itself
            "residual_multiplier": 1.5,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", _OLMO),
    "olmo_hybrid_rope": (
        "OlmoHybrid",
        _OLMO
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "bamba_bias": (
        "Bamba",
        _BAMBA
        | {
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
}
_KDA: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}
# Families whose oracle came with this version of transformers.
KDA_SINCE = "5.22"
needs_kda = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < tuple(map(int, KDA_SINCE.split("."))),
    reason=f"transformers has these families since {KDA_SINCE}")
KDA_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinear", _KDA | {"linear_head_dim": 8, "linear_num_heads": 4}),
    "kimi_linear_groups": (
        "KimiLinear",
        _KDA
        | {
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 48,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    # transformers reads the size of a rotating part back as that of a KDA head.
    "bailing_hybrid": ("BailingHybrid", _KDA | {"head_dim": 16, "n_group": 4, "topk_group": 2,
                                                "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "bailing_hybrid_free": (
        "BailingHybrid",
        _KDA
        | {
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "kda_safe_gate": False,
            "first_k_dense_replace": 1,
            "layer_group_size": 3,
            "layer_types": None,
            "short_conv_kernel_size": 3,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 0.7,
                                "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
        },
    ),
}
_STREAMS: dict[str, Any] = _DELTA_MOE | {
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    # With fewer heads many scores are exactly 0, and which of them transformers chooses is not said.
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}
# Families with several residual streams. Their oracle came with KDA_SINCE too.
STREAM_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen4_exp": ("Qwen4Exp", _STREAMS),
    "qwen4_exp_sigmoid": (
        "Qwen4Exp",
        _STREAMS
        | {
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
            "ple_layer_ids": [2],
            "hc_count": 2,
            "ngram_size": 4,
            "heads_per_ngram": 2,
            "ple_embed_dim": 24,
            "ple_conv_kernel_size": 4,
            "split_ngram_parts": 3,
            "indexer_head_dim": 32,
            "indexer_budget": 16,
            "indexer_compress_ratio": 8,
            "output_gate_type": "sigmoid",
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
}
_POOLED: dict[str, Any] = _KDA | {
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_local_experts": None,
    "n_routed_experts": 8,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 0,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    # With fewer heads many scores are exactly 0, and which of them transformers chooses is not said.
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 12,
    "index_kpool": 4,
    "swiglu_limit": 1.0,
}
# The language models of these are parts of models that see images. Their oracle came with KDA_SINCE too.
POOLED_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm5_next": ("Glm5Next", _POOLED),
    "glm5_next_free": (
        "Glm5Next",
        _POOLED
        | {
            "layer_types": ["indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "indexer_types": ["full", "shared", "full", "full"],
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3,
            "linear_lower_bound": None,
            "index_kpool": 8,
            "index_topk": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-4,
        },
    ),
}
_EYES: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64,
                         "projection_intermediate_size": 16, "image_size": 28}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# With fewer heads many scores are exactly 0, and which of them transformers chooses is not said.
_INDEX: dict[str, Any] = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 16}
_LATENT_YARN = _YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}
_HALVES = {"rope_interleave": False, "indexer_rope_interleave": False}
LATENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", _LATENT | {"rope_parameters": _LATENT_YARN}),
    "deepseek_v3_direct": ("DeepseekV3", _LATENT | {"q_lora_rank": None, "attention_bias": True, "n_group": 1,
                                                    "topk_group": 1}),
    "mistral4": ("Mistral4", _LATENT | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_parameters":
                                        _LATENT_YARN | {"llama_4_scaling_beta": 0.5}}),
    "mistral4_groups": ("Mistral4", _LATENT | {
        "q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False, "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 0, "rope_parameters": _YARN_ROPE | {"llama_4_scaling_beta": 0.0}}),
    "deepseek_v32": ("DeepseekV32", _LATENT | _INDEX | {"rope_parameters": _LATENT_YARN}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"rope_parameters": _LATENT_YARN, "topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": ("DeepseekV2", _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1,
                                                  "routed_scaling_factor": 2.0}),
    "glm_moe_dsa": ("GlmMoeDsa", _LATENT | _INDEX | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
                                                     "indexer_types": ["full", "shared", "full", "shared"]}),
    # transformers rotates halves; limits that are reached show.
    "hy_v4": ("HYV4", _LATENT | _INDEX | {"n_group": 1, "topk_group": 1, "swiglu_limit": 0.8, "hc_magnitude": 1.5,
                                          "n_shared_experts": 1, "first_k_dense_replace": None, **_HALVES}),
    "hy_v4_yarn": ("HYV4", _LATENT | _INDEX | {
        "n_group": 1, "topk_group": 1, "swiglu_limit": 100.0, "hc_mult": 2, "hc_eps": 0.01, "attention_bias": True,
        "first_k_dense_replace": None, "rope_parameters": _LATENT_YARN, "index_head_dim": 16,
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense"], **_HALVES}),
}
ALL = (FAMILIES | MOE_FAMILIES | HYBRID_FAMILIES | LATENT_FAMILIES | KDA_FAMILIES | STREAM_FAMILIES | POOLED_FAMILIES
       | CLASSICS)
# Families that are parts of models that also see images.
CONDITIONAL = {*POOLED_FAMILIES, *(family for family, (name, _) in CLASSICS.items() if name in PARTS)}
_UNLISTED = ("Mistral4ForCausalLM",)  # classes that AutoModelForCausalLM does not know
_TEXT_CONFIGS = ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp")


def hf_config(family: str, **changes: Any) -> Any:
    import transformers

    name, values = ALL[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name in _TEXT_CONFIGS else f"{name}Config")
    if family in CONDITIONAL:
        text = {key: value for key, value in (BASE | values | changes).items() if key != "num_local_experts"}
        return config_class(text_config=text, **PARTS.get(name, {"vision_config": _EYES}))
    return config_class(**BASE | values | changes)


def make_folder(family: str, path: Path, **changes: Any) -> Path:
    """Save a random model of the family; equal calls save equal weights. Spread enough that greedy text varies."""
    import transformers

    torch.manual_seed(zlib.crc32(family.encode()))
    kind = "ForConditionalGeneration" if family in CONDITIONAL else "ForCausalLM"
    model = getattr(transformers, ALL[family][0] + kind)(hf_config(family, **changes))
    for name, parameter in model.named_parameters():
        mean = mean_of(name, ALL[family][0])
        torch.nn.init.normal_(parameter, mean=mean, std=0.05 if name.endswith("bias") else 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(path)
    if ALL[family][0] == "OlmoHybrid":
        part_convolutions(Path(path) / "model.safetensors")
    return Path(path)


def part_convolutions(path: Path) -> None:
    """Part the convolutions of q, k and v where makers' files do. transformers saves three of equal sizes, which it
    joins again when it loads them."""
    tensors = load_file(path)
    for first in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        prefix = first.removesuffix("q_conv1d.weight")
        joined = torch.cat([tensors[f"{prefix}{part}_conv1d.weight"] for part in "qkv"])
        sizes = [len(tensors[f"{prefix}{part}_proj.weight"]) for part in "qkv"]
        for part, own in zip("qkv", joined.split(sizes), strict=True):
            tensors[f"{prefix}{part}_conv1d.weight"] = own.clone()
    save_file(tensors, path, {"format": "pt"})


def mean_of(name: str, architecture: str) -> float:
    """The mean of a parameter's values. In Gemma layers must outweigh the scaled embedding, or every token predicts
    itself."""
    if name.endswith("A_log"):
        return -2.0  # a short memory is often almost empty, and the norm after it magnifies rounding
    if "norm" not in name:
        return 0.0
    if architecture in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp"):
        return 1.0 if ".linear_attn." in name else 0.0  # the others scale by 1 + weight
    if architecture not in ("Gemma2", "Gemma3") or ".self_attn." in name:
        return 1.0
    return 5.0 if ".post_" in name else 0.0


def hf_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    import transformers

    (name,) = read_config(folder)["architectures"]
    is_part = name.removesuffix("ForConditionalGeneration") in {ALL[family][0] for family in CONDITIONAL}
    found = getattr(transformers, name) if is_part or name in _UNLISTED else transformers.AutoModelForCausalLM
    return found.from_pretrained(folder, dtype=dtype, **options).eval()


class DenseAttend:
    """Attention and recurrences of one request over everything it was given so far, without pages. Use one per
    sequence."""

    def __init__(self, model: Model) -> None:
        self.layers: dict[int, Any] = {layer.index: layer for layer in model.attention_layers}
        self.latents: dict[int, torch.Tensor] = {}  # [1, tokens, latent | rope] by layer: a single page
        self.owner = {c.layer: c.layer if c.reads is None else c.reads for c in model.cache_layers()}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.mixers = getattr(model, "recurrent_layers", {})  # a draft head declares none
        self.states: dict[int, RecurrentState] = {}
        self.index_keys: dict[int, torch.Tensor] = {}  # [tokens, index dim] by layer
        self.gates: dict[int, torch.Tensor] = {}  # [tokens, index dim] by layer, of index keys that are weighed
        self.seen: list[list[int]] = []  # the last choice: positions, by token row of the pass
        self.text = torch.zeros(1, 0, dtype=torch.int64)

    def history(self, tokens: torch.Tensor) -> TokenHistory:
        """The history of the tokens that are given next."""
        self.text = torch.cat((self.text, tokens[None]), dim=1)
        return TokenHistory(self.text, torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens)))

    def mixer(self, layer: int) -> Any:
        if layer in self.mixers:
            return partial(self.recurrent, layer)
        spec = self.layers[layer]
        if isinstance(spec, IndexedLayer):
            return partial(self.indexed, spec)
        if isinstance(spec, LatentLayer) and not isinstance(spec.attends_to, EveryPosition):
            return DensePooledLayer(self, spec)
        return DenseLatentLayer(self, spec) if isinstance(spec, LatentLayer) else DenseLayer(self, layer)

    def indexed(self, layer: IndexedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                index: BlockInputs) -> torch.Tensor:
        """Every query by itself: the best blocks by a plain sort, and the tokens after the last whole one. The
        tokens of a draft head begin at position 1, and so do its blocks."""
        given = ((self.keys, k), (self.values, v), (self.index_keys, index.key))
        for kept, new in given:
            kept[layer.index] = torch.cat((kept[layer.index], new)) if layer.index in kept else new
        choice, group = layer.choice, layer.num_heads // layer.num_kv_heads
        size, anchor, raw = choice.blocks.size, choice.blocks.anchor, self.index_keys[layer.index]
        out = torch.zeros_like(q)
        for row in range(len(q)):
            length = len(raw) - len(q) + row + 1
            whole = length // size
            means = raw[: whole * size].view(whole, size, raw.shape[1]).mean(dim=1)
            normed = means / (means.square().mean(-1, keepdim=True) + index.eps).sqrt() * index.gain
            rope = RopeRows(anchor + size * torch.arange(whole), index.table)
            turned = rope.turn(normed[:, None].to(q.dtype), in_pairs=False)[:, 0]
            scores = (index.q[row] @ turned.T).relu().sum(dim=0)
            best = sorted(range(whole), key=lambda at: (-float(scores[at]), at))[: choice.top_k]
            seen = [at * size + i for at in sorted(best) for i in range(size)] + list(range(whole * size, length))
            for head in range(layer.num_heads):
                keys, values = (kept[layer.index][seen, head // group] for kept in (self.keys, self.values))
                out[row, head] = (keys @ q[row, head] * layer.scale).softmax(0) @ values
        return out.flatten(1)

    def recurrent(self, layer: int, conv_in: torch.Tensor, gates: tuple[torch.Tensor, ...]) -> torch.Tensor:
        mixer = self.mixers[layer]
        spec, wide = mixer.spec, torch.promote_types(conv_in.dtype, torch.float32)
        no_tail = conv_in.new_zeros(spec.conv_width - 1, spec.conv_dim)
        empty = RecurrentState(torch.zeros(spec.state_shape, dtype=wide), no_tail)
        begin = self.states.get(layer, empty)
        if conv_in.shape[0] == 1:
            stepped = mixer.step(begin.state[None], begin.tail[None], conv_in, gates)
            self.states[layer] = RecurrentState(stepped.state[0], stepped.tail[0])
            return stepped.y
        scanned = mixer.scan(*begin, conv_in, gates, [])
        self.states[layer] = RecurrentState(scanned.state, scanned.tail)
        return scanned.y

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        spec, owner = self.layers[layer], self.owner[layer]
        if k is not None and v is not None:
            assert spec.writes
            self.keys[layer] = torch.cat((self.keys[layer], k)) if layer in self.keys else k
            self.values[layer] = torch.cat((self.values[layer], v)) if layer in self.values else v
        repeats = spec.num_heads // spec.num_kv_heads
        keys = self.keys[owner].repeat_interleave(repeats, dim=1)
        values = self.values[owner].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        positions = torch.arange(keys.shape[0], device=q.device)
        behind = positions[-q.shape[0] :, None] - positions  # how far a key lies behind a query
        visible = behind >= 0 if spec.window is None else (behind >= 0) & (behind < spec.window)
        if spec.is_chunked:
            chunks = positions // spec.window
            visible = (behind >= 0) & (chunks[-q.shape[0] :, None] == chunks)
        scores = scores.masked_fill(~visible, float("-inf"))
        if spec.sinks is not None:
            scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, len(q), 1).to(scores.dtype)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class DenseLayer:
    """One attention layer of a DenseAttend."""

    def __init__(self, dense: DenseAttend, layer: int) -> None:
        self._dense, self._layer = dense, layer

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        return self._dense.attend(self._layer, q, k, v)

    def fused(self, qkv: torch.Tensor, rope: Any, norms: Any) -> None:
        return None


class DenseLatentLayer:
    """One latent attention layer of a DenseAttend, without an indexer. All tokens lie in one page."""

    def __init__(self, dense: DenseAttend, layer: LatentLayer) -> None:
        self._dense, self._layer = dense, layer

    def write(self, compressed: torch.Tensor, norms: LatentNorms,
              rope: RopeRows) -> tuple[torch.Tensor, torch.Tensor]:
        layer, latents = self._layer, self._dense.latents
        width, count = layer.latent_dim + layer.rope_dim, compressed.shape[0]
        before = latents.get(layer.index, compressed.new_zeros(1, 0, width))
        start = before.shape[1]
        latents[layer.index] = torch.cat((before, compressed.new_zeros(1, count, width)), dim=1)
        places = torch.arange(start, start + count)
        none = torch.zeros(count, dtype=torch.int64)
        contexts = TokenContexts(torch.zeros(1, 1, dtype=torch.int64), none, none, places + 1)
        plan = GroupPlan(places, contexts, start + count)
        self._bound = BoundLatentLayer(layer, {"latent": latents[layer.index]}, plan, ChosenPositions())
        return self._bound.write(compressed, norms, rope)

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        return self._bound(q)

    def values(self, q: torch.Tensor, to_values: torch.Tensor) -> torch.Tensor | None:
        return self._bound.values(q, to_values)


class DensePooledLayer:
    """One latent attention layer of a DenseAttend that attends to chosen blocks, its own or those of the layer
    before it. Every query by itself, by a plain sort. The tokens of a draft head begin at position 1, and so do its
    blocks."""

    def __init__(self, dense: DenseAttend, layer: LatentLayer) -> None:
        assert layer.rope_dim == 0
        self._dense, self._layer = dense, layer

    def write(self, compressed: torch.Tensor, norms: LatentNorms,
              rope: RopeRows) -> tuple[torch.Tensor, torch.Tensor]:
        dense, layer, index = self._dense, self._layer, self._layer.attends_to
        assert norms.q is not None
        own = (index.head_dim, index.num_heads, index.head_dim) if isinstance(index, PooledPositions) else (0, 0, 0)
        q, latent, key, heads, gate = compressed.split((len(norms.q), layer.latent_dim, *own), dim=1)
        q, latent = (x / (x.square().mean(-1, keepdim=True) + norms.eps).sqrt() * gain
                     for x, gain in ((q, norms.q), (latent, norms.latent)))
        given = [(dense.latents, latent)]
        if isinstance(index, PooledPositions):
            assert norms.index_key is not None and norms.place_bias is not None
            self._bias = norms.place_bias
            key = torch.nn.functional.layer_norm(key, (index.head_dim,), *norms.index_key, 1e-6)
            given += [(dense.index_keys, key), (dense.gates, gate)]
        for kept, new in given:
            kept[layer.index] = torch.cat((kept[layer.index], new)) if layer.index in kept else new
        return q, heads

    def choose(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        dense, index = self._dense, self._layer.attends_to
        assert isinstance(index, PooledPositions)
        size, keys, gates = index.blocks.size, dense.index_keys[self._layer.index], dense.gates[self._layer.index]
        dense.seen = []
        for row in range(len(q)):
            length = len(keys) - len(q) + row + 1
            whole = length // size
            pooled = [((gates[at : at + size] + self._bias).softmax(0) * keys[at : at + size]).sum(0)
                      for at in range(0, whole * size, size)]
            scores = [float(weights[row] @ (q[row] @ key).relu()) for key in pooled]
            best = sorted(range(whole), key=lambda at: (-scores[at], at))[: index.top_k]
            dense.seen.append([at * size + i for at in sorted(best) for i in range(size)]
                              + list(range(whole * size, length)))

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        entries, out = self._dense.latents[self._layer.index], torch.zeros_like(q)
        for row, seen in enumerate(self._dense.seen):
            out[row] = (q[row] @ entries[seen].T * self._layer.scale).softmax(-1) @ entries[seen]
        return out

    def values(self, q: torch.Tensor, to_values: torch.Tensor) -> None:
        return None


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(resolve(folder), dtype=dtype, device="cpu", **options)


def tokens_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def all_logits(model: Model, tokens: torch.Tensor, chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits of every position, the tokens given in chunks of these sizes (the rest as one)."""
    attend, start, rows = DenseAttend(model), 0, []
    for size in (*chunks, len(tokens) - sum(chunks)):
        positions = torch.arange(start, start + size)
        own = tokens[start : start + size]
        hidden = model.forward(own, StepContext(attend, positions, history=attend.history(own)))
        rows.append(model.logits(hidden.final, LOGIT_ROWS))
        start += size
    return torch.cat(rows)


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The most likely continuation, token by token, ties to the lowest id."""
    attend, known, computed = DenseAttend(model), list(prompt), 0
    for _ in range(count):
        new, positions = torch.tensor(known[computed:]), torch.arange(computed, len(known))
        hidden = model.forward(new, StepContext(attend, positions, history=attend.history(new))).final
        computed = len(known)
        known.append(int(model.logits(hidden[-1:], LOGIT_ROWS).argmax()))
    return known[len(prompt) :]


def hf_logits(folder: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf_model(folder, **options)(tokens[None]).logits[0]


def assert_logits_equal(folder: Path, count: int) -> None:
    tokens = tokens_of(seed=1, count=count)
    logits = all_logits(load(folder), tokens)
    assert logits.dtype == torch.float32
    wanted = hf_logits(folder, tokens)
    # Relative to the largest: in float32 either side is up to 3e-5 of it from float64, as machines add up.
    assert (logits - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))


def assert_chunked_equals_whole(folder: Path, count: int, chunks: tuple[int, ...], within: float) -> None:
    tokens = tokens_of(seed=2, count=count)
    model = load(folder, torch.float64)
    whole, chunked = all_logits(model, tokens), all_logits(model, tokens, chunks=chunks)
    assert whole.dtype == torch.float64
    assert (whole - chunked).abs().max() < within


def assert_greedy_text_equals(folder: Path) -> None:
    prompt = tokens_of(seed=3, count=12).tolist()
    text = hf_model(folder).generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    expected = text[0, len(prompt) :].tolist()
    assert greedy(load(folder), prompt, 32) == expected
    assert len(set(expected)) > 4, "a constant text would hide mistakes"
