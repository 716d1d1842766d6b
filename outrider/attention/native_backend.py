"""The `cpu` backend: native paged attention in float32, with norm, rope and cache write as one operation before it.

Reads keys and values where they lie; nothing is gathered. Other types and machines without a compiler use `torch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.attention.base import AttentionLayer, BatchView, HeadNorms, LayerCacheView, Rope, check_rows, check_writes
from outrider.cache.groups import Group
from outrider.kernels import native, reference


@dataclass(frozen=True)
class Plan:
    view: BatchView
    page_table: torch.Tensor
    slots: torch.Tensor


class NativeBackend:
    name = "cpu"

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        return Plan(view, view.page_table(group), view.slots(group).contiguous())

    def run(self, layer: AttentionLayer, cache: LayerCacheView, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            check_writes(layer)
            reference.write_slots(cache.k, k, plan.slots)
            reference.write_slots(cache.v, v, plan.slots)
        return self._attend(layer, cache, q, plan)

    def run_fused(self, layer: AttentionLayer, cache: LayerCacheView, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        if not layer.writes or (norms is not None and (norms.norms_v or not norms.has_v)):
            return None
        half = rope.table.shape[1] // 2
        weights = (None, None, 1e-6) if norms is None else norms[:3]
        native.rope_write(qkv, rope.positions, rope.table[:, :half], rope.table[:, half:], plan.slots, cache.k, cache.v,
                          weights[0], weights[1], weights[2], rotary_dim=2 * half)
        q = qkv[:, : layer.num_heads * layer.head_dim].view(-1, layer.num_heads, layer.head_dim)
        return self._attend(layer, cache, q, plan)

    def _attend(self, layer: AttentionLayer, cache: LayerCacheView, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        view = plan.view
        out = native.paged_attention(q, cache.k, cache.v, plan.page_table, view.query_starts, view.lengths, view.live,
                                     layer.scale, layer.window or 0, layer.softcap or 0.0, key_starts=view.key_starts)
        return out.view(-1, layer.num_heads * layer.head_dim)
