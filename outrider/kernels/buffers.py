"""Persistent tensors, declared by named axes so that no buffer is ever sized by a number typed by hand."""

from __future__ import annotations

import torch

from outrider.core import Axis, Limits


def buffer(limits: Limits, *axes: Axis, dtype: torch.dtype, device: torch.device, fill: float = 0) -> torch.Tensor:
    return torch.full([limits.extent(axis) for axis in axes], fill, dtype=dtype, device=device)
