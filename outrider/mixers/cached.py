"""CachedLayers: a model's attention layers with their parts of the pool. `on(view)` is what a forward calls.

Target and drafters each have one. It finds a layer's cache and its group's plan; which pages and lengths are meant
comes from the view alone. What recurrent layers do with the step goes straight through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.kernels.native import LayerWeights
from outrider.mixers.batch import BatchView
from outrider.mixers.paged.base import Attend, AttentionLayer, Backend, HeadNorms, LayerCacheView, Rope
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.base import Gates
from outrider.mixers.recurrent.layers import RecurrentStep


class CachedLayers:
    def __init__(self, layers: Sequence[AttentionLayer], pool: DevicePool, backend: Backend) -> None:
        self.layers = {layer.index: layer for layer in layers}
        self.caches = {index: LayerCacheView(*pool.layer(index)) for index in self.layers}
        self.group_of = {index: pool.layout.groups[pool.layout.places[index][0]] for index in self.layers}
        self.groups = tuple({group.index: group for group in self.group_of.values()}.values())
        self.backend = backend

    def on(self, view: BatchView, recurrent: RecurrentStep | None = None) -> Attend:
        """Attention over one view: plans every group once, now. `recurrent` serves the same batch's other layers."""
        return _Attention(self, {group.index: self.backend.plan(view, group) for group in self.groups}, recurrent)


class _Attention:
    def __init__(self, cached: CachedLayers, plans: dict[int, Any], recurrent: RecurrentStep | None) -> None:
        self._cached, self._plans, self._recurrent = cached, plans, recurrent

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        cached = self._cached
        plan = self._plans[cached.group_of[layer].index]
        return cached.backend.run(cached.layers[layer], cached.caches[layer], q, k, v, plan)

    def fused(self, layer: int, qkv: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> torch.Tensor | None:
        cached = self._cached
        plan = self._plans[cached.group_of[layer].index]
        return cached.backend.run_fused(cached.layers[layer], cached.caches[layer], qkv, rope, norms, plan)

    def whole(self, layer: int, weights: LayerWeights, delta: torch.Tensor | None, residual: torch.Tensor, rope: Rope,
              norms: HeadNorms | None) -> torch.Tensor | None:
        cached = self._cached
        plan = self._plans[cached.group_of[layer].index]
        return cached.backend.run_whole(cached.layers[layer], cached.caches[layer], weights, delta, residual, rope,
                                        norms, plan)

    def recurrent(self, layer: int, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
        assert self._recurrent is not None, f"layer {layer} is recurrent and this model's rows keep no states"
        return self._recurrent(layer, conv_in, gates)
