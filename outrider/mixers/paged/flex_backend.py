"""The `flex` backend: torch's FlexAttention over pages, for masks that no kernel was written for.

A layer's keys are one long sequence of slots, as they lie in the pool, and the block mask names a request's pages in
it: a block of keys is a page. A tile of queries never crosses requests, so a tile's pages are its request's row of the
page table. On CUDA the attention is compiled, and a step can be captured; on a CPU it runs uncompiled over the whole
pool, so pools must be tiny there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outrider.cache.groups import Group
from outrider.cache.kinds import ChunkedSpec, pages_for
from outrider.core import Limits
from outrider.kernels.reference import contain_non_finite
from outrider.mixers.batch import (
    BatchView,
    DecodeQueries,
    ExactQueries,
    ExtraKeys,
    KeysFrom,
    MixedQueries,
    check_rows,
)
from outrider.mixers.paged.backend import AttentionLayer, Backend, KeyValueCache, check_writes
from outrider.mixers.paged.masks import QueryMarks, first_seen, visible_keys

DECODE_TILE, PROMPT_TILE = 16, 128  # queries of one tile, if no request has more than the first, and otherwise
LEAST_TILES = 2  # sizes of 1 are compiled apart
MOST_CPU_PAGES = 1024
MOST_COMPILED = 64  # kinds of layers and tiles that are compiled in one process


@dataclass(frozen=True)
class FlexExtents:
    """Sizes of one group's index buffer."""

    tiles: int  # query tiles of one step
    columns: int  # pages of one request, and a last column that is never filled: kernels read one index ahead

    @classmethod
    def from_limits(cls, group: Group, limits: Limits) -> FlexExtents:
        """Return the greatest sizes that any step needs. Each request adds at most one tile that is not full."""
        tiles = limits.max_requests + limits.max_batched_tokens // PROMPT_TILE
        short_tiles = limits.max_requests * pages_for(1 + limits.max_drafts, DECODE_TILE)
        columns = group.kind.capacity(limits).table_width
        if group.spec.visible_tokens is not None:
            columns = min(columns, most_columns(group, PROMPT_TILE))
        return cls(max(LEAST_TILES, tiles, short_tiles), columns + 1)


def most_columns(group: Group, tile: int) -> int:
    """Return the most pages that hold keys of one tile of queries, in a group with a window."""
    assert group.spec.visible_tokens is not None
    return pages_for(group.spec.visible_tokens + tile, group.page_tokens) + 1


@dataclass(frozen=True)
class TokenTiles:
    """Token rows divided into tiles of one size, as FlexAttention needs. All rows of a tile belong to one request. Rows
    that pad a tile are dead."""

    size: int
    request: torch.Tensor  # [tiles]
    token_rows: torch.Tensor  # [tiles * size] token row of each query; any where there is none
    is_live: torch.Tensor  # [tiles * size]
    place: torch.Tensor  # [tokens] query of each token row
    token_is_live: torch.Tensor  # [tokens]

    @classmethod
    def from_view(cls, view: BatchView) -> TokenTiles:
        size, num_tiles = tile_counts(view)
        lens = view.query_starts.diff()
        per_request = (lens + size - 1) // size
        ends = per_request.cumsum(0)
        tiles = torch.arange(num_tiles, device=lens.device)
        request = torch.searchsorted(ends, tiles, right=True).clamp(max=view.num_requests - 1)
        first_tile = ends - per_request
        offset = (tiles - first_tile[request])[:, None] * size + torch.arange(size, device=lens.device)
        is_live = (offset < view.live[request][:, None]) & (tiles < ends[-1])[:, None]
        token_rows = (view.query_starts[request][:, None] + offset).clamp(0, view.num_tokens - 1)
        own_offset = torch.arange(view.num_tokens, device=lens.device) - view.query_starts[view.request_of]
        token_is_live = (own_offset >= 0) & (own_offset < view.live[view.request_of])
        place = (first_tile[view.request_of] * size + own_offset).clamp(0, num_tiles * size - 1)
        return cls(size, request, token_rows.view(-1), is_live.view(-1), place, token_is_live)

    def spread(self, by_tile: torch.Tensor) -> torch.Tensor:
        """Repeat values of tiles [tiles] for each of their token rows [tiles * size]."""
        return by_tile[:, None].expand(-1, self.size).reshape(-1)


