"""Persistent tensors, declared by named axes so that no buffer is ever sized by a number typed by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import torch

from outrider.core import Axis, Limits


def buffer(limits: Limits, *axes: Axis, dtype: torch.dtype, device: torch.device, fill: float = 0) -> torch.Tensor:
    return torch.full([limits.extent(axis) for axis in axes], fill, dtype=dtype, device=device)


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A list as a device tensor, without waiting for the device."""
    if dtype == torch.int64 and values and isinstance(values[0], int):
        # In a fraction of the time that long lists take otherwise.
        tensor = torch.frombuffer(array("q", cast(Sequence[int], values)), dtype=dtype)
    else:
        tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
