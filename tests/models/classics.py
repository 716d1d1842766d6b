"""Tiny configs of the families that are Llama's layers with other blocks: name -> (transformers class without its
suffix, config values beyond the base). Each switch of a family is on in one of them.
"""

from __future__ import annotations

from typing import Any

KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_WINDOWS: dict[str, Any] = {"sliding_window": 16, "layer_types": KINDS}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.9, 2.2, 2.5], "long_factor": [1.0, 1.5, 2.0, 2.7, 3.1, 4.0, 5.5, 7.0],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}
_LLAMA4: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
    "attention_chunk_size": 16, "floor_scale": 10, "attn_scale": 0.5, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64},
}
_GLIMMER: dict[str, Any] = {"head_dim": 16, "sliding_window": 16}
_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "seed_oss": ("SeedOss", {"head_dim": 32}),
    "seed_oss_bias": ("SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": False}),
    "smollm3_sliding": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [1, 0, 1, 0]}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
                            "logits_scaling": 8.0}),
    "granite_bias": ("Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5}}),
    "phi3": ("Phi3", {}),
    "phi3_sliding": ("Phi3", {"sliding_window": 16, "num_key_value_heads": 4}),
    "phi4_mini": ("Phi3", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    "olmo2": ("Olmo2", {}),
    "olmo2_bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": ("Olmo3", _WINDOWS | {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0,
                           "original_max_position_embeddings": 64}}}),
    "exaone4": ("Exaone4", _WINDOWS),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere": ("Cohere", {}),
    "cohere_normed": ("Cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5,
                                 "tie_word_embeddings": False}),
    "cohere2": ("Cohere2", _WINDOWS),
    "ernie": ("Ernie4_5", {"head_dim": 32}),
    "ernie_bias": ("Ernie4_5", {"use_bias": True, "head_dim": 16, "tie_word_embeddings": False}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16, "attention_bias": True}),
    "hunyuan_alpha": ("HunYuanDenseV1", {"head_dim": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 4, "sliding_window": 16,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0}),
    "muse_glimmer": ("MuseGlimmer", _GLIMMER),
    "muse_glimmer_free": ("MuseGlimmer", _GLIMMER | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "layer_rope_theta": [500.0, 0.0, 500.0, 500.0], "rope_parameters": {"rope_type": "default",
                                                                            "rope_theta": 500.0},
        "qk_scale_factor": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 5.0, "post_norm_eps": 0.01,
        "num_key_value_heads": 4}),
}
_SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", _EXPERTS | {"head_dim": 16, "sliding_window": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "truncate": False}}),
    "llama4": ("Llama4", _LLAMA4),
    "llama4_dense": ("Llama4", _LLAMA4 | {
        "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 3, "attention_chunk_size": 24,
        "no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64}}),
    "llama4_even": ("Llama4", _LLAMA4 | {"attn_temperature_tuning": False, "moe_layers": [0, 3], "layer_types": [
        "chunked_attention", "full_attention", "chunked_attention", "chunked_attention"]}),
    "mixtral": ("Mixtral", _EXPERTS),
    "mixtral_sliding": ("Mixtral", _EXPERTS | {"sliding_window": 16, "head_dim": 32}),
    "ernie_moe": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24,
                                   "moe_num_shared_experts": 2}),
    "hunyuan_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2", _EXPERTS | {"head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                             "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
                             "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}),
}
CLASSICS = _DENSE | _SPARSE
# Families that are language models in checkpoints that also see images, with the configs of their other parts.
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PARTS: dict[str, dict[str, Any]] = {
    "MuseGlimmer": {"vision_config": _TOWER, "out_hidden_size": 128, "projector_hidden_size": 16},
}
# Values of a Phi-3 with divisors of its frequencies.
LONGROPE: dict[str, Any] = {"head_dim": 16, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}
