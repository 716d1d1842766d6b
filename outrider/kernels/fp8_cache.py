"""Keys and values cached in fp8 (e4m3): the stored number is the model's number, divided by the scale of its head and
rounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


class HeadScales(NamedTuple):
    """The scales of one layer's keys and values: device tensors [kv heads] float32 each."""

    k: Tensor
    v: Tensor


class ScaleNumbers(NamedTuple):
    """The scales of one layer's keys and values as Python numbers: one key scale and one value scale for every kv
    head."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    def to_device(self, device: torch.device) -> HeadScales:
        return HeadScales(*(torch.tensor(own, dtype=torch.float32, device=device) for own in self))


def to_fp8(numbers: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Convert numbers to fp8. Numbers beyond fp8's range become its greatest number; NaN stays NaN."""
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    return (wide / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8)


def from_fp8(stored: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scale).to(dtype)
