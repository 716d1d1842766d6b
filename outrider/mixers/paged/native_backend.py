"""The `native` backend: native paged attention in float32, with norm, rope and cache write as one operation before it,
and whole decoder layers as one native call.

Reads keys and values where they lie; nothing is gathered. Other types and machines without a compiler use `torch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import Group
from outrider.kernels import native, reference
from outrider.mixers.batch import BatchView, check_rows
from outrider.mixers.paged.base import AttentionLayer, Backend, HeadNorms, KeyValueCache, Rope, check_writes


@dataclass(frozen=True)
class Plan:
    view: BatchView
    page_table: torch.Tensor
    slots: torch.Tensor


class NativeBackend(Backend):
    name = "native"

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        return Plan(view, view.page_table(group), view.slots(group).contiguous())

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            check_writes(layer)
            reference.write_slots(cache.k, k, plan.slots)
            reference.write_slots(cache.v, v, plan.slots)
        return self._attend(layer, cache, q, plan)

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        write = _rope_write(layer, cache, rope, norms, plan)
        if write is None:
            return None
        native.rope_write(qkv, *write)
        q = qkv[:, : layer.num_heads * layer.head_dim].view(-1, layer.num_heads, layer.head_dim)
        return self._attend(layer, cache, q, plan)

    def run_whole(self, layer: AttentionLayer, cache: KeyValueCache, weights: native.LayerWeights,
                  delta: torch.Tensor | None, residual: torch.Tensor, rope: Rope, norms: HeadNorms | None,
                  plan: Plan) -> torch.Tensor | None:
        write = _rope_write(layer, cache, rope, norms, plan)
        if write is None:
            return None
        view = plan.view
        attention = native.Attention(plan.page_table, view.query_starts, view.lengths, view.live, layer.scale,
                                     layer.window or 0, layer.softcap or 0.0, view.key_starts)
        return native.decoder_layer(weights, delta, residual, write, attention)

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        view = plan.view
        out = native.paged_attention(q, cache.k, cache.v, plan.page_table, view.query_starts, view.lengths, view.live,
                                     layer.scale, layer.window or 0, layer.softcap or 0.0, key_starts=view.key_starts)
        return out.view(-1, layer.num_heads * layer.head_dim)


def _rope_write(layer: AttentionLayer, cache: KeyValueCache, rope: Rope, norms: HeadNorms | None,
                plan: Plan) -> native.RopeWrite | None:
    """None for layers whose values are normed or made of keys, or that write no cache."""
    if not layer.writes or (norms is not None and (norms.norms_v or not norms.has_v)):
        return None
    cos, sin = rope.halves
    q_norm, k_norm, eps = (None, None, 1e-6) if norms is None else norms[:3]
    return native.RopeWrite(rope.positions, cos, sin, plan.slots, cache.k, cache.v, q_norm, k_norm, eps,
                            rotary_dim=2 * cos.shape[1])
