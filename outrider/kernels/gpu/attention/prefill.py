"""Paged attention for many query tokens per request: tiles of queries, each within one request.

The host knows how many query tokens each request has and lists the tiles. In a captured step the device counts the
tiles instead, and every program finds its own. Lengths and live counts are read on the device. Keys are visited in
tiles that begin at multiples of the tile size; tiles that every query sees completely come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.attention.core import (
    PagedHead,
    add_sinks,
    attend_keys,
    check_attention,
    end_of_keys,
    find_queries,
    first_position,
    load_queries,
    load_request,
    no_sums,
    store_result,
    zero_padding,
)
from outrider.kernels.gpu.attention.windows import first_seen, window_kind
from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    padded_requests,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.hopper.prefill import CONFIGS, HopperConfig, launch_prefill, takes_cache
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.fp8 import fit_queries, scaled_values

_INTS = ["page_table", "query_starts", "lengths", "live", "key_starts", "tile_requests", "tile_indices", "k_scales",
         "v_scales", "sinks"]
_VARYING = ["num_tokens", "num_requests", "num_tiles", "window"]


@kernel(do_not_specialize=["num_requests", "decode_kernel_max_query"], do_not_specialize_on_alignment=["query_starts"])
def _count_tiles_kernel(
    query_starts, starts, counter, num_requests, decode_kernel_max_query, QUERIES: tl.constexpr, PAD: tl.constexpr
):
    request = tl.arange(0, PAD)
    valid = request < num_requests
    first = tl.load(query_starts + request, mask=valid, other=0)
    count = tl.load(query_starts + request + 1, mask=valid, other=0) - first
    tiles = tl.where(count > decode_kernel_max_query, tl.cdiv(count, QUERIES), 0)
    tl.store(starts + request + 1, tl.cumsum(tiles, axis=0).to(tl.int32), mask=valid)
    zero = tl.zeros([PAD], dtype=tl.int32)
    tl.store(starts + request, zero, mask=request == 0)
    tl.store(counter + request, zero, mask=request == 0)


@triton.jit
def _search_tile(starts, program, num_requests, PAD: tl.constexpr):
    """Return (request, tile of it, whether the tile exists): the last request whose first tile is not after `program`.
    Requests without tiles share their start with the next request and are never that last one."""
    request = tl.arange(0, PAD)
    first = tl.load(starts + request, mask=request < num_requests, other=2147483647)
    owner = tl.sum((first <= program).to(tl.int32), axis=0) - 1
    return owner, program - tl.load(starts + owner), program < tl.load(starts + num_requests)


@triton.jit
def find_tile(tile_requests, tile_indices, program, num_requests, SEARCH: tl.constexpr):
    """Return (request, tile of it, whether the tile exists) of a program: from the host's list or, with SEARCH, from
    the device's counts."""
    if SEARCH > 0:
        return _search_tile(tile_requests, program, num_requests, SEARCH)
    else:
        return tl.load(tile_requests + program), tl.load(tile_indices + program), True


