"""Computes the checksums of a loaded model's weights: each tensor in the checkpoint's order, copied to the host a piece
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from outrider.core.weights_checksum import TensorChecksum, WeightsChecksum, sha256_of
from outrider.formats import WeightSlot

PIECE = 1 << 26  # bytes that are copied to the host together


def checksum_of(slots: Mapping[str, WeightSlot]) -> WeightsChecksum:
    """Compute the checksums of all weights. The caller has restored the element order of the files before."""
    return WeightsChecksum({name: _tensor_checksum(slot) for name, slot in slots.items()})


def _tensor_checksum(slot: WeightSlot) -> TensorChecksum:
    tensor = slot.in_file_order()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorChecksum(sha256_of(_pieces(tensor)), dtype, tuple(tensor.shape), slot.kind)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the host's memory, a piece at a time."""
    flat = tensor.contiguous().reshape(-1)
    for piece in flat.split(max(1, PIECE // flat.element_size())) if flat.numel() else ():
        yield memoryview(piece.cpu().view(torch.uint8).numpy())
