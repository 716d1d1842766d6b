"""fp8 weights with one scale for every block of 128 x 128 numbers, as plain numbers.

A checkpoint holds `x.weight` in fp8 and `x.weight_scale_inv`, by which a block is multiplied.
"""

from __future__ import annotations

import torch

from outrider.models.sources.base import WeightError

BLOCK = 128
SCALES = "_scale_inv"


def dequantize_blocks(name: str, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight [outputs, inputs] in float32. The last block of either axis may be cut short."""
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if tuple(scales.shape) != blocks:
        raise WeightError(f"tensor {name}{SCALES} has shape {list(scales.shape)}, "
                          f"blocks of {BLOCK} x {BLOCK} need {list(blocks)}")
    wide = scales.float().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float().mul_(wide.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]])
