"""WeightSlot: the place in a layer for one tensor of a checkpoint. The loader fills slots; formats and layers provide
them.

A slot is a view of the layer's tensor, so several tensors of a checkpoint can fill one weight (q, k and v; gate and
up). With several ranks a slot takes this rank's part of the checkpoint's tensor and knows the whole tensor's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from outrider.formats.upload import copy_weight

DUMMY_RANGE = 1e-3
Draw: TypeAlias = Callable[[torch.Tensor, torch.Generator], None]


def join_names(*names: str) -> str:
    """Join the names of nested modules to a tensor's name in a checkpoint. Empty names are left out."""
    return ".".join(filter(None, names))


class StoredWeight(Protocol):
    """Interface of a weight [outputs, inputs] that is still quantised as in its file. Sources yield it instead of a
    tensor, under the name that an unquantised tensor would have."""

    @property
    def kind(self) -> str:
        """The kind of encoding: see `StoredFormat`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def parts(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that a format keeps, by the last component of their names in the checkpoint."""

    def is_finite(self) -> bool: ...

    def dequantize(self) -> torch.Tensor:
        """Return the dequantised weight."""


class Recode(Protocol):
    """Interface that converts quantised weights of one `kind` to the encoding that a format stores, on a device."""

    @property
    def kind(self) -> str: ...

    def __call__(self, stored: StoredWeight, device: torch.device) -> StoredWeight: ...


@dataclass(frozen=True)
class HeadLayout:
    """The order of output features in a checkpoint's tensor that stores several parts (such as q and gate) head by
    head. A layer instead stores the first part of all heads, then the second part of all heads."""

    num_heads: int
    sizes: tuple[int, ...]  # output features of each part in one head, in the checkpoint's order
    is_reversed: bool = False  # the layer has the last part first

    def share(self, pieces: int) -> HeadLayout:
        """Return the layout of one of several equal parts of the heads."""
        if self.num_heads % pieces:
            raise ValueError(f"{self.num_heads} attention heads cannot be split evenly over {pieces} ranks: choose a "
                             f"tensor_parallel_size that divides {self.num_heads}")
        return replace(self, num_heads=self.num_heads // pieces)

    def sort(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the checkpoint's tensor to the layer's order."""
        parts = tensor.unflatten(0, (self.num_heads, -1)).split(self.sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in (parts[::-1] if self.is_reversed else parts)])

    def unsort(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder a tensor from the layer's order to the checkpoint's."""
        features = self.sort(torch.arange(tensor.shape[0], device=tensor.device))
        return torch.empty_like(tensor).index_copy_(0, features, tensor)


@dataclass(frozen=True)
class PairedHeads(HeadLayout):
    """The order of output features in heads whose rope rotates pairs of neighbouring features. A layer's rope rotates
    halves instead, so the layer stores the first features of all pairs, then the second ones. sizes: how many features
    of a head the rope rotates, and how many it does not."""

    def sort(self, tensor: torch.Tensor) -> torch.Tensor:
        turned, kept = tensor.unflatten(0, (self.num_heads, -1)).split(self.sizes, dim=1)
        halves = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat((halves, kept), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class TensorShard:
    """The part of a checkpoint's tensor that one rank holds: ranges along one axis, which are concatenated in the
    rank's tensor. A tensor that packs several matrices (gate and up) has a range for each segment."""

    shape: tuple[int, ...]  # shape of the checkpoint's tensor
    axis: int
    ranges: tuple[range, ...]

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [tensor.narrow(self.axis, held.start, len(held)) for held in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


def draw_dummy(target: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with random content for a model without a checkpoint: small numbers, or any bits in a tensor of
    integers."""
    if target.dtype.is_floating_point and target.dtype.itemsize > 1:
        target.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
    elif target.dtype.is_floating_point:  # torch draws no numbers of 8 bits
        target.copy_(torch.empty(target.shape, device=target.device).uniform_(-1, 1, generator=generator))
    else:
        limits = torch.iinfo(target.dtype)
        target.random_(limits.min, limits.max, generator=generator)


@dataclass(frozen=True)
class WeightSlot:
    """The part of a layer's tensor that one tensor of the checkpoint fills."""

    target: torch.Tensor
    layout: HeadLayout | None = None  # None if the tensor has the target's order
    shard: TensorShard | None = None  # None if the target holds the whole tensor
    kind: str | None = None  # the kind of stored weight whose bits it keeps; None for numbers, which are converted
    draw: Draw = draw_dummy  # fills a target with random content that is valid in its format
    quantize: Callable[[torch.Tensor], StoredWeight] | None = None  # makes the stored weight of a tensor of numbers
    numbers_shape: tuple[int, ...] = ()  # the shape that the tensor given to `quantize` must have
    recode: Recode | None = None  # makes the stored weight of the file's own one

    def __post_init__(self) -> None:
        layout = self.layout
        assert layout is None or self.target.shape[0] == layout.num_heads * sum(layout.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the checkpoint's tensor must have."""
        return tuple(self.target.shape) if self.shard is None else self.shard.shape

    @property
    def has_file_order(self) -> bool:
        """Whether the target holds the whole tensor with its elements in the checkpoint's order in memory."""
        strides = self.target.stride()
        return self.shard is None and self.layout is None and list(strides) == sorted(strides, reverse=True)

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.target.element_size()

    def unbind(self) -> list[WeightSlot]:
        """Split the slot along the first axis, for a checkpoint with one tensor for each index."""
        assert self.layout is None
        own = self.shard
        shard = None if own is None else TensorShard(own.shape[1:], own.axis - 1, own.ranges)
        return [replace(self, target=target, shard=shard, numbers_shape=self.numbers_shape[1:])
                for target in self.target.unbind()]

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the checkpoint's tensor, in the layer's order of features."""
        part = tensor if self.shard is None else self.shard.part(tensor)
        return part if self.layout is None else self.layout.sort(part)

    def in_file_order(self) -> torch.Tensor:
        """Return the target's content in the checkpoint's order of features."""
        assert self.shard is None
        return self.target if self.layout is None else self.layout.unsort(self.target)

    def fill(self, generator: torch.Generator) -> None:
        """Fill the target with random numbers. Each rank gets its part of the numbers that a single rank would draw."""
        if self.has_file_order:
            self.draw(self.target, generator)
        else:  # drawn in the checkpoint's order, whatever the order in memory: numbers are drawn in the latter
            whole = torch.empty(self.shape, dtype=self.target.dtype, device=self.target.device)
            self.draw(whole, generator)
            self.store(whole)

    def store(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part of the checkpoint's tensor into the target."""
        copy_weight(self.target, self.own_part(tensor))
