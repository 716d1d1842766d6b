"""Tensors of a GGUF file, dequantised or in the file's own bits. One tensor at a time is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from outrider.kernels.quantized import QuantizedRows
from outrider.models.sources.base import SourceError
from outrider.models.sources.gguf_header import Header, TensorEntry
from outrider.models.sources.gguf_tensors import KEPT_KINDS, ROPE_FACTORS, dequantised, hf_name, raw_bytes


def read_tensors(header: Header) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
    heads = header.metadata["llama.attention.head_count"]
    kv_heads = header.metadata.get("llama.attention.head_count_kv", heads)
    # Largest first: what the model has not been given yet is not in memory, so the largest costs nothing extra.
    for entry in sorted(header.tensors.values(), key=lambda e: -math.prod(e.shape)):
        if entry.name == ROPE_FACTORS:
            continue
        keeps_bits = entry.kind.name in KEPT_KINDS and len(entry.shape) == 2
        rows = _dequantised(header.path, entry) if not keeps_bits else torch.from_numpy(
            raw_bytes(header.path, entry)).view(entry.shape[0], -1)
        if entry.name.endswith(".attn_q.weight"):
            rows = _unpermute(rows, heads, header.path, entry)
        elif entry.name.endswith(".attn_k.weight"):
            rows = _unpermute(rows, kv_heads, header.path, entry)
        yield hf_name(entry.name, header.path), QuantizedRows(entry.kind.name, rows) if keeps_bits else rows


def _dequantised(path: Path, entry: TensorEntry) -> torch.Tensor:
    raw = raw_bytes(path, entry)
    match entry.kind.name:
        case "F32":
            return torch.from_numpy(raw.view(np.float32)).view(entry.shape)
        case "F16":
            return torch.from_numpy(raw.view(np.float16)).view(entry.shape)
        case "BF16":
            return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16).view(entry.shape)
        case _:
            rows = raw.reshape(*entry.shape[:-1], -1)
            return torch.from_numpy(dequantised(rows, entry)).view(entry.shape)


def _unpermute(weight: torch.Tensor, num_heads: int, path: Path, entry: TensorEntry) -> torch.Tensor:
    """[heads * dim, in], or bytes of rows: GGUF interleaves the two halves of a head for its rope; put the halves back
    in a row."""
    if len(entry.shape) != 2 or entry.shape[0] % (2 * num_heads):
        raise SourceError(f"{path}: tensor {entry.name!r} of shape {entry.shape} does not hold two halves for each of "
                          f"{num_heads} heads. Fetch the file again.")
    out, width = weight.shape
    return weight.view(num_heads, out // num_heads // 2, 2, width).transpose(1, 2).reshape(out, width)
