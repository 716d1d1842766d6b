"""The `native` backend: paged attention in float32 by C code on the CPU. Norm, rope and cache write are one operation
before it, and a decoder layer can be one native call.

Keys and values are read where they lie; nothing is gathered. Other dtypes, and machines without a compiler, use the
`torch` backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from outrider.cache.groups import Group
from outrider.kernels import cpu as native
from outrider.kernels import ops, reference
from outrider.mixers.batch import BatchView, KeysFrom, check_rows
from outrider.mixers.paged.backend import (
    AttentionLayer,
    Backend,
    HeadNorms,
    KeyValueCache,
    PagedLayer,
    Rope,
    check_writes,
)


@dataclass(frozen=True)
class Plan:
    view: BatchView
    page_table: torch.Tensor
    slots: torch.Tensor
    layer_steps: dict[Rope, native.LayerStep] = field(default_factory=dict)  # made when a layer first asks

    def layer_step(self, rope: Rope) -> native.LayerStep | None:
        """Return the step's data for native calls that compute whole layers with this rope; None if such calls cannot
        serve the step."""
        if rope in self.layer_steps:
            return self.layer_steps[rope]
        view, parts = self.view, (rope.positions, self.slots, *rope.halves)
        requests = native.make_requests(self.page_table, view.query_starts, view.lengths, view.live, _first_keys(view))
        step = None if requests is None else native.LayerStep.build(requests, *parts)
        if step is not None:
            self.layer_steps[rope] = step
        return step


class NativeBackend(Backend):
    name = "native"
    has_exact_ranges = True

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        return Plan(view, view.page_table(group), view.slots(group).contiguous())

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            self.write(layer, cache, k, v, plan)
        return self._attend(layer, cache, q, plan)

    def write(self, layer: AttentionLayer, cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        check_writes(layer)
        k, v = reference.contain_non_finite(k, v)
        reference.write_slots(cache.k, k, plan.slots)
        reference.write_slots(cache.v, v, plan.slots)

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        write = _rope_write(layer, cache, rope, norms, plan)
        if write is None:
            return None
        ops.rope_write(qkv, *write)
        q = qkv[:, : layer.num_heads * layer.head_dim].view(-1, layer.num_heads, layer.head_dim)
        return self._attend(layer, cache, q, plan)

    def bind_layer(self, paged: PagedLayer, weights: native.LayerWeights,
                   norms: HeadNorms | None) -> native.BoundLayer | None:
        """Pack a layer's weights, norms and cache once, so that `decoder_layer` can compute the layer in every step.
        None if one native call cannot compute it."""
        layer, cache = paged.layer, paged.cache
        if not _writes_keys_and_values(layer, norms) or layer.sinks is not None:
            return None
        scales, eps = (None, 1e-6) if norms is None else ((norms.q, norms.k), norms.eps)
        return native.BoundLayer.bind(weights, cache.k, cache.v, scales, eps, scale=layer.scale,
                                      window=layer.window or 0, is_chunked=layer.is_chunked,
                                      softcap=layer.softcap or 0.0)

    def decoder_layer(self, bound: native.BoundLayer, plan: Plan, delta: torch.Tensor | None, residual: torch.Tensor,
                      rope: Rope, deltas: native.LayerDeltas | None = None,
                      aux_states: Mapping[int, torch.Tensor] = MappingProxyType({})) -> torch.Tensor | None:
        """Add delta to residual, then compute attention and MLP, in one native call, with the row deltas of their
        products. Returns the MLP's output, perhaps in delta's memory. Returns None and changes nothing if one native
        call cannot compute the layer. aux_states: see `native.decoder_layer`."""
        step = plan.layer_step(rope)
        return None if step is None else native.decoder_layer(bound, step, delta, residual, deltas, aux_states)

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        view = plan.view
        out = ops.paged_attention(q, cache.k, cache.v, plan.page_table, view.query_starts, view.lengths, view.live,
                                  layer.scale, layer.window or 0, layer.softcap or 0.0, _first_keys(view), layer.sinks,
                                  layer.is_chunked)
        return out.view(-1, layer.num_heads * layer.head_dim)


def _first_keys(view: BatchView) -> torch.Tensor | None:
    """Return the first visible key of each request for the native call; None if every key is visible."""
    return view.visible.starts if isinstance(view.visible, KeysFrom) else None


def _rope_write(layer: AttentionLayer, cache: KeyValueCache, rope: Rope, norms: HeadNorms | None,
                plan: Plan) -> native.RopeWrite | None:
    """Return the arguments of the native call that applies norm and rope and writes the cache; None if it does not
    serve the layer."""
    if not _writes_keys_and_values(layer, norms):
        return None
    cos, sin = rope.halves
    q_norm, k_norm, eps = (None, None, 1e-6) if norms is None else norms[:3]
    return native.RopeWrite(rope.positions, cos, sin, plan.slots, cache.k, cache.v, q_norm, k_norm, eps,
                            2 * cos.shape[1])


def _writes_keys_and_values(layer: AttentionLayer, norms: HeadNorms | None) -> bool:
    """Whether the C code can write the layer's cache. It can neither norm values nor make them from keys."""
    return layer.writes and (norms is None or (norms.has_v and not norms.norms_v))
