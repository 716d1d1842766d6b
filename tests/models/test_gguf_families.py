"""GGUF files of every family that is read, against transformers: names and sizes as llama.cpp's converter writes them.

The gguf library names the tensors, and transformers' model gets the numbers that the file's bits stand for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from outrider.formats.gguf_experts import GgufExperts
from outrider.kernels import native
from outrider.layers.base import find_modules
from outrider.layers.moe import Experts
from outrider.models.loader import load_model
from outrider.models.sources import gguf_source
from tests.models.oracle import all_logits, hf_model, make_folder, tokens_of

SLIDING, FULL = "sliding_attention", "full_attention"
Q8_0 = gguf.GGMLQuantizationType.Q8_0


class Written(NamedTuple):
    """How a family is converted, beyond what all share."""

    family: str  # of tests.models.oracle
    arch: gguf.MODEL_ARCH
    changes: dict[str, Any] = {}
    add: Callable[[gguf.GGUFWriter, Any], None] = lambda writer, config: None
    norms_add_one: bool = False


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


GEMMA3 = {"num_hidden_layers": 7, "layer_types": [SLIDING] * 5 + [FULL, SLIDING], "query_pre_attn_scalar": 32,
          "head_dim": 32}  # fmt: skip
FAMILIES = {
    "llama": Written("llama", gguf.MODEL_ARCH.LLAMA),
    "llama tied": Written("llama_tied", gguf.MODEL_ARCH.LLAMA),
    "qwen2": Written("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": Written("qwen3", gguf.MODEL_ARCH.QWEN3),
    "qwen3moe": Written("qwen3_moe", gguf.MODEL_ARCH.QWEN3MOE, {"moe_intermediate_size": 32}, add_experts),
    "gemma3": Written("gemma3", gguf.MODEL_ARCH.GEMMA3, GEMMA3,
                      lambda writer, config: writer.add_sliding_window(config.sliding_window), norms_add_one=True),
}  # fmt: skip


def rounded(model: Any) -> None:
    """Give the model the numbers that its matrices stand for when they are stored in 8 bits."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "gate.weight" not in name:
            raw = quantize(weight.detach().numpy().reshape(-1, weight.shape[-1]), Q8_0)
            weight.data = torch.from_numpy(dequantize(raw, Q8_0)).view(weight.shape)


def converted(name: str, value: np.ndarray, config: Any, written: Written) -> np.ndarray:
    if written.norms_add_one and "norm" in name:
        return value + 1
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    part = next((count for end, count in heads.items() if name.endswith(end)), None)
    if written.arch != gguf.MODEL_ARCH.LLAMA or part is None:
        return value
    return value.reshape(part, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)


def write(path: Path, model: Any, written: Written) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[written.arch])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    for add, value in (
        (writer.add_block_count, config.num_hidden_layers), (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads), (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_key_length, head_dim), (writer.add_value_length, head_dim),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_rope_freq_base, rope.get(FULL, rope)["rope_theta"]), (writer.add_eos_token_id, 2),
    ):  # fmt: skip
        add(value)
    written.add(writer, config)
    names = gguf.get_tensor_name_map(written.arch, config.num_hidden_layers)
    for name, weight in in_converters_names(model).items():
        ours = names.get_name(name, (".weight", ".bias"))
        value = converted(name, weight.numpy(), config, written)
        raw = quantize(value, Q8_0) if value.ndim > 1 and "gate_inp" not in str(ours) else value
        assert ours is not None, name
        writer.add_tensor(ours, np.ascontiguousarray(raw), raw_dtype=Q8_0 if raw is not value else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_converters_names(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors as a converter sees them: experts of a projection in one tensor."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            tensors[f"{base}gate_proj.weight"], tensors[f"{base}up_proj.weight"] = weight.chunk(2, 1)
        elif re.search(r"experts\.down_proj$", name):
            tensors[f"{name}.weight"] = weight
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = weight
    return {name: weight.float().contiguous() for name, weight in tensors.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_the_family_gives_the_logits_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)
    written = FAMILIES[name]
    model = hf_model(make_folder(written.family, tmp_path / "hf", **written.changes))
    rounded(model)
    write(tmp_path / "m.gguf", model, written)
    source, tokens = gguf_source(tmp_path / "m.gguf"), tokens_of(1, 40)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    for keep in (True, False):
        ours = load_model(source, dtype=torch.float32, device="cpu", keep_quantized=keep)
        torch.testing.assert_close(all_logits(ours, tokens), expected, rtol=1e-3, atol=2e-3)
        assert all(isinstance(experts.format, GgufExperts) == keep for experts in find_modules([ours], Experts))
