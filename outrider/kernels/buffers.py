"""Persistent tensors, whose sizes come from named axes instead of literal numbers, and copies from host to device."""

from __future__ import annotations

import math
import mmap
from array import array
from collections.abc import Sequence
from typing import cast

import torch

from outrider.core import Axis, Limits

DIRECT_BYTES = 1 << 19  # a smaller tensor shares its pages with others


def buffer(limits: Limits, *axes: Axis, dtype: torch.dtype, device: torch.device, fill: float = 0) -> torch.Tensor:
    return torch.full([limits.extent(axis) for axis in axes], fill, dtype=dtype, device=device)


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor that lives as long as its model. On the CPU the memory comes directly from the operating
    system, because torch's allocator may round a size up by an eighth (mimalloc, on aarch64) and touch whole huge pages
    at once: a model would take more memory than its weights, and take it before they are read."""
    if device.type != "cpu" or math.prod(shape) * dtype.itemsize < DIRECT_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return _mapped_zeros(shape, dtype)


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor of zeros. On the CPU its pages take memory only when they are first written; torch's allocator
    might touch all of them at once."""
    if device.type != "cpu" or math.prod(shape) * dtype.itemsize < DIRECT_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return _mapped_zeros(shape, dtype)


def _mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy a list into a new device tensor, without waiting for the device."""
    return send(_on_host(values, dtype), device)


def fill(target: torch.Tensor, values: Sequence[object]) -> None:
    """Copy a list into an existing device tensor, without waiting for the device."""
    source = _on_host(values, target.dtype)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def _on_host(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int64 and values and isinstance(values[0], int):
        # In a fraction of the time that long lists take otherwise.
        return torch.frombuffer(array("q", cast(Sequence[int], values)), dtype=dtype)
    return torch.tensor(values, dtype=dtype)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device, without waiting for the device."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device.type == "cpu" else tensor.to(device)  # on the CPU even to move nothing takes its time
