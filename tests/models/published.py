"""Configs of well-known checkpoints, and the page that says which of them are served (docs/checkpoints.md).

`published.json` has configs that packages carry: those of mlc-llm's model presets, which are the published files with
settings of its own (left out here), and the defaults of transformers' config classes (5.22.2) where they make a model
of the checkpoint's size. Those of this file are reconstructed from memory of the published files. Every config goes
through the check that a load begins with.

    python -m tests.models.published > docs/checkpoints.md
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider.models.bridge.model import BridgedModel
from outrider.models.config import ConfigError
from outrider.models.registry import architectures, build_model

COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True,
                          "initializer_range": 0.02, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "_attn_implementation_autoset": True, "attention_bias": False,
    "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192,
    "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "intermediate_size_mlp": 16384,
    "no_rope_layers": [1, 1, 1, 0] * 12, "num_experts_per_tok": 1, "output_router_logits": False, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "tie_word_embeddings": False,
}
_QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
                          "tie_word_embeddings": False, "use_sliding_window": False}
_QWEN3: dict[str, Any] = {"attention_bias": False, "hidden_act": "silu", "max_window_layers": 36, "rms_norm_eps": 1e-6,
                          "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
                          "tie_word_embeddings": False, "use_sliding_window": False}
_GRANITE4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "embedding_multiplier": 12,
    "hidden_act": "silu", "init_method": "mup", "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False,
    "normalization_function": "rmsnorm", "output_router_logits": False, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "router_aux_loss_coef": 0.01, "tie_word_embeddings": True,
}
# name -> (parameters in billions, hidden size, layers, heads, kv heads, inner size, vocabulary, positions, other keys)
RECONSTRUCTED: dict[str, tuple[float, tuple[int | None, ...], dict[str, Any]]] = {
    "openai/gpt-oss-20b": (20.9, (2880, 24, 64, 8, 2880, 201088, 131072), {
        "architectures": ["GptOssForCausalLM"], "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000,
        "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "initial_context_length": 4096,
        "router_aux_loss_coef": 0.9, "output_router_logits": False, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, (4096, 32, 32, 8, 14336, 32000, 32768), {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6,
        "sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False,
        "tie_word_embeddings": False}),
    "HuggingFaceTB/SmolLM3-3B": (3.08, (2048, 36, 16, 4, 11008, 128256, 65536), {
        "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "use_sliding_window": False,
        "sliding_window": None, "rope_theta": 5e6, "mlp_bias": False, "pretraining_tp": 2, "attention_bias": False}),
    "ibm-granite/granite-3.3-8b-instruct": (8.17, (4096, 40, 32, 8, 12800, 49159, 131072), {
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_theta": 1e7, "rope_scaling": None, "mlp_bias": False,
        "tie_word_embeddings": True, "attention_bias": False}),
    "ibm-granite/granite-4.0-micro": (3.4, (2560, 40, 40, 8, 8192, 100352, 131072), _GRANITE4 | {
        "attention_multiplier": 0.015625, "layer_types": ["attention"] * 40, "logits_scaling": 10,
        "mamba_n_heads": 128, "num_experts_per_tok": 0, "num_local_experts": 0, "position_embedding_type": "rope",
        "rope_theta": 10000000, "shared_intermediate_size": 8192}),
    "ibm-granite/granite-4.0-h-tiny": (6.94, (1536, 40, 12, 4, 512, 100352, 131072), _GRANITE4 | {
        "attention_multiplier": 0.0078125, "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "logits_scaling": 6, "mamba_n_heads": 48, "num_experts_per_tok": 6, "num_local_experts": 64,
        "position_embedding_type": "nope", "rope_theta": 10000, "shared_intermediate_size": 1024}),
    "tiiuae/Falcon-H1-0.5B-Instruct": (0.521, (1024, 36, 8, 2, 2048, 32784, 16384), {
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381,
        "head_dim": 64, "hidden_act": "silu", "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625,
        "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
        "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_logits_to_keep": 1, "projectors_bias": False, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "tie_word_embeddings": False}),
    "LiquidAI/LFM2-1.2B": (1.17, (2048, 16, 32, 8, 12288, 65536, 128000), {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_use_xavier_init": True, "full_attn_idxs": None, "norm_eps": 1e-5,
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "num_heads": 32, "rope_theta": 1000000.0, "tie_embedding": True, "use_pos_enc": True}),
    "LiquidAI/LFM2-8B-A1B": (8.34, (2048, 24, 32, 8, 7168, 65536, 128000), {
        "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False, "moe_intermediate_size": 1792,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "norm_eps": 1e-5, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True}),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (36.2, (5120, 64, 80, 8, 27648, 155136, 524288), {
        "architectures": ["SeedOssForCausalLM"], "head_dim": 128, "attention_bias": True, "attention_out_bias": False,
        "residual_dropout": 0.1, "rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}, "mlp_bias": False}),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32.0, (5120, 64, 40, 8, 27392, 102400, 131072), {
        "architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "sliding_window": 4096,
        "sliding_window_pattern": "LLLG", "rope_theta": 1e6, "tie_word_embeddings": False, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}}),
    "CohereLabs/c4ai-command-r7b-12-2024": (8.03, (4096, 32, 32, 8, 14336, 256000, 132096), {
        "architectures": ["Cohere2ForCausalLM"], "head_dim": 128, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "layer_switch": 4, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 50000, "rotary_pct": 1.0,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "use_qk_norm": False, "attention_bias": False}),
    "MiniMaxAI/MiniMax-M2": (229, (3072, 62, 48, 8, 1536, 200064, 196608), {
        "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6,
        "num_local_experts": 256, "num_experts_per_tok": 8, "attn_type_list": [1] * 62, "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
        "mtp_transformer_layers": 1, "use_qk_norm": True, "use_routing_bias": True, "mlp_intermediate_size": 8192}),
    "zai-org/GLM-4.6": (353, (5120, 92, 96, 8, 12288, 151552, 202752), {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
        "rope_scaling": None, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 1}),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (15.7, (2048, 27, 16, 16, 10944, 102400, 163840), {
        "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "rope_theta": 10000,
        "ep_size": 1, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                                       "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                                       "type": "yarn"}}),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (107.8, (5120, 48, 40, 8, 8192, 202048, 10485760), _LLAMA4 | {
        "interleave_moe_layer_step": 1, "num_local_experts": 16, "use_qk_norm": True, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}}),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": (400.7, (5120, 48, 40, 8, 8192, 202048, 1048576), _LLAMA4 | {
        "interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None}),
    "Qwen/Qwen2.5-7B-Instruct-1M": (7.6, (3584, 28, 28, 4, 18944, 152064, 1010000), _QWEN2 | {
        "max_window_layers": 28, "rope_theta": 10000000.0, "sliding_window": 32768, "dual_chunk_attention_config": {
            "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}}),
    "Qwen/Qwen2.5-72B-Instruct": (72.7, (8192, 80, 64, 8, 29568, 152064, 32768), _QWEN2 | {
        "max_window_layers": 70, "rope_theta": 1000000.0, "sliding_window": 131072}),
    "Qwen/Qwen3-8B": (8.19, (4096, 36, 32, 8, 12288, 151936, 40960), _QWEN3 | {
        "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}),
    "Qwen/Qwen3-30B-A3B": (30.5, (2048, 48, 32, 4, 6144, 151936, 40960), _QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.001}),
    "Qwen/Qwen2.5-VL-7B-Instruct": (7.62, (3584, 28, 28, 4, 18944, 152064, 128000), _QWEN2 | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "max_window_layers": 28, "rope_theta": 1000000.0,
        "sliding_window": 32768, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
    "Qwen/Qwen3-VL-8B-Instruct": (8.19, (4096, 36, 32, 8, 12288, 151936, 262144), {
        "architectures": ["Qwen3VLForConditionalGeneration"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}, "rope_theta": 5000000,
        "tie_word_embeddings": False}),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (30.5, (2048, 48, 32, 4, 6144, 151936, 262144), {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "attention_bias": False, "head_dim": 128,
        "decoder_sparse_step": 1, "hidden_act": "silu", "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6, "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}, "rope_theta": 5000000,
        "tie_word_embeddings": False}),
    "Qwen/Qwen3.5-27B": (26.9, (5120, 64, 24, 4, 17408, 248320, 262144), {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "attn_output_gate": True,
        "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default"}}),
    "zai-org/GLM-4.5-Air": (107, (4096, 46, 96, 8, 10944, 151552, 131072), {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
        "rope_scaling": None, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "attention_bias": True, "num_nextn_predict_layers": 1}),
    "moonshotai/Kimi-K2-Instruct": (1026, (7168, 61, 64, 64, 18432, 163840, 131072), {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "ep_size": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "attention_bias": False,
        "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]}}),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (23.6, (5120, 40, 32, 8, 32768, 131072, 131072), {
        "architectures": ["Mistral3ForConditionalGeneration"], "head_dim": 128, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None}),
    "google/gemma-3-27b-it": (27.0, (5376, 62, 32, 16, 21504, 262208, 131072), {
        "architectures": ["Gemma3ForConditionalGeneration"], "head_dim": 128, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}),
    "google/gemma-3-4b-it": (3.88, (2560, 34, None, None, 10240, None, None), {  # the published file says no more
        "architectures": ["Gemma3ForConditionalGeneration"], "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024}),
    "tencent/Hy4-preview": (770, (6144, 78, 64, 8, 18432, 120832, 1048576), {
        "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "head_dim": 256, "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.827, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 32, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6,
        "swiglu_limit": 10.0, "enable_ihc": True, "learnable_sink": True, "learnable_sink_init": 0.0,
        "gated_mla": True, "gating_type": "elementwise", "enable_lm_head_fp32": True, "num_nextn_predict_layers": 1,
        "layer_types": ["deepseek_sparse_attention"] * 78, "mlp_layer_types": ["dense", *["sparse"] * 77],
        "indexer_types": ["full", *["full", "shared", "shared", "shared"] * 19, "full"], "attention_bias": False,
        "hidden_act": "silu", "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "tie_word_embeddings": False}),
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "vocab_size", "max_position_embeddings")

SOURCES = {
    "mlc-llm": "Published files, from mlc-llm's model presets",
    "transformers": "Defaults of transformers' config classes, where they make a model of the checkpoint's size",
    "reconstructed": "Configs reconstructed from memory",
}
REASONS = {
    "neither Outrider nor transformers has a text model of this name": "no decoder",
    "its code in transformers does not let another package compute its attention "
    "(it lacks _supports_attention_backend)": "own attention",
    "it keeps a state of its own beside keys and values, which pages cannot hold": "own state",
}


@dataclass(frozen=True)
class Checkpoint:
    name: str
    source: str  # key of SOURCES
    config: dict[str, Any]
    billions: float | None = None  # parameters that its makers count, of the text

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def has_family(self) -> bool:
        """Whether a family here decides about it, which takes milliseconds, or transformers' code."""
        return self.architecture in architectures()


