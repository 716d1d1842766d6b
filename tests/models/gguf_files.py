"""Tiny GGUF files in the form that llama.cpp's converter writes, from checkpoints that transformers saved.

Matrices are stored in 8 bits, and the checkpoint's own numbers are rounded to what these bits stand for. The form of
every family was compared with the converter's own output: keys, names, shapes and numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.models.gemma4 import save_target
from tests.models.oracle import make_folder

ARCH = gguf.MODEL_ARCH
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# Parts of the names of matrices that stay numbers.
NUMBERS = ("mlp.gate.", "mixer.gate.", "feed_forward.gate.", "router.", "conv1d", "shared_expert_gate.",
           "weights_proj", "mixer.norm.")
Config = dict[str, Any]
Named = Iterator[tuple[str, np.ndarray]]


class Written(NamedTuple):
    """How a family is converted."""

    family: str  # of tests.models.oracle, or "gemma4 " and the name of a target
    arch: gguf.MODEL_ARCH
    changes: Config = {}
    keys: Callable[[gguf.GGUFWriter, Config], None] = lambda writer, config: None
    convert: Callable[[str, np.ndarray, Config], Named] = lambda name, value, config: iter([(name, value)])
    name: str | None = None  # of the architecture in the file, if the gguf library does not know it

    def checkpoint(self, path: Path) -> Path:
        """A checkpoint whose matrices are what 8 bits stand for."""
        if self.family.startswith("gemma4"):
            save_target(self.family.split()[1], path)
        else:
            make_folder(self.family, path, **self.changes)
        config, tensors = read(path)
        save_file({name: rounded(name, weight, config) for name, weight in tensors.items()}, path / "model.safetensors",
                  {"format": "pt"})
        return path


def read(folder: Path) -> tuple[Config, dict[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    return config, load_file(folder / "model.safetensors")


def is_rounded(name: str, weight: Any) -> bool:
    return weight.ndim > 1 and weight.shape[-1] % 32 == 0 and not any(part in name for part in NUMBERS)


def rounded(name: str, weight: torch.Tensor, config: Config) -> torch.Tensor:
    if name.endswith("kv_b_proj.weight"):  # keys are stored transposed
        keys, values = split_latents(weight.numpy(), config)
        parts = (in_eight_bits(keys).swapaxes(1, 2), in_eight_bits(values))
        return torch.from_numpy(np.concatenate(parts, axis=1)).flatten(0, 1)
    return torch.from_numpy(in_eight_bits(weight.numpy())) if is_rounded(name, weight) else weight


def in_eight_bits(value: np.ndarray) -> np.ndarray:
    return dequantize(quantize(np.ascontiguousarray(value), Q8_0), Q8_0).reshape(value.shape)


def write(path: Path, folder: Path, written: Written) -> Path:
    config, tensors = read(folder)
    writer = gguf.GGUFWriter(path, written.name or gguf.MODEL_ARCH_NAMES[written.arch])
    common_keys(writer, config)
    written.keys(writer, config)
    names = gguf.get_tensor_name_map(written.arch, config["num_hidden_layers"])
    for name, value in stacked(tensors):
        for theirs, own in written.convert(name, value, config):
            ours = theirs if theirs.startswith(("blk.", "rope_")) else names.get_name(theirs, (".weight", ".bias"))
            assert ours is not None, theirs
            raw = quantize(own, Q8_0) if is_rounded(name, own) else own
            writer.add_tensor(ours, np.ascontiguousarray(raw), raw_dtype=Q8_0 if raw is not own else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors: dict[str, torch.Tensor]) -> Named:
    """Tensors as a converter writes them: experts of a projection in one tensor."""
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found is None:
            yield name.replace("correction_bias", "correction.bias"), weight.float().numpy()
            continue
        held = experts.setdefault(f"{found[1]}.{found[3]}", [])
        assert len(held) == int(found[2]), "experts come in order"
        held.append(weight.float().numpy())
    for name, values in experts.items():
        yield name, np.stack(values)


def common_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get(FULL, ropes)
    held = {
        writer.add_block_count: config["num_hidden_layers"], writer.add_embedding_length: config["hidden_size"],
        writer.add_context_length: config["max_position_embeddings"], writer.add_eos_token_id: 2,
        writer.add_feed_forward_length: config.get("intermediate_size"),
        writer.add_head_count: config["num_attention_heads"], writer.add_head_count_kv: config["num_key_value_heads"],
        writer.add_key_length: config.get("head_dim"), writer.add_value_length: config.get("head_dim"),
        writer.add_layer_norm_rms_eps: config.get("rms_norm_eps"),
        writer.add_layer_norm_eps: config.get("layer_norm_epsilon"),
        writer.add_rope_freq_base: rope.get("rope_theta"),
        writer.add_rope_freq_base_swa: ropes.get(SLIDING, {}).get("rope_theta"),
        writer.add_expert_count: config.get("num_experts") or config.get("num_local_experts")
        or config.get("n_routed_experts"),
        writer.add_expert_used_count: config.get("num_experts_per_tok") or config.get("top_k_experts"),
        writer.add_expert_group_count: config.get("n_group"),
        writer.add_expert_group_used_count: config.get("topk_group"),
        writer.add_expert_feed_forward_length: config.get("moe_intermediate_size"),
    }
    for add, value in held.items():
        if value is not None:
            add(value)


# Llama, Gemma 3


def llama_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def convert_llama(name: str, value: np.ndarray, config: Config) -> Named:
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    part = next((count for end, count in heads.items() if name.endswith(end)), None)
    yield name, value if part is None else value.reshape(part, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(
        value.shape)


def convert_gemma3(name: str, value: np.ndarray, config: Config) -> Named:
    yield name, value + 1 if "norm" in name else value


# LFM2, models that see images


def lfm2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == FULL else 0 for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "moe_intermediate_size" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif config["block_auto_adjust_ff_dim"]:
        width = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        writer.add_feed_forward_length(-(-width // config["block_multiple_of"]) * config["block_multiple_of"])


def convert_lfm2(name: str, value: np.ndarray, config: Config) -> Named:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    parts = {"w1": "gate", "w3": "up", "w2": "down"}
    if ".experts." in name:
        yield f"{layer}.ffn_{parts[name.split('.')[-2]]}_exps.weight", value
    elif name.endswith("expert_bias"):
        yield f"{layer}.exp_probs_b.bias", value
    else:
        yield name, value.squeeze(1) if name.endswith("conv.conv.weight") else value


def sections_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_sections([8, 4, 4, 0])
    if writer.arch != "qwen2vl":
        writer.add_num_deepstack_layers(3)


# Gemma 4


def gemma4_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    slides = [kind == SLIDING for kind in config["layer_types"]]
    full = next(iter(config.get("per_layer_config", {}).values()), {})
    full_dim = config.get("global_head_dim") or full["head_dim"]
    full_heads = config.get("num_global_key_value_heads") or full.get("num_key_value_heads")
    kv_heads, shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(slides)
    for add, size in ((writer.add_key_length, full_dim), (writer.add_value_length, full_dim),
                      (writer.add_rope_dimension_count, full_dim), (writer.add_key_length_swa, config["head_dim"]),
                      (writer.add_value_length_swa, config["head_dim"]),
                      (writer.add_rope_dimension_count_swa, config["head_dim"])):
        add(size)
    if full_heads is not None:
        writer.add_head_count_kv([kv_heads if own else full_heads for own in slides])
    if config.get("use_double_wide_mlp"):
        width = config["intermediate_size"]
        writer.add_feed_forward_length([width * (1 + (i >= len(slides) - shared)) for i in range(len(slides))])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turning = int(full_dim * config["rope_parameters"][FULL]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (full_dim // 2 - turning), np.float32))


def convert_gemma4(name: str, value: np.ndarray, config: Config) -> Named:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    renamed = next((f"{layer}.{theirs}" for end, theirs in scales.items() if name.endswith(end)), None)
    yield renamed or (f"{name}.weight" if not name.endswith("weight") else name), value


# DeepSeek


def latent_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def indexed_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    latent_keys(writer, config)
    writer.add_uint32(f"{writer.arch}.attention.indexer.head_count", config["index_n_heads"])
    writer.add_uint32(f"{writer.arch}.attention.indexer.key_length", config["index_head_dim"])
    writer.add_uint32(f"{writer.arch}.attention.indexer.top_k", config["index_topk"])
    if config.get("indexer_types"):
        writer.add_array(f"{writer.arch}.attention.indexer.types", [t == "full" for t in config["indexer_types"]])


def split_latents(value: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Keys [heads, latent, nope] and values [heads, value, latent]."""
    by_head = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
    keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values)