def tile_counts(view: BatchView) -> tuple[int, int]:
    """Return (queries of one tile, tiles) for a step, from data that the host knows."""
    match view.queries:
        case ExactQueries(lens):
            size = DECODE_TILE if max(lens, default=0) <= DECODE_TILE else PROMPT_TILE
            num = sum(pages_for(n, size) for n in lens)
        case DecodeQueries(most):
            size, num = DECODE_TILE, view.num_requests * pages_for(most, DECODE_TILE)
        case MixedQueries():
            size, num = PROMPT_TILE, view.num_requests + view.num_tokens // PROMPT_TILE
    return size, max(LEAST_TILES, num)


@dataclass
class Plan:
    view: BatchView
    group: Group
    page_table: torch.Tensor
    slots: torch.Tensor
    tiles: TokenTiles
    marks: QueryMarks  # marks of each query; a dead query has position -1
    key_starts: torch.Tensor  # [tiles * size] first key that a query sees
    page_column: torch.Tensor  # [pages of the pool] column of each page in the page table of the request that has it
    num_pages: torch.Tensor  # [tiles] pages with keys that a tile may see
    pages: torch.Tensor  # [tiles, columns + 1] these pages; 0 in the rest
    tail_pages: torch.Tensor  # [requests] last page of each request; the null page if it has none
    tail_is_free: torch.Tensor  # [requests, page tokens] cells of it that no token has yet
    block_masks: dict[Any, BlockMask] = field(default_factory=dict)


