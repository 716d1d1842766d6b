"""The `triton` backend: paged attention on CUDA, with norms, rope and cache write as one kernel before it.

Requests with few tokens use the decode kernel, which splits over keys; longer ones use the prefill kernel, in tiles
that never cross requests. A decode tile crosses requests only where the device has found their pages to be the same.
Grids come from host bounds; lengths are read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import pages_for
from outrider.core import Limits
from outrider.kernels.buffers import to_device
from outrider.kernels.gpu import (
    PrefillChoice,
    QueryTiles,
    SplitList,
    cache_write,
    can_pack,
    choose_prefill,
    decode_attention,
    device_query_tiles,
    exact_attention,
    exact_tiles_config,
    list_splits,
    pays_split_list,
    prefill_attention,
    prepare_counters,
    query_tiles,
    rope_cache_write,
)
from outrider.kernels.gpu.attention.sharing import SharedPages, find_shared
from outrider.kernels.gpu.hopper.prefill import HopperConfig
from outrider.mixers.batch import BatchView, DecodeQueries, ExactQueries, KeysFrom, MixedQueries, check_rows
from outrider.mixers.paged.backend import AttentionLayer, Backend, HeadNorms, KeyValueCache, Rope, check_writes

MIN_LAYERS_TO_LIST = 4  # a list of splits pays off for groups of at least this many layers


@dataclass(frozen=True)
class NoPrefill:
    """Marks a step in which every request uses the decode kernel."""


@dataclass(frozen=True)
class HostPrefill:
    """Marks a step in which the host knows which requests use the prefill kernel."""

    lens: list[int]  # tokens of each request that uses the prefill kernel, 0 for the others
    more_than: int  # requests with more tokens than this use the prefill kernel

    def tiles(self, view: BatchView, heads: tuple[int, int, int], config: PrefillChoice) -> QueryTiles:
        if isinstance(config, HopperConfig):  # slow to compile: the variant of captured steps serves here too
            return DevicePrefill(self.more_than).tiles(view, heads, config)
        return query_tiles(self.lens, *heads, view.query_starts_int32.device, config=config)


@dataclass(frozen=True)
class DevicePrefill:
    """Marks a step in which only the device knows which requests use the prefill kernel."""

    decode_kernel_max_query: int  # requests with more tokens than this

    def tiles(self, view: BatchView, heads: tuple[int, int, int], config: PrefillChoice) -> QueryTiles:
        return device_query_tiles(view.query_starts_int32, view.num_tokens, self.decode_kernel_max_query, *heads,
                                  config=config)


@dataclass
class Plan:
    view: BatchView
    page_table: torch.Tensor
    page_tokens: int
    slots: torch.Tensor
    decode_live: torch.Tensor  # [requests] int32: live tokens of requests that use the decode kernel, 0 for the others
    decode_max_query: int  # most tokens of such a request; 0 if there is none
    prefill: NoPrefill | HostPrefill | DevicePrefill
    may_list: bool  # whether the group has enough layers for a list of splits, a drafter's included
    choose_tile: Callable[[int, torch.Tensor], PrefillChoice] = choose_prefill
    tiles: dict[tuple[int, int, int], QueryTiles] = field(default_factory=dict)
    split_lists: dict[tuple[int | None, ...], SplitList] = field(default_factory=dict)
    shared_pages: SharedPages | None = None  # made by the first layer that can use it

    @property
    def key_starts(self) -> torch.Tensor | None:
        """Return the first visible key of each request, for kernels; None if every key is visible."""
        return self.view.visible.starts_int32 if isinstance(self.view.visible, KeysFrom) else None

    def splits_for(self, layer: AttentionLayer, itemsize: int) -> SplitList | None:
        """Return how the decode kernel's work is split over keys, shared by layers with the same heads and window. None
        if such a list does not pay off."""
        if not self.may_list or not pays_split_list(self.view.num_requests, layer.window):
            return None
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        key = (*heads, layer.window, layer.is_chunked)
        if key not in self.split_lists:
            self.split_lists[key] = list_splits(
                self.view.lengths_int32, self.decode_live, *heads, itemsize, max_query=self.decode_max_query,
                max_length=self.view.max_length.tokens, window=layer.window, is_chunked=layer.is_chunked,
                key_starts=self.key_starts, shared=self._shared_for(layer, itemsize),
            )
        return self.split_lists[key]

    def _shared_for(self, layer: AttentionLayer, itemsize: int) -> SharedPages | None:
        """Return the pages that several requests of the batch share. None for a layer that does not see all keys, or if
        a tile has no space for two requests."""
        queries = self.view.queries
        if not (isinstance(queries, DecodeQueries) and queries.shares_pages):
            return None
        if layer.window is not None or self.key_starts is not None:
            return None
        bounds = {"max_query": self.decode_max_query, "max_length": self.view.max_length.tokens}
        if not can_pack(self.view.num_requests, layer.num_heads, layer.num_kv_heads, layer.head_dim, itemsize,
                        self.page_table.device, **bounds):
            return None
        if self.shared_pages is None:
            self.shared_pages = find_shared(self.page_table, self.view.lengths_int32, self.decode_live,
                                            self.page_tokens, max_length=bounds["max_length"])
        return self.shared_pages

    def tiles_for(self, layer: AttentionLayer, cache: KeyValueCache) -> QueryTiles | None:
        """Return the tiles of queries for the prefill kernel; None if no request uses it."""
        if isinstance(self.prefill, NoPrefill):
            return None
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if heads not in self.tiles:
            self.tiles[heads] = self.prefill.tiles(self.view, heads, self.choose_tile(layer.num_heads, cache.k))
        return self.tiles[heads]


# Of attention kernels: queries, keys, values, page table, query starts, lengths.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class TritonBackend(Backend):
    name = "triton"
    serves_rows = True
    reads_shared_once = True

    def __init__(self, decode_kernel_max_query: int = 16) -> None:
        """decode_kernel_max_query: most tokens of a request that the decode kernel takes, 16 at most. One kernel is
        compiled for each power of two up to this number."""
        self._max_query = min(16, decode_kernel_max_query)

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        live, max_query = view.live_int32, 0
        prefill: NoPrefill | HostPrefill | DevicePrefill = NoPrefill()
        match view.queries:
            case ExactQueries(lens):
                max_query = self._decode_bound(lens)
                if max(lens, default=0) > self._max_query:
                    prefill = HostPrefill([n if n > self._max_query else 0 for n in lens], self._max_query)
                    if max_query:
                        live = live * to_device([n <= self._max_query for n in lens], torch.int32, live.device)
            case DecodeQueries(most) if most <= self._max_query:
                max_query = most
            case DecodeQueries(most):
                prefill = HostPrefill([most] * view.num_requests, 0)
            case MixedQueries(most):
                max_query, prefill = most, DevicePrefill(most)
                live = torch.where(view.query_starts_int32.diff() <= most, live, 0)
        return Plan(view, view.page_table(group), group.page_tokens, view.slots(group), live, max_query, prefill,
                    may_list=len(group.layers) >= MIN_LAYERS_TO_LIST)

    def _decode_bound(self, lens: Sequence[int]) -> int:
        """Return the `max_query` of the decode kernel for requests with these token counts: 1 (or 0), if no request
        that it serves has more, otherwise the most that it serves.

        Captured steps use only these values. The kernel's tile size depends on the value, so another one could need a
        kernel that start-up has not compiled: a step that mixed prompts with few drafts once waited 1.5 s."""
        most = max((n for n in lens if n <= self._max_query), default=0)
        return most if most <= 1 else self._max_query

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            self.write(layer, cache, k, v, plan)
        return self._attend(layer, cache, q, plan)

    def write(self, layer: AttentionLayer, cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        check_writes(layer)
        cache_write(k, v, plan.slots, cache.k, cache.v, scales=cache.codec.scales)

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Plan) -> torch.Tensor | None:
        return self._attend(layer, cache, self._rope(layer, cache, qkv, rope, norms, plan), plan)

    def write_fused(self, layer: AttentionLayer, cache: KeyValueCache, kv: torch.Tensor, rope: Rope,
                    norms: HeadNorms | None, plan: Plan) -> None:
        check_writes(layer)
        self._rope(layer, cache, kv, rope, norms, plan)

    def _rope(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
              norms: HeadNorms | None, plan: Plan) -> torch.Tensor:
        q_norm, k_norm, eps, norms_v, has_v = norms or HeadNorms(None, None, 1e-6)
        return rope_cache_write(qkv, rope.positions, rope.table, plan.slots, cache.k, cache.v, q_norm, k_norm, eps,
                                v_norm=norms_v, v_from_k=not has_v, writes=layer.writes, scales=cache.codec.scales)

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        prepare_counters(device)

    def probe_prompt(self, layer: AttentionLayer, cache: KeyValueCache, num_tokens: int, context: int,
                     dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        device, length = cache.k.device, context + num_tokens
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        q = torch.zeros(num_tokens, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        table = torch.zeros(1, pages_for(length, cache.k.shape[1]), dtype=torch.int32, device=device)
        starts, lengths, live = (torch.tensor(ints, dtype=torch.int32, device=device)
                                 for ints in ([0, num_tokens], [length], [num_tokens]))

        def attend() -> torch.Tensor:
            tiles = device_query_tiles(starts, num_tokens, 1, *heads, config=choose_prefill(layer.num_heads, cache.k))
            return prefill_attention(q, cache.k, cache.v, table, starts, lengths, live, tiles, scale=layer.scale,
                                     window=layer.window, is_chunked=layer.is_chunked, softcap=layer.softcap,
                                     scales=cache.codec.scales, fill_padding=False)

        return attend

    def _attend(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
        options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "is_chunked": layer.is_chunked,
                                   "softcap": layer.softcap, "out": out, "key_starts": plan.key_starts,
                                   "scales": cache.codec.scales, "sinks": layer.sinks}
        view = plan.view
        tensors = (q, cache.k, cache.v, plan.page_table, view.query_starts_int32, view.lengths_int32)
        if plan.decode_max_query:
            self._decode(layer, plan, tensors, options)
        tiles = plan.tiles_for(layer, cache)
        if tiles is not None:
            self._prefill(plan, tiles, tensors, options | {"fill_padding": not plan.decode_max_query})
        return out.view(-1, layer.num_heads * layer.head_dim)

    def _decode(self, layer: AttentionLayer, plan: Plan, tensors: Tensors, options: dict[str, Any]) -> None:
        decode_attention(*tensors, plan.decode_live, max_query=plan.decode_max_query,
                         max_length=plan.view.max_length.tokens,
                         splits=plan.splits_for(layer, tensors[1].element_size()), **options)

    def _prefill(self, plan: Plan, tiles: QueryTiles, tensors: Tensors, options: dict[str, Any]) -> None:
        prefill_attention(*tensors, plan.view.live_int32, tiles, **options)


class ExactTritonBackend(TritonBackend):
    """The backend of exact mode: one kernel for prompts and decoding, in which a query's bits depend on the query and
    its keys alone."""

    reads_shared_once = False

    def plan(self, view: BatchView, group: Group) -> Plan:
        return replace(super().plan(view, group), choose_tile=exact_tiles_config)

    def _decode(self, layer: AttentionLayer, plan: Plan, tensors: Tensors, options: dict[str, Any]) -> None:
        exact_attention(*tensors, plan.decode_live, max_query=plan.decode_max_query,
                        max_length=plan.view.max_length.tokens, **options)

    def _prefill(self, plan: Plan, tiles: QueryTiles, tensors: Tensors, options: dict[str, Any]) -> None:
        exact_attention(*tensors, plan.view.live_int32, tiles=tiles, **options)
