"""What one layer keeps, per token or per row: the declaration a model makes and everything about memory follows from.

A spec is a value: layers with equal specs may share a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FullSpec:
    """Keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class SlidingSpec(FullSpec):
    """Keys and values of the last `window` tokens: a query at p sees keys p - window + 1 to p."""

    window: int


@dataclass(frozen=True)
class RecurrentSpec:
    """A state that every token overwrites: never a page. Checkpoints of it are lists of pages."""

    conv_dim: int  # inputs of the causal convolution per token
    conv_width: int  # its kernel; the tail holds the last conv_width - 1 inputs, before the convolution
    state_shape: tuple[int, ...]  # float32, or float64 in a float64 model
    gate_sizes: tuple[int, ...]  # further inputs per token that a fold needs
    out_dim: int  # of the output per token
    itemsize: int  # bytes of one input in the model's dtype

    @property
    def state_itemsize(self) -> int:
        """A narrower state would round where steps end, and the text would depend on acceptance."""
        return max(4, self.itemsize)

    @property
    def state_bytes(self) -> int:
        return math.prod(self.state_shape) * self.state_itemsize

    @property
    def tail_bytes(self) -> int:
        return (self.conv_width - 1) * self.conv_dim * self.itemsize

    @property
    def input_bytes(self) -> int:
        """What a row keeps of one draft until it is folded or rejected."""
        return (self.conv_dim + sum(self.gate_sizes)) * self.itemsize


PagedSpec = FullSpec  # what a group's pages hold
CacheSpec = PagedSpec | RecurrentSpec


@dataclass(frozen=True)
class LayerCache:
    """A layer's claim on the cache: its own pages, another layer's, which it can only read, or a state in every row."""

    layer: int
    spec: CacheSpec
    reads: int | None = None  # the layer whose cache this one reads instead of keeping its own
