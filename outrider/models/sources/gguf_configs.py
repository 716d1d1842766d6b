"""Convert the metadata of each GGUF architecture to a config in Hugging Face's form."""

from __future__ import annotations

from typing import Any

from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.gguf_places import DeltaHeads
from outrider.models.sources.gguf_rope import read_rope, turning_share

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SIGMOID = 2  # expert_gating_func


def plain_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of a model with the same attention in all layers and a rope on whole heads."""
    heads = meta.need_number("attention.head_count")
    head_dim = meta.get("attention.key_length", meta.need("embedding_length") // heads)
    meta.must_equal("rope.dimension_count", head_dim, f" where the head size is {head_dim}")
    meta.check_rows("attention.head_count", "attn_q.weight", heads * head_dim)
    return _heads(meta, heads, head_dim) | _norms(meta) | {"hidden_act": "silu"} | read_rope(meta, head_dim)


def _norms(meta: Metadata) -> dict[str, Any]:
    return {"rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon")}


def _heads(meta: Metadata, heads: int, head_dim: int) -> dict[str, Any]:
    meta.must_equal("attention.value_length", head_dim, f" where the head size is {head_dim}")
    kv_heads = heads if meta.get("attention.head_count_kv") is None else meta.need_number("attention.head_count_kv")
    meta.check_rows("attention.head_count_kv", "attn_k.weight", kv_heads * head_dim)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def llama_config(meta: Metadata) -> dict[str, Any]:
    meta.must_equal("expert_count", 0, " (mixture of experts)")
    meta.get("expert_used_count")
    return plain_config(meta) | {"attention_bias": False, "mlp_bias": False}


def qwen3_moe_config(meta: Metadata) -> dict[str, Any]:
    return plain_config(meta) | _experts(meta) | {"norm_topk_prob": True, "attention_bias": False}


def _experts(meta: Metadata) -> dict[str, Any]:
    return {"num_experts": meta.need("expert_count"), "num_experts_per_tok": meta.need("expert_used_count"),
            "moe_intermediate_size": meta.need_number("expert_feed_forward_length")}


def text_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of a vision model's text part. All components of a text position are equal, so its rope is an
    ordinary one."""
    meta.get("rope.dimension_sections"), meta.get("n_deepstack_layers")
    return plain_config(meta)


def text_moe_config(meta: Metadata) -> dict[str, Any]:
    return text_config(meta) | qwen3_moe_config(meta)


def seed_oss_config(meta: Metadata) -> dict[str, Any]:
    return plain_config(meta) | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}


def lfm2_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of LFM2: layers whose number of key heads is 0 have a short convolution instead of
    attention."""
    heads, kv_heads = meta.need_number("attention.head_count"), meta.by_layer("attention.head_count_kv")
    head_dim = meta.need("embedding_length") // heads
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        meta.must_equal(key, head_dim, f" where the head size is {head_dim}")
    config = read_rope(meta, head_dim) | {
        "norm_eps": meta.need("attention.layer_norm_rms_epsilon"), "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads), "layer_types": [FULL if count else "conv" for count in kv_heads],
        "conv_L_cache": meta.need("shortconv.l_cache")}
    if not meta.get("expert_count", 0):
        return config | {"block_auto_adjust_ff_dim": False}
    meta.must_equal("expert_gating_func", SIGMOID, ": experts of this family are chosen by a sigmoid")
    return config | _experts(meta) | {"num_dense_layers": meta.get("leading_dense_block_count", 0),
                                      "use_expert_bias": bool(meta.layers_with("exp_probs_b.bias"))}


def gemma3_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 3: every sixth layer has full attention. The 27B model, which has 62 layers, derives
    the scale of queries from another size."""
    layers, heads = meta.need("block_count"), meta.need_number("attention.head_count")
    scalar = meta.need("embedding_length") // heads if layers == 62 else meta.need("attention.key_length")
    return plain_config(meta) | {
        "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar,
        "sliding_window": meta.need("attention.sliding_window"), "sliding_window_pattern": 6,
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0)}


