"""WeightSlot: where a tensor of a checkpoint goes. The loader fills slots; formats and layers hand them out.

A slot is a view of the tensor that uses it, so several tensors of a checkpoint can lie in one weight (q, k and v; gate
and up). A rank of several would cut its part of the checkpoint's tensor in `WeightSlot.store`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class StoredWeight(Protocol):
    """A weight [outputs, inputs] in the bits of its file. Sources yield it in place of a tensor."""

    kind: str  # name under which `formats.registry` finds the format that can keep it

    @property
    def shape(self) -> tuple[int, ...]: ...

    def is_finite(self) -> bool: ...

    def dequantize(self) -> torch.Tensor:
        """The numbers that the bits stand for."""

    def dequantize_into(self, target: torch.Tensor) -> None:
        """Write the dequantised numbers into an existing tensor, with little memory beside it."""


@dataclass(frozen=True)
class HeadLayout:
    """The order of output features in a checkpoint's tensor that holds several parts head by head. A layer has all of
    one part, then all of the next."""

    num_heads: int
    sizes: tuple[int, ...]  # output features of each part in one head, in the checkpoint's order
    is_reversed: bool = False  # the layer has the last part first

    def sort(self, tensor: torch.Tensor) -> torch.Tensor:
        """The checkpoint's tensor in the layer's order."""
        parts = tensor.unflatten(0, (self.num_heads, -1)).split(self.sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in (parts[::-1] if self.is_reversed else parts)])


@dataclass(frozen=True)
class WeightSlot:
    """The view that a checkpoint's tensor fills."""

    target: torch.Tensor
    layout: HeadLayout | None = None  # None if the tensor has the target's order
    keeper: Callable[[StoredWeight], bool] | None = None  # the format's offer to keep the file's bits

    def __post_init__(self) -> None:
        layout = self.layout
        assert layout is None or self.target.shape[0] == layout.num_heads * sum(layout.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return tuple(self.target.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the target; 0 if the layer keeps the file's bits, which `LinearFormat.prepare` counts."""
        return 0 if self.target.is_meta else self.target.numel() * self.target.element_size()

    def store(self, tensor: torch.Tensor) -> None:
        self.target.copy_(tensor if self.layout is None else self.layout.sort(tensor))

    def keep(self, stored: StoredWeight) -> bool:
        """Offer the file's bits to the layer's format. Returns False if it does not take them; then call `store`."""
        return self.keeper is not None and self.keeper(stored)
