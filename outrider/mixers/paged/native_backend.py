"""The `native` backend: paged attention in float32 by C code on the CPU. Norm, rope and cache write are one operation
before it, and a decoder layer can be one native call.

Keys and values are read where they lie; nothing is gathered. Other dtypes, and machines without a compiler, use the
`torch` backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import Group
from outrider.kernels import native, ops, reference
from outrider.mixers.batch import BatchView, KeysFrom, check_rows
from outrider.mixers.paged.base import AttentionLayer, Backend, HeadNorms, KeyValueCache, PagedLayer, Rope, check_writes


@dataclass(frozen=True)
class Plan:
    view: BatchView
    page_table: torch.Tensor
    slots: torch.Tensor
    requests: native.Requests | None  # None if the C code does not take them


class NativeBackend(Backend):
    name = "native"

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        table = view.page_table(group)
        requests = native.make_requests(table, view.query_starts, view.lengths, view.live, _first_keys(view))
        return Plan(view, table, view.slots(group).contiguous(), requests)

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            check_writes(layer)
            k, v = reference.contain_non_finite(k, v)
            reference.write_slots(cache.k, k, plan.slots)
            reference.write_slots(cache.v, v, plan.slots)
        return self._attend(layer, cache, q, plan)

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        write = _rope_write(layer, cache, rope, norms, plan)
        if write is None:
            return None
        ops.rope_write(qkv, *write)
        q = qkv[:, : layer.num_heads * layer.head_dim].view(-1, layer.num_heads, layer.head_dim)
        return self._attend(layer, cache, q, plan)

    def decoder_layer(self, paged: PagedLayer, weights: native.LayerWeights, delta: torch.Tensor | None,
                      residual: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> torch.Tensor | None:
        """Add delta to residual, then compute attention and MLP, in one native call. Returns the MLP's output, perhaps
        in delta's memory; or None, with nothing done, if the layer must be done in parts."""
        layer, plan = paged.layer, paged.plan
        write = _rope_write(layer, paged.cache, rope, norms, plan)
        if write is None or plan.requests is None:
            return None
        attention = native.Attention(plan.requests, layer.scale, layer.window or 0, layer.softcap or 0.0)
        return native.decoder_layer(weights, delta, residual, write, attention)

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        view = plan.view
        out = ops.paged_attention(q, cache.k, cache.v, plan.page_table, view.query_starts, view.lengths, view.live,
                                  layer.scale, layer.window or 0, layer.softcap or 0.0, _first_keys(view))
        return out.view(-1, layer.num_heads * layer.head_dim)


def _first_keys(view: BatchView) -> torch.Tensor | None:
    """First visible key of each request for the native call; None if every key is visible."""
    return view.visible.starts if isinstance(view.visible, KeysFrom) else None


def _rope_write(layer: AttentionLayer, cache: KeyValueCache, rope: Rope, norms: HeadNorms | None,
                plan: Plan) -> native.RopeWrite | None:
    """Arguments of the native norm, rope and cache write. None for layers whose values are normed or made of keys, or
    that write no cache."""
    if not layer.writes or (norms is not None and (norms.norms_v or not norms.has_v)):
        return None
    cos, sin = rope.halves
    q_norm, k_norm, eps = (None, None, 1e-6) if norms is None else norms[:3]
    return native.RopeWrite(rope.positions, cos, sin, plan.slots, cache.k, cache.v, q_norm, k_norm, eps,
                            2 * cos.shape[1])