def gemma4_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 4: full layers have different heads, and those without a value matrix use keys as
    values. The rope of full layers rotates a part of each head."""
    count, sliding = meta.num_layers, meta.by_layer("attention.sliding_window_pattern")
    head_dim, full_dim = meta.need("attention.key_length_swa"), meta.need("attention.key_length")
    for key, size in (("attention.value_length", full_dim), ("attention.value_length_swa", head_dim),
                      ("rope.dimension_count", full_dim), ("rope.dimension_count_swa", head_dim)):
        meta.must_equal(key, size, f" where the head size is {size}")
    kv_heads, num_shared = meta.by_layer("attention.head_count_kv"), meta.get("attention.shared_kv_layers", 0)
    full = [layer for layer in range(count) if not sliding[layer]]
    own_full = [layer for layer in full if layer < count - num_shared]
    per_layer = meta.get("embedding_length_per_layer_input", 0)
    table = meta.header.tensors.get("per_layer_token_embd.weight")
    return _norms(meta) | {
        "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": meta.need_number("attention.head_count"),
        "num_key_value_heads": next((kv_heads[i] for i in range(count) if sliding[i]), kv_heads[0]),
        "head_dim": head_dim, "sliding_window": meta.need("attention.sliding_window"),
        "layer_types": [SLIDING if slides else FULL for slides in sliding],
        "per_layer_config": {str(i): {"head_dim": full_dim, "num_key_value_heads": kv_heads[i]} for i in full},
        "attention_k_eq_v": not set(own_full) & set(meta.layers_with("attn_v.weight")),
        "num_kv_shared_layers": num_shared, "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else None,
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": meta.get("rope.freq_base", 1e6),
                   "partial_rotary_factor": turning_share(meta.header, full_dim)},
            SLIDING: {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 1e4)}},
        "suppress_tokens": meta.header.metadata.get("tokenizer.ggml.suppress_tokens"),
        **_gemma4_widths(meta, count - num_shared),
    }


def _gemma4_widths(meta: Metadata, num_own: int) -> dict[str, Any]:
    """Return the sizes of the experts and of the MLPs, which may be twice as wide in layers without their own cache."""
    widths = meta.by_layer("feed_forward_length")
    is_wide = num_own < len(widths) and widths[-1] == 2 * widths[0]
    if any(width != widths[0] * (2 if is_wide and i >= num_own else 1) for i, width in enumerate(widths)):
        raise meta.refusal("feed_forward_length", "only the last layers, which share a cache, may differ, and must be "
                                                  "twice as wide")
    found = {"intermediate_size": widths[0], "use_double_wide_mlp": is_wide}
    if not meta.get("expert_count", 0):
        return found
    return found | {"enable_moe_block": True, "num_experts": meta.need("expert_count"),
                    "top_k_experts": meta.need("expert_used_count"),
                    "moe_intermediate_size": meta.need_number("expert_feed_forward_length")}


def deepseek_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of DeepSeek models. Older files have head sizes under keys that newer files use for cache
    sizes."""
    gating = meta.get("expert_gating_func", SIGMOID)
    if gating != SIGMOID or not meta.layers_with("exp_probs_b.bias"):
        raise meta.refusal("expert_gating_func", "only DeepSeek-V3's routing, by a sigmoid and a bias "
                                                 "(exp_probs_b.bias), is supported")
    is_older = meta.get("attention.key_length_mla") is None
    key_length, value_length = (meta.need(f"attention.{part}_length" + ("" if is_older else "_mla"))
                                for part in ("key", "value"))
    meta.get("attention.key_length"), meta.get("attention.value_length"), meta.get("attention.head_count_kv")
    rope_dim = meta.need("rope.dimension_count")
    rope = read_rope(meta, rope_dim)
    sharpening = meta.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_scaling"] is not None and sharpening is not None:  # a tenth of the two keys, which are equal
        scale = round(10 * sharpening, 6)
        rope["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale}
    heads = meta.need_number("attention.head_count")
    return rope | _norms(meta) | {
        "hidden_act": "silu", "num_attention_heads": heads, "num_key_value_heads": heads,
        "kv_lora_rank": meta.need("attention.kv_lora_rank"), "q_lora_rank": meta.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim, "qk_nope_head_dim": key_length - rope_dim, "v_head_dim": value_length,
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0), "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid", **_sigmoid_experts(meta),
    }


def _sigmoid_experts(meta: Metadata) -> dict[str, Any]:
    return {"n_routed_experts": meta.need("expert_count"), "num_experts_per_tok": meta.need("expert_used_count"),
            "n_shared_experts": meta.get("expert_shared_count", 0), "n_group": meta.get("expert_group_count", 1),
            "topk_group": meta.get("expert_group_used_count", 1),
            "moe_intermediate_size": meta.need_number("expert_feed_forward_length"),
            "norm_topk_prob": meta.get("expert_weights_norm", False),
            "routed_scaling_factor": meta.get("expert_weights_scale", 1.0)}


