"""fp8 weights with one scale for every block of 128 x 128 numbers.

A checkpoint holds `x.weight` in fp8 and `x.weight_scale_inv`, by which a block is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.models.sources.base import WeightError

BLOCK = 128


@dataclass(frozen=True)
class BlockScaledWeight:
    """A weight [outputs, inputs]. The last block of either axis may be cut short. No format of the package keeps it;
    one that is registered for its kind would."""

    name: str
    weight: torch.Tensor
    scales: torch.Tensor
    kind: str = "fp8_blocks"

    def __post_init__(self) -> None:
        blocks = tuple(-(-size // BLOCK) for size in self.weight.shape)
        if tuple(self.scales.shape) != blocks:
            raise WeightError(f"tensor {self.name}.weight_scale_inv has shape {list(self.scales.shape)}, "
                              f"blocks of {BLOCK} x {BLOCK} need {list(blocks)}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def parts(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "weight_scale_inv": self.scales}

    def is_finite(self) -> bool:
        """Whether the scales are numbers; the loader looks at the weight itself."""
        return bool(self.scales.isfinite().all())

    def dequantize(self) -> torch.Tensor:
        wide = self.scales.float().repeat_interleave(BLOCK, 0)[: self.weight.shape[0]]
        return self.weight.float().mul_(wide.repeat_interleave(BLOCK, 1)[:, : self.weight.shape[1]])