def all_checkpoints() -> Iterator[Checkpoint]:
    for entry in json.loads(Path(__file__).with_name("published.json").read_text()):
        yield Checkpoint(**entry)
    for name, (billions, sizes, values) in RECONSTRUCTED.items():
        named = {key: size for key, size in zip(SIZES, sizes, strict=True) if size is not None}
        config = COMMON | named | values
        if values["architectures"][0].endswith("ForConditionalGeneration"):
            text = {key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")}
            config = {"architectures": values["architectures"], "text_config": text, "vision_config": {}} | {
                key: values[key] for key in ("tie_word_embeddings",) if key in values}
        yield Checkpoint(name, "reconstructed", config, billions)


CHECKPOINTS = {checkpoint.name: checkpoint for checkpoint in all_checkpoints()}


@dataclass(frozen=True)
class Outcome:
    says: str  # as the page has it
    is_served: bool
    num_parameters: int = 0


@cache
def outcome_of(name: str) -> Outcome:
    """What a load of the checkpoint begins with: its config is read and its model built, without memory for weights."""
    try:
        model = build_model(CHECKPOINTS[name].config, dtype=torch.bfloat16, device="meta")
    except ConfigError as error:
        key, why = re.split(r" is not supported[;:] |: (?=Outrider does not read this)", str(error), maxsplit=1)
        why = re.sub(r"transformers [\d.]+\d", "transformers", re.split(r": `outrider|, so |\. ", why)[0])
        why = REASONS.get(why.removesuffix("; the code that auto_map names is never run"), why)
        key = key.removeprefix("config.json: ")
        return Outcome(f"refused: {why}" if key.startswith("architectures=") else f"refused by `{key}`: {why}", False)
    count = sum(math.prod(slot.shape) for slot in model.weights().values())
    size = f"{count / 1e9:.0f}B" if count >= 1e11 else f"{count / 1e9:.3g}B"
    return Outcome(f"{size}, bridge" if isinstance(model, BridgedModel) else size, True, count)


def row_of(checkpoint: Checkpoint) -> str:
    return f"- `{checkpoint.name}`, `{checkpoint.architecture}`: {outcome_of(checkpoint.name).says}"


HEAD = """# Configs of well-known checkpoints

Made by `python -m tests.models.published`. Tests compare every row with the check that a load begins with: the config
is read, and the model is built without memory for its weights. Weights of these checkpoints were not loaded.

Every checkpoint without "refused" is served: `6.74B` are its billions of parameters, and *bridge* means
[through transformers](models.md#through-transformers). The refusals:

"""


def page(row_of: Callable[[Checkpoint], str] = row_of) -> str:
    reasons = "\n".join(f"- *{short}*: {why}" for why, short in REASONS.items())
    text = HEAD + reasons + "\n\nQwen3.6 and Qwen3.8 dense models have the architecture of Qwen3.5.\n"
    for source, heading in SOURCES.items():
        rows = (row_of(checkpoint) for checkpoint in CHECKPOINTS.values() if checkpoint.source == source)
        text += f"\n## {heading}\n\n" + "\n".join(rows) + "\n"
    return text


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of transformers
    print(page(), end="")