def deepseek_indexed_config(meta: Metadata) -> dict[str, Any]:
    key = "attention.indexer.types"
    types = None if meta.get(key) is None else meta.by_layer(key)[: meta.num_layers]
    kinds = None if types is None else ["full" if is_full else "shared" for is_full in types]
    return deepseek_config(meta) | {
        "index_n_heads": meta.need("attention.indexer.head_count"), "indexer_types": kinds,
        "index_head_dim": meta.need("attention.indexer.key_length"),
        "index_topk": meta.need("attention.indexer.top_k")}


def nemotron_h_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of Nemotron-H. The kind of each layer is found from the names of its tensors."""
    letters = {layer: letter for letter, tensor in (("M", "ssm_in"), ("*", "attn_q"), ("-", "ffn_up"),
                                                    ("E", "ffn_gate_inp"))
               for layer in meta.layers_with(f"{tensor}.weight")}
    missing = [layer for layer in range(meta.num_layers) if layer not in letters]
    if missing:
        raise meta.refusal("block_count", f"layer {missing[0]} has none of the tensors ssm_in, attn_q, ffn_up and "
                                          "ffn_gate_inp, which tell its kind",
                           "Convert the model or fetch the file again.")
    for key in ("feed_forward_length", "rope.dimension_count"):
        meta.get(key)  # said by the tensors; nothing rotates
    dense = meta.layers_with("ffn_up.weight")
    heads, inner = meta.need("ssm.time_step_rank"), meta.need("ssm.inner_size")
    eps = meta.get("attention.layer_norm_epsilon")
    config = {
        "hybrid_override_pattern": "".join(letters[layer] for layer in range(meta.num_layers)),
        "num_attention_heads": meta.need_number("attention.head_count"), "hidden_act": None,
        "num_key_value_heads": max(meta.by_layer("attention.head_count_kv")),
        "head_dim": meta.need("attention.key_length"),
        "layer_norm_epsilon": meta.get("attention.layer_norm_rms_epsilon", eps),
        "intermediate_size": meta.header.tensors[f"blk.{dense[0]}.ffn_up.weight"].shape[0] if dense else None,
        "mamba_num_heads": heads, "mamba_head_dim": inner // heads, "n_groups": meta.need("ssm.group_count"),
        "ssm_state_size": meta.need("ssm.state_size"), "conv_kernel": meta.need("ssm.conv_kernel"),
        "use_conv_bias": bool(meta.layers_with("ssm_conv1d.bias")),
    }
    meta.must_equal("attention.value_length", config["head_dim"], f" where the head size is {config['head_dim']}")
    if not meta.get("expert_count", 0):
        return config
    return config | _sigmoid_experts(meta) | {
        "moe_shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
        "moe_latent_size": meta.get("moe_latent_size")}


def qwen_hybrid_config(meta: Metadata) -> dict[str, Any]:
    """Return the config of Qwen3-Next and Qwen3.5: gated delta layers, and gated attention with a rope on a part of
    each head."""
    heads, delta = meta.need_number("attention.head_count"), DeltaHeads.read(meta)
    head_dim, turning = meta.need("attention.key_length"), meta.need("rope.dimension_count")
    count, interval = meta.num_layers, meta.get("full_attention_interval", 4)
    key = "attention.recurrent_layers"
    recurrent = meta.by_layer(key) if meta.get(key) else [(i + 1) % interval != 0 for i in range(count)]
    meta.get("rope.dimension_sections")  # for images: the positions of text are the same in all sections
    config = _heads(meta, heads, head_dim) | _norms(meta) | read_rope(meta, turning) | {
        "hidden_act": "silu", "partial_rotary_factor": turning / head_dim,
        "layer_types": [LINEAR if is_recurrent else FULL for is_recurrent in recurrent[:count]],
        "linear_num_key_heads": delta.keys, "linear_num_value_heads": delta.keys * delta.repeats,
        "linear_key_head_dim": delta.key_size, "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": meta.need("ssm.conv_kernel"),
    }
    if not meta.get("expert_count", 0):
        return config
    sparse = meta.layers_with("ffn_gate_inp.weight")
    return config | _experts(meta) | {
        "shared_expert_intermediate_size": meta.need("expert_shared_feed_forward_length"),
        "mlp_only_layers": [layer for layer in range(count) if layer not in sparse]}
