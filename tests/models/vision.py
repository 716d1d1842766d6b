"""Tiny models that see images, saved by transformers with weights that show every part; and their images."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

SLIDING, FULL = "sliding_attention", "full_attention"
IDS = {"image_token_id": 300, "boi_token_id": 301, "eoi_token_id": 302, "video_token_id": 303, "audio_token_id": 304}
GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "sliding_window": 8, "final_logit_softcapping": 30.0, "pad_token_id": 0,
    "layer_types": [SLIDING, SLIDING, FULL] * 2, "use_bidirectional_attention": "vision",
}
GEMMA_TOWER: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 64,
}
UNIFIED_TOWER = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 32,
                 "output_proj_dims": 48}
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
QWEN_VL_TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                        "mrope_interleaved": True},
}
QWEN_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 48, "intermediate_size": 64, "num_heads": 3, "patch_size": 4,
                              "out_hidden_size": 64, "num_position_embeddings": 36}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# name -> (transformers class without its suffix, text config, vision config)
VISION_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4_unified": ("Gemma4Unified", GEMMA_TEXT, UNIFIED_TOWER),
    "gemma4_clipped": (
        "Gemma4", GEMMA_TEXT | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
                                "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
                                "use_bidirectional_attention": None},
        GEMMA_TOWER | {"use_clipped_linears": True}),
    "gemma4_standardized": (
        "Gemma4", GEMMA_TEXT | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 320},
        GEMMA_TOWER | {"standardize": True}),
    "qwen3_5": ("Qwen3_5", QWEN_TEXT, QWEN_TOWER),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN_TEXT | EXPERTS | {"shared_expert_intermediate_size": 32}, QWEN_TOWER),
    "qwen3_vl": ("Qwen3VL", QWEN_VL_TEXT, QWEN_TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", QWEN_VL_TEXT | EXPERTS | {"decoder_sparse_step": 1},
                     QWEN_TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 2]}),
}


def vision_model(name: str) -> Any:
    """A model of transformers, the same on every call."""
    import transformers

    kind, text, vision = VISION_MODELS[name]
    ids = IDS | ({"audio_config": None} if kind.startswith("Gemma4") else {"vision_start_token_id": 301,
                                                                           "vision_end_token_id": 302})
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(
            config, attn_implementation="eager", dtype=torch.float32)
        spread_vision(model)
    return model.eval()


def spread_vision(model: Any) -> None:
    """Larger weights than initial ones, which would hide everything behind residual streams."""
    for name, value in sorted(model.state_dict().items()):
        if not value.is_floating_point():
            continue
        if name.endswith(("input_min", "output_min", "input_max", "output_max")):
            value.fill_(1.5 if name.endswith("max") else -1.5)
        elif name.endswith("layer_scalar"):
            value.fill_(0.9)
        elif "position" in name or "pos_embed" in name or name.endswith(("std_bias", "bias")):
            value.normal_()
        elif value.dim() < 2:
            value.normal_().mul_(0.2).add_(1)
        else:
            value.normal_(std=0.08)


def save_vision(name: str, path: Path) -> Path:
    vision_model(name).save_pretrained(path)
    return path


def made_patches(count: int, size: int, seed: int) -> np.ndarray:
    """Bytes of `count` patches."""
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
