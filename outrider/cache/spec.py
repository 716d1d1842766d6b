"""What one layer keeps per token: the declaration a model makes and everything about memory follows from.

A spec is a value: layers with equal specs may share a group.
"""

from __future__ import annotations

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


CacheSpec = FullSpec  # the union of kinds grows with latent and recurrent layers


@dataclass(frozen=True)
class LayerCache:
    """A layer's claim on the cache: its own pages, or another layer's, which it can only read."""

    layer: int
    spec: CacheSpec
    reads: int | None = None  # the layer whose cache this one reads instead of keeping its own
