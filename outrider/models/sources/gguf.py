"""A GGUF file as a model source: its metadata as a Hugging Face config, its tensors under HF names.

Unsupported settings are refused by their key or tensor name. The tokenizer's metadata is handed on unread. Torch is
imported only when weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from outrider.core.fields import Range, check_value
from outrider.models.sources.base import ModelSource, SourceError
from outrider.models.sources.gguf_header import Header, read_header
from outrider.models.sources.gguf_tensors import KEPT_KINDS, ROPE_FACTORS, dequantised, hf_name, raw_bytes

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

ARCHITECTURES = ("llama",)
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

# Keys under "llama." that are read below or do not change the arithmetic. All others are refused.
KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
    "expert_count", "expert_used_count",
}  # fmt: skip


@dataclass(frozen=True)
class GgufSource(ModelSource):
    header: Header

    def tensor_names(self) -> set[str]:
        return {hf_name(entry.name, self.path) for entry in self.header.tensors.values() if entry.name != ROPE_FACTORS}

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats import StoredFormat

        kind = self._kinds.get(f"{name}.weight")
        return StoredFormat(kind) if kind in KEPT_KINDS else None

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Kinds of all matrices, by name."""
        return {hf_name(entry.name, self.path): entry.kind.name for entry in self.header.tensors.values()
                if len(entry.shape) == 2 and entry.name != ROPE_FACTORS}  # fmt: skip

    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        from outrider.models.sources.gguf_weights import read_tensors

        return read_tensors(self.header)

    def tokenizer(self) -> dict[str, Any]:
        return self.header.metadata


def gguf_source(path: Path, name: str | None = None) -> ModelSource:
    header = read_header(path)
    _check_supported(header)
    config = build_config(header)
    return GgufSource(name or path.stem, path, config, _eos_token_ids(header, config["vocab_size"]), header)


def _check_supported(header: Header) -> None:
    path, meta = header.path, header.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise SourceError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: "
                          f"{', '.join(ARCHITECTURES)}. Use the model's safetensors folder instead.")
    if meta.get("split.count", 1) > 1:
        raise SourceError(f"{path} is one of {meta['split.count']} parts (split.count); merge them into one file first")
    for key, value in meta.items():
        if key.startswith("llama.") and key.removeprefix("llama.") not in KNOWN_KEYS:
            raise SourceError(f"{path}: {key} = {value!r} is not supported")
    if meta.get("llama.expert_count", 0):
        raise SourceError(f"{path}: llama.expert_count = {meta['llama.expert_count']} (mixture of experts) is not "
                          "supported from GGUF; use the model's safetensors folder")
    for entry in header.tensors.values():
        if entry.kind.name not in KINDS:
            raise SourceError(f"{path}: tensor {entry.name!r} is {entry.kind.name}, which is not supported; "
                              f"supported: {', '.join(KINDS)}")
        if entry.name != ROPE_FACTORS:
            hf_name(entry.name, path)


def build_config(header: Header) -> dict[str, Any]:
    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise SourceError(f"{header.path}: metadata llama.{key} is missing; the file is damaged or incomplete")
        return meta[f"llama.{key}"]

    meta = header.metadata
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{header.path}: tensor 'token_embd.weight' is missing; the file is damaged or incomplete")
    heads = need("attention.head_count")
    kv_heads = meta.get("llama.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise SourceError(f"{header.path}: llama.attention.head_count per layer is not supported")
    head_dim = meta.get("llama.attention.key_length", need("embedding_length") // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise SourceError(f"{header.path}: {key} = {meta[key]} is not supported where the head size is {head_dim}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, head_dim),
        "max_position_embeddings": need("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "dtype": _stored_dtype(header),
    }


def _stored_dtype(header: Header) -> str:
    """The dtype of most weights; quantised ones count as float32, which is what they are dequantised to."""
    sizes: dict[str, int] = {}
    for entry in header.tensors.values():
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(entry.kind.name, "float32")
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope_scaling(header: Header, head_dim: int) -> dict[str, Any] | None:
    meta, path = header.metadata, header.path
    kind = meta.get("llama.rope.scaling.type", "none")
    if "llama.rope.scale_linear" in meta and kind == "none":
        kind, meta = "linear", {**meta, "llama.rope.scaling.factor": meta["llama.rope.scale_linear"]}
    factor = float(meta.get("llama.rope.scaling.factor", 1.0))
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise SourceError(f"{path}: rope scaling {kind!r} together with {ROPE_FACTORS} is not supported")
        return _llama3_scaling(header, head_dim)
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        case "yarn":
            original = meta.get("llama.rope.scaling.original_context_length")
            if original is None:
                raise SourceError(f"{path}: yarn rope scaling needs llama.rope.scaling.original_context_length")
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        case _:
            raise SourceError(f"{path}: llama.rope.scaling.type = {kind!r} is not supported; supported: linear, yarn")


def _llama3_scaling(header: Header, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling is stored as its result, a factor per frequency; find the parameters that give it."""
    entry = header.tensors[ROPE_FACTORS]
    stored = dequantised(raw_bytes(header.path, entry), entry).reshape(entry.shape).astype(np.float64)
    theta = float(header.metadata.get("llama.rope.freq_base", 10000.0))
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = ((original / wavelength - low) / (high - low)).clip(0, 1)  # 1: frequency kept, 0: divided by factor
    expected = 1 / ((1 - share) / factor + share)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise SourceError(f"{header.path}: the rope factors in {ROPE_FACTORS} are not those of Llama 3.1 scaling; "
                          "no other kind is supported from GGUF")
    return {"rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}  # fmt: skip


def _eos_token_ids(header: Header, vocab_size: int) -> tuple[int, ...]:
    """End of text, of turn and of message: a chat model may end with any of them."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {key: header.metadata[key] for key in keys if key in header.metadata}
    for key, token in found.items():
        check_value(f"{header.path}: {key}", Annotated[int, Range(0, vocab_size - 1)], token)
    return tuple(dict.fromkeys(found.values()))