def convert_latent(name: str, value: np.ndarray, config: Config) -> Named:
    if name.endswith("kv_b_proj.weight"):
        keys, values = split_latents(value, config)
        yield name.replace("kv_b", "k_b"), keys
        yield name.replace("kv_b", "v_b"), values
    else:
        yield name, value


# NemotronH


def nemotron_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in kinds])
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == FULL else 0 for kind in kinds])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])


def convert_mamba(name: str, value: np.ndarray, config: Config) -> Named:
    match name.rpartition(".mixer.")[2]:
        case "A_log":
            value = -np.exp(value).reshape(-1, 1)
        case "D":
            value = value.reshape(-1, 1)
        case "conv1d.weight":
            value = value.squeeze(1)
        case "norm.weight":
            value = value.reshape(config["n_groups"], -1)
        case "dt_bias":
            name = name.replace("dt_bias", "dt.bias")
        case "experts.up_proj.weight" | "experts.down_proj.weight":
            name = name.replace("backbone", "model").replace("mixer", "mlp")
    yield from convert_llama(name, value, config)  # q and k, although nothing rotates them


# Qwen3-Next, Qwen3.5


def delta_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind == LINEAR for kind in config["layer_types"]])
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def convert_delta(name: str, value: np.ndarray, config: Config) -> Named:
    match name.rpartition(".linear_attn.")[2]:
        case "A_log":
            yield name, -np.exp(value)
        case "dt_bias":
            yield name.replace("dt_bias", "dt_proj.bias"), value
        case "conv1d.weight":
            yield name, value.squeeze(1)
        case "in_proj_qkvz.weight":
            heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
            width = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
            by_head = value.reshape(heads, -1, value.shape[1])
            parts = np.split(by_head, np.cumsum([key_dim, key_dim, width]), axis=1)
            q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
            layer = f"blk.{name.split('.')[2]}"
            yield f"{layer}.attn_qkv.weight", np.concatenate((q, k, v))
            yield f"{layer}.attn_gate.weight", z
        case _:
            yield name, value + 1 if name.endswith("norm.weight") and "linear_attn" not in name else value