@triton.jit
def _keys_of_tile(
    tile, tokens, key_starts, request, window, Q_TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW_KIND: tl.constexpr, HAS_STARTS: tl.constexpr,
):
    """Return (lowest, highest, begin, whole_begin, whole_end): the tile's queries see keys in [lowest, highest), whose
    key tiles begin at `begin`. Key tiles in [whole_begin, whole_end) need no mask, because every query sees all of
    their keys."""
    first = first_position(tile, tokens, Q_TILE)
    highest = end_of_keys(tile, tokens, Q_TILE)
    lowest = 0
    begin = 0
    whole_begin = 0
    if HAS_STARTS:
        lowest = tl.load(key_starts + request)
        whole_begin = tl.cdiv(lowest, BLOCK_N) * BLOCK_N
    if WINDOW_KIND:
        lowest = tl.maximum(first_seen(first, window, WINDOW_KIND), lowest)
        seen_by_all = tl.maximum(first_seen(highest - 1, window, WINDOW_KIND), 0)
        whole_begin = tl.maximum(tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N, whole_begin)
    if WINDOW_KIND or HAS_STARTS:
        begin = lowest // BLOCK_N * BLOCK_N
    whole_end = tl.maximum(tl.minimum(first + 1, highest), 0) // BLOCK_N * BLOCK_N
    whole_begin = tl.minimum(whole_begin, whole_end)
    whole_begin = tl.maximum(whole_begin, begin)
    return lowest, highest, begin, whole_begin, tl.maximum(whole_end, whole_begin)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _prefill_kernel(
    q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, tile_requests, tile_indices, out,
    k_scales, v_scales, sinks, scale, softcap, window, num_tokens, num_requests, num_tiles,
    q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride,
    v_page_stride, v_token_stride, v_head_stride, table_stride, out_token_stride, out_head_stride,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_SINKS: tl.constexpr, FILL_PADDING: tl.constexpr,
    SEARCH: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    request, tile, exists = find_tile(tile_requests, tile_indices, program, num_requests, SEARCH)
    tokens = load_request(query_starts, lengths, live, request, exists)
    rows = find_queries(tile, kv_head, tokens, D, D_PAD, Q_TILE, BLOCK_M, GROUP)
    queries = load_queries(q, rows, q_token_stride, q_head_stride)
    queries, scale = fit_queries(queries, scale, k_scales, kv_head, k_cache)
    lowest, highest, begin, whole_begin, whole_end = _keys_of_tile(
        tile, tokens, key_starts, request, window, Q_TILE, BLOCK_N, WINDOW_KIND, HAS_STARTS
    )
    pages = PagedHead(
        k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride,
        page_table + request.to(tl.int64) * table_stride,
        k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    )
    acc, peak, total = no_sums(BLOCK_M, D_PAD)
    if WINDOW_KIND or HAS_STARTS:
        acc, peak, total = attend_keys(
            queries, acc, peak, total, rows.position, begin, tl.minimum(whole_begin, highest), lowest, highest, pages,
            scale, softcap, window, D, D_PAD, PAGE, BLOCK_N, True, WINDOW_KIND, HAS_SOFTCAP,
        )
    acc, peak, total = attend_keys(
        queries, acc, peak, total, rows.position, whole_begin, whole_end, lowest, highest, pages,
        scale, softcap, window, D, D_PAD, PAGE, BLOCK_N, False, WINDOW_KIND, HAS_SOFTCAP,
    )
    acc, peak, total = attend_keys(
        queries, acc, peak, total, rows.position, whole_end, highest, lowest, highest, pages,
        scale, softcap, window, D, D_PAD, PAGE, BLOCK_N, True, WINDOW_KIND, HAS_SOFTCAP,
    )
    total = add_sinks(sinks, rows.head, rows.is_query, peak, total, HAS_SINKS)
    acc = scaled_values(acc, v_scales, kv_head, v_cache)
    store_result(out, acc, total, rows, tokens.scheduled, out_token_stride, out_head_stride, Q_TILE, BLOCK_M, GROUP)
    if FILL_PADDING:
        first = tl.load(query_starts + num_requests) + program
        zero_padding(out, first, num_tiles, num_tokens, kv_head * GROUP, out_token_stride, out_head_stride,
                     D, D_PAD, GROUP, GROUP_PAD)


@dataclass(frozen=True)
class PrefillConfig:
    block_m: int  # rows: query tokens times the heads of one key/value head
    block_n: int
    num_warps: int = 8
    num_stages: int = 2


PrefillChoice: TypeAlias = PrefillConfig | HopperConfig


def prefill_config(head_dim: int) -> PrefillConfig:
    if head_dim <= 128:
        return PrefillConfig(block_m=128, block_n=64, num_stages=3)
    if head_dim <= 256:
        return PrefillConfig(block_m=64, block_n=32)
    return PrefillConfig(block_m=32, block_n=16)


def choose_prefill(num_heads: int, k_cache: torch.Tensor) -> PrefillChoice:
    """Return the fastest kernel that serves this GPU, these heads and this cache [pages, page tokens, kv heads,
    dim]."""
    head_dim = k_cache.shape[3]
    return CONFIGS[head_dim] if takes_cache(num_heads, k_cache) else prefill_config(head_dim)


@dataclass(frozen=True)
class ListedTiles:
    """The tiles of an uncaptured step, listed by the host."""

    requests: torch.Tensor  # [tiles] int32: the request of each tile
    indices: torch.Tensor  # [tiles] int32: which of its request's tiles it is

    def arguments(
        self, name: str, num_tiles: int, num_requests: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the kernels' arguments (tile_requests, tile_indices, SEARCH)."""
        for argument, each in (("requests", self.requests), ("indices", self.indices)):
            require_tensor(name, f"tiles.{argument}", each, (num_tiles,), device, (torch.int32,))
        return self.requests, self.indices, 0


@dataclass(frozen=True)
class CountedTiles:
    """The tiles of a captured step: the device counts them, and every program searches for its tile."""

    starts: torch.Tensor  # [requests + 1] int32: tiles before each request's own

    def arguments(
        self, name: str, num_tiles: int, num_requests: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the kernels' arguments (tile_requests, tile_indices, SEARCH); indices are not read."""
        require_tensor(name, "tiles.starts", self.starts, (num_requests + 1,), device, (torch.int32,))
        return self.starts, self.starts, padded_requests(num_requests)


@dataclass(frozen=True)
class QueryTiles:
    """The tiles of queries of a step: for each, its request, and its index among the request's tiles. Device tensors,
    built once per step."""

    order: ListedTiles | CountedTiles
    counter: torch.Tensor  # [1] int32: 0 whenever no kernel runs; programs take tiles by it
    queries: int  # query tokens per tile
    config: PrefillChoice
    count: int  # tiles, at most


def query_tiles(
    query_lens: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, *,
    config: PrefillChoice | None = None,
) -> QueryTiles:
    """List the tiles of requests with `query_lens` scheduled query tokens. Late tiles come first because they have the
    most keys."""
    config = config or prefill_config(head_dim)
    queries = max(1, config.block_m // (num_heads // num_kv_heads))
    tiles = [(index, request) for request, n in enumerate(query_lens) for index in range(cdiv(n, queries))]
    tiles.sort(reverse=True)
    table = torch.tensor([*tiles, (0, 0)], dtype=torch.int32).t().contiguous()
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    requests, counter = table[1].split([len(tiles), 1])
    order = ListedTiles(requests, table[0, :-1])
    return QueryTiles(order, counter, queries=queries, config=config, count=len(tiles))


def device_query_tiles(
    query_starts: torch.Tensor, num_tokens: int, decode_kernel_max_query: int, num_heads: int, num_kv_heads: int,
    head_dim: int, *, config: PrefillChoice | None = None,
) -> QueryTiles:
    """Count, on the device, the query tiles of requests with more than `decode_kernel_max_query` query tokens. The host
    does not wait for the counts. num_tokens: query tokens of all requests."""
    config = config or prefill_config(head_dim)
    queries = max(1, config.block_m // (num_heads // num_kv_heads))
    require_tensor("device_query_tiles", "query_starts", query_starts, (None,), query_starts.device, (torch.int32,))
    num_requests = query_starts.shape[0] - 1
    starts, counter = torch.empty_like(query_starts), torch.empty_like(query_starts[:1])
    _count_tiles_kernel[(1,)](query_starts, starts, counter, num_requests, decode_kernel_max_query, QUERIES=queries,
                              PAD=padded_requests(num_requests), num_warps=4)
    # A request's last tile may hold one query; the shortest request that has any holds decode_kernel_max_query + 1.
    most = cdiv(num_tokens, queries) + min(num_requests, num_tokens // (decode_kernel_max_query + 1))
    return QueryTiles(CountedTiles(starts), counter, queries=queries, config=config, count=most)


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, tiles: QueryTiles, *,
    scale: float, window: int | None = None, is_chunked: bool = False, softcap: float | None = None,
    key_starts: torch.Tensor | None = None, scales: HeadScales | None = None, sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None, fill_padding: bool = True, pdl: bool | None = None,
) -> torch.Tensor:
    """Do what `decode_attention` does, for any number of query tokens per request. Token rows of requests without a
    tile are not written; with fill_padding the rows past the last request get zeros."""
    name = "prefill_attention"
    pdl = uses_pdl(q.device) if pdl is None else pdl
    shape = check_attention(name, q, k_cache, v_cache, page_table, query_starts, lengths, live, out,
                            window, is_chunked, softcap, key_starts, scales, sinks)
    num_tiles = tiles.count
    tile_requests, tile_indices, search = tiles.order.arguments(name, num_tiles, shape.num_requests, q.device)
    group, config = shape.heads_per_kv, tiles.config
    require(tiles.queries == max(1, config.block_m // group), name, "tiles", "were built for other head counts")
    if out is None:
        out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    if shape.num_tokens == 0 or num_tiles == 0:
        return out
    if isinstance(config, HopperConfig):
        launch_prefill(q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, tile_requests,
                       tile_indices, tiles.counter, out, shape, config, scale=scale, softcap=softcap, window=window,
                       is_chunked=is_chunked, num_tiles=num_tiles, tile_queries=tiles.queries, search=search,
                       fill_padding=fill_padding, sinks=sinks)
        return out
    _prefill_kernel[(shape.num_kv_heads, num_tiles)](
        q, k_cache, v_cache, page_table, query_starts, lengths, live,
        lengths if key_starts is None else key_starts,
        tile_requests, tile_indices, out, *(scales or (lengths, lengths)), lengths if sinks is None else sinks,
        scale, softcap or 1.0, window or 0, shape.num_tokens, shape.num_requests, num_tiles,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), page_table.stride(0), out.stride(0), out.stride(1),
        GROUP=group, GROUP_PAD=next_power_of_two(group), D=shape.head_dim, D_PAD=shape.padded_dim,
        PAGE=shape.page_size, Q_TILE=tiles.queries, BLOCK_M=max(16, next_power_of_two(tiles.queries * group)),
        BLOCK_N=config.block_n, WINDOW_KIND=window_kind(window, is_chunked), HAS_SOFTCAP=softcap is not None,
        HAS_STARTS=key_starts is not None, HAS_SINKS=sinks is not None, FILL_PADDING=fill_padding, PDL=pdl,
        SEARCH=search,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out
