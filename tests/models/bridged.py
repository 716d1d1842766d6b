"""Tiny models that the bridge to transformers serves, each of an architecture that no family here does."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from outrider.models.bridge.installed import declared_keys
from tests.models.oracle import BASE

_HEADS: dict[str, Any] = {"head_dim": 16}
_SLIDING: dict[str, Any] = {"head_dim": 16, "sliding_window": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
_NARROW = _EXPERTS | {"moe_intermediate_size": 24}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16,
                           "qk_nope_head_dim": 24, "v_head_dim": 20}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 1,
                           "topk_group": 1, "n_shared_experts": 1}
# name -> (transformers class without its suffix, config values beyond the base)
BRIDGED: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"sliding_window": 16}),
    "phi": ("Phi", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "gemma": ("Gemma", _HEADS),
    "nemotron": ("Nemotron", _HEADS),
    "olmo": ("Olmo", {}),
    "olmo_clipped": ("Olmo", {"clip_qkv": 1.0}),
    "olmoe": ("Olmoe", _EXPERTS),
    "qwen2_moe": ("Qwen2Moe", _NARROW | {"shared_expert_intermediate_size": 40}),
    "persimmon": ("Persimmon", {}),
    "helium": ("Helium", _HEADS),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "glm": ("Glm", _HEADS),
    "glm4": ("Glm4", _HEADS),
    "dots1": ("Dots1", _ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1}),
    "bitnet": ("BitNet", {}),
    "cwm": ("Cwm", _SLIDING),
    "jais2": ("Jais2", {}),
    "ministral": ("Ministral", _SLIDING),
    "vaultgemma": ("VaultGemma", _SLIDING),
    "nanochat": ("NanoChat", {}),
    "granite_moe": ("GraniteMoe", _LOCAL),
    "phimoe": ("Phimoe", _LOCAL),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "opt": ("OPT", {}),
    "minicpm3": ("MiniCPM3", _LATENT | {"tie_word_embeddings": False}),
    "youtu": ("Youtu", _LATENT | {"pad_token_id": None}),  # transformers clears the row of a padding token
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT | _ROUTED),
    "exaone_moe": ("ExaoneMoe", _NARROW),
    "flex_olmo": ("FlexOlmo", _EXPERTS),
    "solar_open": ("SolarOpen", _ROUTED),
    "hyperclovax": ("HyperCLOVAX", {}),
    "afmoe": ("Afmoe", _NARROW | _SLIDING),
    "mellum": ("Mellum", _NARROW | _HEADS),
    "hy_v3": ("HYV3", _NARROW | _HEADS),
    "cohere2_moe": ("Cohere2Moe", _EXPERTS | _SLIDING),
    "granite_swa": ("GraniteSWA", {"sliding_window": 16}),
    "laguna": ("Laguna", _NARROW | _SLIDING),
    "axk1": ("AXK1", _LATENT | _ROUTED),
    "beam": ("Beam", {}),
    "flint": ("Flint", {}),
    "granite_moe_swa": ("GraniteMoeSWA", _LOCAL | {"sliding_window": 16}),
    "granite_moe_shared": ("GraniteMoeShared", _LOCAL),
    "kolibri1": ("Kolibri1", {}),
    "stablelm": ("StableLm", {}),
    "stablelm_parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "biogpt": ("BioGpt", {"num_key_value_heads": 4}),
    "mimo_v2_flash": ("MiMoV2Flash", {"sliding_window": 16}),
}
# Architectures that families here serve, forced through the bridge.
FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "ministral3": ("Ministral3", _HEADS),
    "gemma2": ("Gemma2", _SLIDING | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}),
}
SCALED_BY_ONE_MORE = ("Gemma", "Gemma2", "VaultGemma", "Nemotron")  # norms scale by 1 + weight
# Of weights, where 0.2 magnifies the rounding of transformers' norms, which are float32 in any dtype, or makes a plain
# text.
SPREAD = {"GraniteMoe": 0.1, "GraniteMoeShared": 0.1, "GraniteMoeSWA": 0.1, "GraniteSWA": 0.1, "GPTNeoX": 0.3,
          "BioGpt": 0.5}


def model_class_of(name: str) -> Any:
    import transformers

    kind = (BRIDGED | FORCED)[name][0]
    return getattr(transformers, kind if kind.endswith("Model") else f"{kind}ForCausalLM")


def hf_config_of(name: str, **changes: Any) -> Any:
    config_class = model_class_of(name).config_class
    declared = declared_keys(config_class)
    base = {key: value for key, value in BASE.items() if key in declared}
    return config_class(**base | (BRIDGED | FORCED)[name][1] | changes)


def make_bridged(name: str, path: Path, **changes: Any) -> Path:
    """Save a random model; equal calls save equal weights. Spread enough that greedy text varies."""
    torch.manual_seed(zlib.crc32(name.encode()))
    kind = (BRIDGED | FORCED)[name][0]
    model = model_class_of(name)(hf_config_of(name, **changes))
    for parameter_name, parameter in model.named_parameters():
        is_norm = "norm" in parameter_name or ".ln_" in parameter_name
        mean = 1.0 if is_norm and parameter_name.endswith("weight") and kind not in SCALED_BY_ONE_MORE else 0.0
        std = 0.05 if parameter_name.endswith("bias") else SPREAD.get(kind, 0.2)
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(path)
    return path
