"""Configs of well-known checkpoints of the classic families, written down from memory of the published files: every key
is known, and the model they describe has about as many parameters as its makers say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider.models.registry import build_model

COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True,
                          "initializer_range": 0.02, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
# name -> (parameters in billions, hidden size, layers, heads, kv heads, inner size, vocabulary, positions, other keys)
PUBLISHED: dict[str, tuple[float, tuple[int, ...], dict[str, Any]]] = {
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
    "google/gemma-2-9b-it": (9.24, (3584, 42, 16, 8, 14336, 256000, 8192), {
        "architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 10000.0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid",
        "sliding_window_size": 4096}),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (46.7, (4096, 32, 32, 8, 14336, 32000, 32768), {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6,
        "sliding_window": None, "router_aux_loss_coef": 0.02, "output_router_logits": False,
        "tie_word_embeddings": False}),
    "microsoft/Phi-4-mini-instruct": (3.84, (3072, 32, 24, 8, 8192, 200064, 131072), {
        "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "sliding_window": 262144, "original_max_position_embeddings": 4096, "tie_word_embeddings": True,
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "attention_bias": False,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu",
        "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48}}),
    "HuggingFaceTB/SmolLM3-3B": (3.08, (2048, 36, 16, 4, 11008, 128256, 65536), {
        "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "use_sliding_window": False,
        "sliding_window": None, "rope_theta": 5e6, "mlp_bias": False, "pretraining_tp": 2, "attention_bias": False}),
    "ibm-granite/granite-3.3-8b-instruct": (8.17, (4096, 40, 32, 8, 12800, 49159, 131072), {
        "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_theta": 1e7, "rope_scaling": None, "mlp_bias": False,
        "tie_word_embeddings": True, "attention_bias": False}),
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
}  # fmt: skip
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "vocab_size", "max_position_embeddings")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_served_whole(name: str) -> None:
    billions, sizes, values = PUBLISHED[name]
    config = COMMON | dict(zip(SIZES, sizes, strict=True)) | values
    model = build_model(config, dtype=torch.bfloat16, device="meta")
    count = sum(math.prod(slot.shape) for slot in model.weights().values())
    assert count == pytest.approx(billions * 1e9, rel=0.03)
