"""The `triton` backend: paged attention on CUDA, with norms, rope and cache write as one kernel before it.

Requests with few tokens go to the decode kernel, which splits over keys; longer ones to the prefill kernel, in tiles
that never span requests. Grids come from host bounds; lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.cache.groups import Group
from outrider.core import Limits
from outrider.kernels.triton import (
    QueryTiles,
    Work,
    cache_write,
    decode_attention,
    device_query_tiles,
    list_work,
    pays_listing,
    prefill_attention,
    prepare_counters,
    query_tiles,
    rope_cache_write,
)
from outrider.mixers.batch import BatchView, check_rows
from outrider.mixers.paged.base import AttentionLayer, Backend, HeadNorms, KeyValueCache, Rope, check_writes

ENOUGH_LAYERS = 4  # of a group, that a list of splits pays for


@dataclass
class Plan:
    view: BatchView
    page_table: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor  # these three as int32
    lengths: torch.Tensor
    live: torch.Tensor
    key_starts: torch.Tensor | None
    short_live: torch.Tensor | None  # live tokens of the requests for the decode kernel; None: all of them
    short_query: int  # most tokens of such a request; 0 where there is none
    long_lens: list[int] | None  # tokens of the requests for the prefill kernel, 0 for the others
    may_list: bool  # whether the group has layers enough for a list of splits, a drafter's included
    tiles: QueryTiles | None = None
    works: dict[tuple[int | None, ...], Work] = field(default_factory=dict)

    def work_for(self, layer: AttentionLayer, live: torch.Tensor, itemsize: int) -> Work | None:
        """The splits for the decode kernel: one list for all layers with the same heads and window."""
        if not self.may_list or not pays_listing(self.view.num_requests, layer.window):
            return None
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        key = (*heads, layer.window)
        if key not in self.works:
            self.works[key] = list_work(self.lengths, live, *heads, itemsize, max_query=self.short_query,
                                        max_length=self.view.max_length.tokens, window=layer.window,
                                        key_starts=self.key_starts)
        return self.works[key]

    def tiles_for(self, layer: AttentionLayer) -> QueryTiles | None:
        """Tiles for the prefill kernel, None where no request is for it. Layers of a group have the same heads."""
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if self.tiles is None and self.view.longest_short is not None:
            self.tiles = device_query_tiles(self.query_starts, self.view.num_tokens, self.view.longest_short, *heads)
        elif self.tiles is None and self.long_lens is not None:
            self.tiles = query_tiles(self.long_lens, *heads, self.query_starts.device)
        return self.tiles


class TritonBackend(Backend):
    name = "triton"

    def __init__(self, longest_short: int = 16) -> None:
        """longest_short: tokens of a request that the decode kernel takes, 16 at most. Every power of two up to it is a
        kernel of its own to compile."""
        self._longest_short = min(16, longest_short)

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        live, starts = view.int32(view.live), view.int32(view.query_starts)
        short = [n for n in view.query_lens if 0 < n <= self._longest_short]
        long_lens, short_live = None, None
        if view.longest_short is not None:  # only the device knows which they are
            short = [view.longest_short]
            short_live = torch.where(starts.diff() <= view.longest_short, live, 0)
        elif view.max_query > self._longest_short:
            long_lens = [n if n > self._longest_short else 0 for n in view.query_lens]
            if short:
                is_short = torch.tensor([n <= self._longest_short for n in view.query_lens], dtype=torch.int32)
                short_live = live * is_short.pin_memory().to(live.device, non_blocking=True)
        key_starts = None if view.key_starts is None else view.int32(view.key_starts)
        return Plan(view, view.page_table(group), view.slots(group), starts, view.int32(view.lengths), live, key_starts,
                    short_live, max(short, default=0), long_lens,
                    may_list=len(group.layers) >= ENOUGH_LAYERS)

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            check_writes(layer)
            cache_write(k, v, plan.slots, cache.k, cache.v)
        return self._attend(layer, cache, q, plan)

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        q_norm, k_norm, eps, norms_v, has_v = norms or HeadNorms(None, None, 1e-6)  # type: ignore[arg-type]
        q = rope_cache_write(qkv, rope.positions, rope.table, plan.slots, cache.k, cache.v, q_norm, k_norm, eps,
                             v_norm=norms_v, v_from_k=not has_v, writes=layer.writes)
        return self._attend(layer, cache, q, plan)

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        prepare_counters(device)

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "softcap": layer.softcap, "out": out,
                                   "key_starts": plan.key_starts}
        tensors = (q, cache.k, cache.v, plan.page_table, plan.query_starts, plan.lengths)
        if plan.short_query:
            live = plan.live if plan.short_live is None else plan.short_live
            longest = plan.view.max_length.tokens
            decode_attention(*tensors, live, max_query=plan.short_query, max_length=longest,
                             work=plan.work_for(layer, live, q.element_size()), **options)
        tiles = plan.tiles_for(layer)
        if tiles is not None:
            prefill_attention(*tensors, plan.live, tiles, fill_padding=not plan.short_query, **options)
        return out.view(-1, layer.num_heads * layer.head_dim)
