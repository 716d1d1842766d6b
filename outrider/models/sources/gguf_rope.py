"""Convert the ropes of GGUF files to the keys of Hugging Face configs. Some files store a divisor for each frequency
instead of the rope's parameters, which are then computed from the divisors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outrider.core.fields import shown
from outrider.models.sources.gguf_header import Header
from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.gguf_tensors import dequantised, raw_bytes
from outrider.models.sources.model_source import SourceError

ROPE_FACTORS = "rope_freqs.weight"  # not a weight: divisors of the rope's frequencies
UNTURNED = 1e20  # divisors above it make a pair of dimensions stand still
YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor",
             "attn_factor": "attention_factor"}


def read_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the rope's config keys, for a model with one rope. `head_dim`: the number of a head's dimensions that
    rotate."""
    return {"rope_theta": meta.get("rope.freq_base", 10000.0), "rope_scaling": rope_scaling(meta, head_dim)}


def rope_scaling(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    path, kind, linear = meta.header.path, meta.get("rope.scaling.type", "none"), meta.get("rope.scale_linear")
    factor, original = meta.get("rope.scaling.factor", 1.0), meta.get("rope.scaling.original_context_length")
    if linear is not None and kind == "none":
        kind, factor = "linear", linear
    if ROPE_FACTORS in meta.header.tensors:
        if kind != "none":
            raise SourceError(f"{path}: rope scaling {shown(kind)} together with {ROPE_FACTORS} is not supported. Use "
                              "the model's safetensors folder instead")
        return _llama3_scaling(meta.header, head_dim, float(meta.get("rope.freq_base", 10000.0)))
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": float(factor)} if factor != 1.0 else None
        case "yarn":
            if original is None:
                raise SourceError(f"{path}: yarn rope scaling needs {meta.prefix}rope.scaling.original_context_length, "
                                  "which is missing. Convert the model again")
            meta.must_equal("rope.scaling.yarn_ext_factor", 1.0, "")
            found = {theirs: meta.get(f"rope.scaling.{key}") for key, theirs in YARN_KEYS.items()}
            return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original,
                    **{key: float(value) for key, value in found.items() if value is not None}}
        case _:
            raise SourceError(f"{path}: {meta.prefix}rope.scaling.type = {shown(kind)} is not supported; supported: "
                              "linear, yarn. Use the model's safetensors folder instead")


def turning_share(header: Header, head_dim: int) -> float:
    """Return the share of a head's dimensions that rotate. Files give the other dimensions divisors so large that they
    do not rotate."""
    if ROPE_FACTORS not in header.tensors:
        return 1.0
    stored = _factors(header)
    turning = int((stored < UNTURNED).sum())
    if stored.shape != (head_dim // 2,) or not turning or not np.allclose(stored[:turning], 1):
        raise SourceError(f"{header.path}: the rope factors in {ROPE_FACTORS} do not fit a model in which only "
                          f"a part of the {head_dim} dimensions of a head is rotated. Use the model's safetensors "
                          "folder instead")
    return 2 * turning / head_dim


def _factors(header: Header) -> np.ndarray:
    entry = header.tensors[ROPE_FACTORS]
    return dequantised(raw_bytes(header, entry), entry.kind).reshape(entry.shape).astype(np.float64)


def _llama3_scaling(header: Header, head_dim: int, theta: float) -> dict[str, Any]:
    """Find the parameters of Llama 3.1's scaling from the stored factor of each frequency."""
    stored = _factors(header)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = ((original / wavelength - low) / (high - low)).clip(0, 1)  # 1: frequency kept, 0: divided by factor
    expected = 1 / ((1 - share) / factor + share)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise SourceError(f"{header.path}: the rope factors in {ROPE_FACTORS} are not those of Llama 3.1 scaling; no "
                          "other kind is supported from GGUF. Use the model's safetensors folder instead")
    return {"rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": original}
