"""The protocol of attention backends, and what a model calls for attention.

A backend plans once per step and group and runs once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from outrider.cache.groups import Group
from outrider.kernels.native import LayerWeights
from outrider.mixers.batch import BatchView


@dataclass(frozen=True)
class AttentionLayer:
    """The arithmetic of one attention layer, independent of where its cache lies."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query at p sees keys p - window + 1 to p
    softcap: float | None = None
    writes: bool = True  # False: reads the cache of another layer and must not write


@dataclass(frozen=True)
class LayerCacheView:
    """One layer's part of the pool: keys and values [pages, page tokens, kv heads, dim], page stride arbitrary."""

    k: torch.Tensor
    v: torch.Tensor


class Rope(Protocol):
    """The rope of a step's token rows, for kernels that apply it themselves."""

    positions: torch.Tensor  # [tokens]
    table: torch.Tensor  # [positions, cos | sin]

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The table's columns of cos and of sin."""
        ...


class HeadNorms(NamedTuple):
    """RMS norms of q and k heads: what multiplies, [dim] each; perhaps of v heads, without a weight."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    norms_v: bool = False
    has_v: bool = True  # False: values are the keys before norm and rope


class Attend(Protocol):
    """What a model calls for attention."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv heads, dim], or None for both where the layer reads another's
        cache. Returns [tokens, heads * dim]."""
        ...

    def fused(self, layer: int, qkv: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> torch.Tensor | None:
        """Norms, rope, cache write and attention of qkv [tokens, q | k | v] in one go, or None if that must be done
        step by step. May overwrite qkv if it does not return None."""
        ...

    def whole(self, layer: int, weights: LayerWeights, delta: torch.Tensor | None, residual: torch.Tensor, rope: Rope,
              norms: HeadNorms | None) -> torch.Tensor | None:
        """A whole decoder layer in one go: residual += delta, then attention and MLP of it. Returns what the MLP adds,
        perhaps in delta's memory; or None, with nothing done, if the layer must be done in parts."""
        ...

    def recurrent(self, layer: int, conv_in: torch.Tensor, gates: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The mixer of a recurrent layer over each request's tokens: conv_in [tokens, conv_dim], gates [tokens, n]
        each. Returns [tokens, out_dim]."""
        ...


class Backend(Protocol):
    """Plans never outlive their step. `run` writes k and v at the view's slots, then attends over the cache."""

    name: str

    def plan(self, view: BatchView, group: Group) -> Any: ...

    def run(self, layer: AttentionLayer, cache: LayerCacheView, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Any) -> torch.Tensor: ...

    def run_fused(self, layer: AttentionLayer, cache: LayerCacheView, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Any) -> torch.Tensor | None: ...

    def run_whole(self, layer: AttentionLayer, cache: LayerCacheView, weights: LayerWeights, delta: torch.Tensor | None,
                  residual: torch.Tensor, rope: Rope, norms: HeadNorms | None, plan: Any) -> torch.Tensor | None: ...


def check_writes(layer: AttentionLayer) -> None:
    if not layer.writes:
        raise ValueError(f"layer {layer.index} reads another layer's cache and cannot write it")