class FlexBackend(Backend):
    name = "flex"
    needs_whole_parts = True
    skips_collected = True
    takes_masks = True
    takes_sinks = False

    def __init__(self) -> None:
        self._limits: Limits | None = None
        self._buffers: dict[int, torch.Tensor] = {}  # by group; used once steps are captured
        self._page_column: torch.Tensor | None = None

    def attach(self, num_pages: int, device: torch.device) -> None:
        if device.type == "cpu" and num_pages > MOST_CPU_PAGES:
            raise ValueError(f"attention_backend='flex' reads the whole pool on a CPU, where it is not compiled: "
                             f"num_pages may be at most {MOST_CPU_PAGES}, got {num_pages}; use 'torch' for larger ones")
        if self._page_column is None or len(self._page_column) != num_pages:
            self._page_column = torch.zeros(num_pages, dtype=torch.int32, device=device)

    def check_cache(self, cache: KeyValueCache) -> None:
        pages_apart(cache.k)

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        self._limits = limits

    def plan(self, view: BatchView, group: Group) -> Plan:
        check_rows(view, group)
        assert self._page_column is not None, "attach comes first"
        tiles, table = TokenTiles.from_view(view), view.page_table(group)
        positions = torch.where(tiles.is_live, view.positions[tiles.token_rows], -1)
        none = torch.zeros_like(positions)
        marks = QueryMarks(positions, none, none)
        if isinstance(view.extra_keys, ExtraKeys):
            marks = QueryMarks(positions, *(torch.where(tiles.is_live, ends[tiles.token_rows], 0)
                                            for ends in (view.extra_keys.starts, view.extra_keys.ends)))
        key_starts = none
        if isinstance(view.visible, KeysFrom):
            key_starts = tiles.spread(view.visible.starts[tiles.request])
        num_columns = (view.lengths + group.page_tokens - 1) // group.page_tokens
        columns = torch.arange(table.shape[1], device=table.device)
        owned = torch.where(columns < num_columns[:, None], table, 0).long()
        self._page_column[owned] = columns.int().expand_as(owned)  # a page that requests share has one column in all
        num_pages, pages = self._pages(view, group, tiles, marks, key_starts, table)
        last = (num_columns - 1).clamp(min=0)
        tail = torch.where(num_columns > 0, table.gather(1, last[:, None]).squeeze(1), 0).long()
        cells = last[:, None] * group.page_tokens + torch.arange(group.page_tokens, device=table.device)
        return Plan(view, group, table, view.slots(group), tiles, marks, key_starts, self._page_column, num_pages,
                    pages, tail, (cells >= view.lengths[:, None]) & (num_columns > 0)[:, None])

    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        if k is not None and v is not None:
            self.write(layer, cache, k, v, plan)
        tiles = plan.tiles
        queries = q[tiles.token_rows].transpose(0, 1)[None]  # [1, heads, tiles * size, dim]
        keys, values = _slots(cache.k), _slots(cache.v)
        kind = layer.mask, layer.window, layer.is_chunked, layer.reach
        block_mask = plan.block_masks.get(kind)
        if block_mask is None:
            block_mask = make_block_mask(layer, cache, plan, keys.shape[2])
            plan.block_masks[kind] = block_mask
        score_mod = None if layer.softcap is None else _capped(layer.softcap)
        if q.is_cuda and _collects_launches():
            return torch.zeros_like(q).view(-1, layer.num_heads * layer.head_dim)
        if q.is_cuda:
            options = {"BLOCK_M": min(tiles.size, 64), "BLOCK_N": min(plan.group.page_tokens, 64)}
            with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
                out = _compiled()(queries, keys, values, score_mod=score_mod, block_mask=block_mask, scale=layer.scale,
                                  enable_gqa=True, kernel_options=options)
        else:
            # Uncompiled attention multiplies every value of the pool, those of free pages too.
            out = _uncompiled(queries, keys, values.nan_to_num(0.0), score_mod=score_mod, block_mask=block_mask,
                              scale=layer.scale, enable_gqa=True)
        by_token = out[0].transpose(0, 1)[tiles.place].reshape(-1, layer.num_heads * layer.head_dim)
        return torch.where(tiles.token_is_live[:, None], by_token, 0)

    def write(self, layer: AttentionLayer, cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        check_writes(layer)
        _write(cache, plan, k, v)

    def _pages(self, view: BatchView, group: Group, tiles: TokenTiles, marks: QueryMarks, key_starts: torch.Tensor,
               table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages with keys that some query of a tile may see, from the first such key to the last."""
        window, size = group.spec.visible_tokens, tiles.size
        last = torch.maximum(marks.positions, marks.span_ends - 1).view(-1, size).amax(1)  # -1 in a dead tile
        first_keys = key_starts
        if window is not None:
            in_span = marks.span_ends > 0
            seen = first_seen(marks.positions, window, isinstance(group.spec, ChunkedSpec))
            reach = torch.where(in_span, torch.minimum(seen, marks.span_starts), seen)
            first_keys = torch.maximum(first_keys, reach)
        first = torch.where(tiles.is_live, first_keys, tiles.spread(last))
        first_column = first.view(-1, size).amin(1).clamp(min=0) // group.page_tokens
        num_pages = torch.where(last >= 0, last // group.page_tokens + 1 - first_column, 0)
        width = table.shape[1]
        if window is not None and not isinstance(view.extra_keys, ExtraKeys):
            width = min(width, most_columns(group, size))
        columns = torch.arange(width, device=table.device)
        index = (first_column[:, None] + columns).clamp(max=table.shape[1] - 1)
        chosen = torch.where(columns < num_pages[:, None], table[tiles.request[:, None], index], 0)
        pages = self._index_buffer(view, group, len(tiles.request), width)
        pages[:, :width] = chosen
        return num_pages.int(), pages

    def _index_buffer(self, view: BatchView, group: Group, tiles: int, width: int) -> torch.Tensor:
        """Return a buffer for page indices: [tiles, at least width + 1] int32. Attention is compiled for one width, so
        all captured steps use one buffer of a fixed width for each group, and other steps use few widths."""
        device, limits = view.lengths.device, self._limits
        if limits is None or not _can_be_captured(view, limits):
            return torch.zeros(tiles, 1 << width.bit_length(), dtype=torch.int32, device=device)
        extents = FlexExtents.from_limits(group, limits)
        if tiles > extents.tiles or width >= extents.columns:
            raise ValueError(f"attention_backend='flex': a step has {tiles} query tiles and {width} pages per request, "
                             f"and the index buffer of group {group.index} has room for {extents.tiles} and "
                             f"{extents.columns - 1}. This is a bug in FlexExtents.from_limits: please report it")
        if group.index not in self._buffers:
            self._buffers[group.index] = torch.zeros(extents.tiles, extents.columns, dtype=torch.int32, device=device)
        return self._buffers[group.index][:tiles]


def _can_be_captured(view: BatchView, limits: Limits) -> bool:
    """Whether a step with this view can be captured. A step with extra keys cannot, and neither can one padded beyond
    the limits."""
    has_few_tokens = isinstance(view.queries, DecodeQueries) or view.num_tokens <= limits.max_batched_tokens
    return not isinstance(view.extra_keys, ExtraKeys) and view.num_requests <= limits.max_requests and has_few_tokens


def pages_apart(cache: torch.Tensor) -> int:
    """Return the distance from one page of a layer to its next, in page-sized blocks. The other layers of the group lie
    between them."""
    page_elements = cache.shape[1] * cache.stride(1)
    if cache.stride(0) % page_elements:
        raise ValueError("attention_backend='flex' needs pages whose distance is a multiple of one layer's part "
                         f"({page_elements} elements), and it is {cache.stride(0)} elements: use 'torch' or another "
                         "page_size")
    return cache.stride(0) // page_elements


def _slots(cache: torch.Tensor) -> torch.Tensor:
    """Return a layer's part of the pool as one sequence of slots: [1, kv heads, slots, dim]. Pages lie `pages_apart` in
    it."""
    pages, page_tokens, heads, dim = cache.shape
    num = ((pages - 1) * pages_apart(cache) + 1) * page_tokens
    token, head, element = cache.stride()[1:]
    return cache.as_strided((1, heads, num, dim), (num * token, head, token, element), cache.storage_offset())


def make_block_mask(layer: AttentionLayer, cache: KeyValueCache, plan: Plan, num_slots: int) -> BlockMask:
    page_tokens, apart = plan.group.page_tokens, pages_apart(cache.k)
    marks, key_starts, page_column = plan.marks, plan.key_starts, plan.page_column
    mask, window, is_chunked, reach = layer.mask, layer.window, layer.is_chunked, layer.reach

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        key_position = page_column[slot // (page_tokens * apart)] * page_tokens + slot % page_tokens
        own = QueryMarks(marks.positions[query], marks.span_starts[query], marks.span_ends[query])
        is_visible = visible_keys(mask, window, is_chunked, own, key_position, reach)
        return is_visible & (key_position >= key_starts[query]) & (own.positions >= 0)

    request = plan.tiles.spread(plan.tiles.request)

    def sees_its_own(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """Whether a query's request owns the slot of a key. Uncompiled attention calls this for every slot of the
        pool."""
        block = slot // page_tokens
        page = block // apart
        column = page_column[page].clamp(max=plan.page_table.shape[1] - 1)
        is_own = (plan.page_table[request[query], column] == page) & (block % apart == 0)
        exists = page_column[page] * page_tokens + slot % page_tokens < plan.view.lengths[request[query]]
        return is_own & exists & sees(batch, head, query, slot)

    indices = plan.pages * apart
    return BlockMask.from_kv_blocks(
        plan.num_pages[None, None], indices[None, None], BLOCK_SIZE=(plan.tiles.size, page_tokens),
        mask_mod=sees if marks.positions.is_cuda else sees_its_own, seq_lengths=(len(marks.positions), num_slots),
        compute_q_blocks=False,
    )


def _write(cache: KeyValueCache, plan: Plan, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write the tokens of a step, dead ones into the null page, and clear the cells after a request's last token. Cells
    must be cleared because a block of keys is always read whole, and a weight of 0 does not remove a value of NaN."""
    pages, tokens = plan.slots // plan.group.page_tokens, plan.slots % plan.group.page_tokens
    pages, tokens = torch.where(plan.slots < 0, 0, pages), torch.where(plan.slots < 0, 0, tokens)
    k, v = contain_non_finite(k, v)
    cache.k[pages, tokens] = k.to(cache.k.dtype)
    cache.v[pages, tokens] = v.to(cache.v.dtype)
    tail = cache.v[plan.tail_pages]  # [requests, page tokens, heads, dim]
    cache.v[plan.tail_pages] = torch.where(plan.tail_is_free[..., None, None], 0, tail)


def _capped(softcap: float) -> Any:
    def cap(score: torch.Tensor, batch: Any, head: Any, query: Any, slot: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _collects_launches() -> bool:
    """Whether launches are only collected to compile kernels, so that nothing runs."""
    from outrider.kernels.gpu.launch.triton_kernel import is_collecting

    return is_collecting()


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _uncompiled(*args: Any, **options: Any) -> Any:
    """Return attention as plain torch operations. With torch's default settings every call would be traced again."""
    before = getattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)  # older torch has none, and is slower here
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        return flex_attention(*args, **options)
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