def convert_tiled_delta(name: str, value: np.ndarray, config: Config) -> Named:
    """The first value head of each key head, then the second of each."""
    part = name.rpartition(".linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        value = np.concatenate((value[:before], tiled(value[before:], config)))
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        value = tiled(value, config)
    elif part == "out_proj.weight":
        value = np.ascontiguousarray(tiled(value.T, config).T)
    yield from convert_delta(name, value, config)


def tiled(value: np.ndarray, config: Config) -> np.ndarray:
    heads = config["linear_num_key_heads"]
    repeats = config["linear_num_value_heads"] // heads
    return value.reshape(heads, repeats, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


_GEMMA3 = {"num_hidden_layers": 7, "layer_types": [SLIDING] * 5 + [FULL, SLIDING], "query_pre_attn_scalar": 32,
           "head_dim": 32}
_LATENT = {"q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32}
_YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}}
_SPARSE = {"hybrid_override_pattern": None, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
_DELTA = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
_DELTA_MOE = _DELTA | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []}
FAMILIES = {
    "llama": Written("llama", ARCH.LLAMA, {}, llama_keys, convert_llama),
    "llama tied": Written("llama_tied", ARCH.LLAMA, {}, llama_keys, convert_llama),
    "qwen2": Written("qwen2", ARCH.QWEN2),
    "qwen3": Written("qwen3", ARCH.QWEN3),
    "qwen3moe": Written("qwen3_moe", ARCH.QWEN3MOE, {"moe_intermediate_size": 32}),
    "qwen2vl": Written("qwen2", ARCH.QWEN2VL, {}, sections_keys),
    "qwen3vl": Written("qwen3", ARCH.QWEN3VL, {}, sections_keys),
    "qwen3vlmoe": Written("qwen3_moe", ARCH.QWEN3VLMOE, {"moe_intermediate_size": 32}, sections_keys),
    "seed_oss": Written("seed_oss", ARCH.SEED_OSS),
    "olmo2": Written("olmo2", ARCH.OLMO2),
    "lfm2": Written("lfm2", ARCH.LFM2, {"block_multiple_of": 32}, lfm2_keys, convert_lfm2),
    "lfm2 as it is": Written("lfm2", ARCH.LFM2, {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
                             lfm2_keys, convert_lfm2),
    "lfm2moe": Written("lfm2_moe", ARCH.LFM2MOE, {"moe_intermediate_size": 32, "tie_word_embeddings": True},
                       lfm2_keys, convert_lfm2),
    "gemma3": Written("gemma3", ARCH.GEMMA3, _GEMMA3,
                      lambda writer, config: writer.add_sliding_window(config["sliding_window"]), convert_gemma3),
    "gemma4": Written("gemma4 dense", ARCH.GEMMA4, {}, gemma4_keys, convert_gemma4),
    "gemma4 with shared caches": Written("gemma4 shared", ARCH.GEMMA4, {}, gemma4_keys, convert_gemma4),
    "gemma4 with experts": Written("gemma4 moe", ARCH.GEMMA4, {}, gemma4_keys, convert_gemma4),
    "deepseek2": Written("deepseek_v3", ARCH.DEEPSEEK2, _LATENT | _YARN, latent_keys, convert_latent),
    "deepseek2 with direct queries": Written("deepseek_v3_direct", ARCH.DEEPSEEK2,
                                             _LATENT | {"q_lora_rank": None, "attention_bias": False}, latent_keys,
                                             convert_latent),
    "deepseek32": Written("deepseek_v32", ARCH.GLM_DSA, _LATENT | _YARN, indexed_keys, convert_latent, "deepseek32"),
    "glm-dsa": Written("glm_moe_dsa", ARCH.GLM_DSA, _LATENT, indexed_keys, convert_latent),
    "nemotron_h": Written("nemotron_h", ARCH.NEMOTRON_H, {"hybrid_override_pattern": None, "layers_block_type": [
        LINEAR, "mlp", LINEAR, FULL, "mlp"]}, nemotron_keys, convert_mamba),
    "nemotron_h_moe": Written("nemotron_h", ARCH.NEMOTRON_H_MOE, _SPARSE | {"layers_block_type": [
        LINEAR, "moe", LINEAR, FULL, "moe"], "moe_latent_size": 32, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": False, "n_groups": 8}, nemotron_keys, convert_mamba),
    "qwen3next": Written("qwen3_next", ARCH.QWEN3NEXT, _DELTA_MOE, delta_keys, convert_delta),
    "qwen35": Written("qwen3_5", ARCH.QWEN35, _DELTA, delta_keys, convert_tiled_delta),
    "qwen35moe": Written("qwen3_5_moe", ARCH.QWEN35MOE, _DELTA_MOE, delta_keys, convert_tiled_delta),
}
