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
from outrider.models.sources.gguf_families import FAMILIES, ROPE_FACTORS, Family, Metadata
from outrider.models.sources.gguf_header import Header, read_header
from outrider.models.sources.gguf_tensors import KEPT_KINDS, KINDS, dequantised, raw_bytes

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight


@dataclass(frozen=True)
class GgufSource(ModelSource):
    header: Header

    @property
    def family(self) -> Family:
        return FAMILIES[self.header.metadata["general.architecture"]]

    def tensor_names(self) -> set[str]:
        return set(self._kinds)

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats import StoredFormat

        kind = self._kinds.get(f"{name}.weight")
        return StoredFormat(kind) if kind in KEPT_KINDS else None

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Kinds of all tensors, by name."""
        places = [(place.name, entry) for entry in self.header.tensors.values()
                  if (place := self.family.place(entry.name)) is not None]
        return {name.replace("{expert}", str(expert)): entry.kind.name for name, entry in places
                for expert in range(entry.shape[0] if "{expert}" in name else 1)}

    def read(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        from outrider.models.sources.gguf_weights import read_tensors

        return read_tensors(self.header, self.family)

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
    if architecture not in FAMILIES:
        raise SourceError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: "
                          f"{', '.join(FAMILIES)}. Use the model's safetensors folder instead.")
    if meta.get("split.count", 1) > 1:
        raise SourceError(f"{path} is one of {meta['split.count']} parts (split.count); merge them into one file first")
    family = FAMILIES[architecture]
    for entry in header.tensors.values():
        if entry.kind.name not in KINDS:
            raise SourceError(f"{path}: tensor {entry.name!r} is {entry.kind.name}, which is not supported; "
                              f"supported: {', '.join(KINDS)}")
        if entry.name != ROPE_FACTORS and family.place(entry.name) is None:
            raise SourceError(f"{path}: tensor {entry.name!r} does not belong to a model of the architecture "
                              f"{architecture!r} as Outrider knows it")


def build_config(header: Header) -> dict[str, Any]:
    meta, family = Metadata(header), FAMILIES[header.metadata["general.architecture"]]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{header.path}: tensor 'token_embd.weight' is missing; the file is damaged or incomplete")
    heads = meta.need_number("attention.head_count")
    head_dim = meta.get("attention.key_length", meta.need("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        meta.must_equal(key, head_dim, f" where the head size is {head_dim}")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": meta.need("embedding_length"),
        "intermediate_size": meta.get("feed_forward_length"),
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if meta.get("attention.head_count_kv") is None else meta.need_number(
            "attention.head_count_kv"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": meta.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta, head_dim),
        "max_position_embeddings": meta.need("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": _stored_dtype(header),
        **family.config(meta),
    }
    meta.refuse_unread()
    return config


def _stored_dtype(header: Header) -> str:
    """The dtype of most weights; quantised ones count as float32, which is what they are dequantised to."""
    sizes: dict[str, int] = {}
    for entry in header.tensors.values():
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(entry.kind.name, "float32")
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope_scaling(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    path, kind, linear = meta.header.path, meta.get("rope.scaling.type", "none"), meta.get("rope.scale_linear")
    factor, original = meta.get("rope.scaling.factor", 1.0), meta.get("rope.scaling.original_context_length")
    if linear is not None and kind == "none":
        kind, factor = "linear", linear
    if ROPE_FACTORS in meta.header.tensors:
        if kind != "none":
            raise SourceError(f"{path}: rope scaling {kind!r} together with {ROPE_FACTORS} is not supported")
        return _llama3_scaling(meta.header, head_dim, float(meta.get("rope.freq_base", 10000.0)))
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": float(factor)} if factor != 1.0 else None
        case "yarn":
            if original is None:
                raise SourceError(f"{path}: yarn rope scaling needs {meta.prefix}rope.scaling.original_context_length")
            return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        case _:
            raise SourceError(f"{path}: {meta.prefix}rope.scaling.type = {kind!r} is not supported; supported: linear, "
                              "yarn")


def _llama3_scaling(header: Header, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling is stored as its result, a factor per frequency; find the parameters that give it."""
    entry = header.tensors[ROPE_FACTORS]
    stored = dequantised(raw_bytes(header.path, entry), entry.kind).reshape(entry.shape).astype(np.float64)
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
