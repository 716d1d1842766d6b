"""Paged attention in exact mode: a query has the same bits in a prompt, in decoding, and among any other queries.

Keys are divided into splits of a fixed size that begin at multiples of it. The result of a split depends only on the
query and its keys: key tiles and the layout of a tile are the same for every number of queries. Splits are merged in
order. Either one program computes and merges all splits of a tile, or several programs compute them and the last one
merges. Multiplications and additions are fused only where the code says so, so that both ways round alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.attention.core import (
    AttentionShape,
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
from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, arrive, counters_for, tile_counter
from outrider.kernels.gpu.attention.prefill import PrefillConfig, QueryTiles, find_tile
from outrider.kernels.gpu.attention.windows import first_seen, window_kind
from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.fp8 import fit_queries, scaled_values

SPLIT_KEYS = 256
_PROGRAMS_PER_SM = 2  # that share the splits of few requests

_INTS = ["page_table", "query_starts", "lengths", "live", "key_starts", "tile_requests", "tile_indices", "k_scales",
         "v_scales", "sinks"]
_VARYING = ["num_tokens", "num_requests", "num_tiles", "window", "max_query", "num_parts", "num_programs"]


@triton.jit
def _merge(acc, peak, total, part, part_peak, part_total):
    """Merge the attention of a query over two sets of keys, each given as (weighted values, peak, sum of weights)."""
    new_peak = tl.maximum(peak, part_peak)
    # Before any key was seen the peak is -inf: subtract 0 instead, as -inf minus -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    old, new = tl.exp2(peak - base), tl.exp2(part_peak - base)
    return tl.fma(acc, old[:, None], part * new[:, None]), new_peak, tl.fma(total, old, part_total * new)


@triton.jit
def _store_part(part_out, part_state, at, part, part_peak, part_total, is_query, D_PAD: tl.constexpr):
    """Store the result of one split where `_merge_stored` reads it."""
    tl.store(part_out + at[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], part, mask=is_query[:, None])
    tl.store(part_state + 2 * at, part_peak, mask=is_query)
    tl.store(part_state + 2 * at + 1, part_total, mask=is_query)


@triton.jit
def _merge_stored(acc, peak, total, part_out, part_state, place, num_splits, is_query, D_PAD: tl.constexpr):
    """Merge the stored results of all splits, in order. Other multiprocessors wrote them, so they are read from the L2
    cache."""
    for split in range(0, num_splits):
        at = place + split
        part = tl.load(part_out + at[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], mask=is_query[:, None], other=0.0,
                       cache_modifier=".cg")
        part_peak = tl.load(part_state + 2 * at, mask=is_query, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(part_state + 2 * at + 1, mask=is_query, other=0.0, cache_modifier=".cg")
        acc, peak, total = _merge(acc, peak, total, part, part_peak, part_total)
    return acc, peak, total


@triton.jit
def _keys_of_tile(tile, tokens, key_starts, request, window, Q_TILE: tl.constexpr, WINDOW_KIND: tl.constexpr,
                  HAS_STARTS: tl.constexpr):
    """Return (lowest, highest): the queries of the tile see only keys in [lowest, highest)."""
    first = first_position(tile, tokens, Q_TILE)
    highest = end_of_keys(tile, tokens, Q_TILE)
    lowest = 0
    if HAS_STARTS:
        lowest = tl.load(key_starts + request)
    if WINDOW_KIND:
        lowest = tl.maximum(first_seen(first, window, WINDOW_KIND), lowest)
    return lowest, highest


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _exact_kernel(
    q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, tile_requests, tile_indices, out,
    part_out, part_state, counters, k_scales, v_scales, sinks, scale, softcap, window, num_tokens, num_requests,
    num_tiles, max_query, num_parts, num_programs, q_token_stride, q_head_stride, k_page_stride, k_token_stride,
    k_head_stride,
    v_page_stride, v_token_stride, v_head_stride, table_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr, LISTED: tl.constexpr, SEARCH: tl.constexpr, WINDOW_KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_SINKS: tl.constexpr, FILL_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend for one tile of queries. LISTED: tiles come from a list, or with SEARCH from the device's counts. SHARED:
    `num_programs` programs share the splits of a tile; otherwise one walks over all of them."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    tile = tl.program_id(2) % num_tiles
    program = tl.program_id(2) // num_tiles
    exists = True
    if LISTED:
        program = 0
        request, tile, exists = find_tile(tile_requests, tile_indices, tl.program_id(1), num_requests, SEARCH)
    tokens = load_request(query_starts, lengths, live, request, exists)
    rows = find_queries(tile, kv_head, tokens, D, D_PAD, Q_TILE, BLOCK_M, GROUP)
    lowest, highest = _keys_of_tile(tile, tokens, key_starts, request, window, Q_TILE, WINDOW_KIND, HAS_STARTS)
    first_split = lowest // KEYS
    num_splits = tl.maximum(tl.cdiv(highest, KEYS) - first_split, 0)
    if SHARED:
        if program >= tl.maximum(num_splits, 1):  # the first one also writes what dead tokens get
            return
    queries = load_queries(q, rows, q_token_stride, q_head_stride)
    queries, scale = fit_queries(queries, scale, k_scales, kv_head, k_cache)
    table = page_table + request.to(tl.int64) * table_stride
    place = (((request * max_query + rows.query) * HEADS + rows.head) * num_parts).to(tl.int64)
    acc, peak, total = no_sums(BLOCK_M, D_PAD)
    for split in range(program, num_splits, num_programs):
        begin = tl.maximum((first_split + split) * KEYS, lowest // BLOCK_N * BLOCK_N)
        end = tl.minimum((first_split + split + 1) * KEYS, highest)
        pages = PagedHead(k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride, table,
                          k_page_stride, k_token_stride, v_page_stride, v_token_stride)
        part, part_peak, part_total = no_sums(BLOCK_M, D_PAD)
        part, part_peak, part_total = attend_keys(
            queries, part, part_peak, part_total, rows.position, begin, end, lowest, highest, pages, scale, softcap,
            window, D, D_PAD, PAGE, BLOCK_N, True, WINDOW_KIND, HAS_SOFTCAP,
        )
        if SHARED:
            _store_part(part_out, part_state, place + split, part, part_peak, part_total, rows.is_query, D_PAD)
        else:
            acc, peak, total = _merge(acc, peak, total, part, part_peak, part_total)
    is_last = True
    if SHARED:
        counter = tile_counter(counters, request, kv_head, tile, num_tiles)
        is_last = arrive(counter, tl.maximum(tl.minimum(num_splits, num_programs), 1))
        if is_last:
            acc, peak, total = _merge_stored(acc, peak, total, part_out, part_state, place, num_splits, rows.is_query,
                                             D_PAD)
    if is_last:
        total = add_sinks(sinks, rows.head, rows.is_query, peak, total, HAS_SINKS)
        acc = scaled_values(acc, v_scales, kv_head, v_cache)
        store_result(out, acc, total, rows, tokens.scheduled, out_token_stride, out_head_stride, Q_TILE, BLOCK_M,
                     GROUP)
    if FILL_PADDING:
        # One program of one tile does it, or each tile of a list its share.
        step = tl.num_programs(1)
        padding = tl.load(query_starts + num_requests) + tl.program_id(1)
        if not LISTED:
            padding += (tile + program) * num_tokens
        zero_padding(out, padding, step, num_tokens, kv_head * GROUP, out_token_stride, out_head_stride,
                     D, D_PAD, GROUP, GROUP_PAD)


@dataclass(frozen=True)
class ExactConfig:
    """The tile sizes of exact attention, the same for every number of queries: rows (queries times query heads per
    key/value head), keys, and options of the compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def exact_config(head_dim: int, itemsize: int) -> ExactConfig:
    if itemsize > 2:
        return ExactConfig(32, 32, 4, 2) if head_dim <= 128 else ExactConfig(16, 16, 4, 2)
    if head_dim <= 128:
        return ExactConfig(64, 64, 4, 3)
    return ExactConfig(64, 32, 8, 2) if head_dim <= 256 else ExactConfig(32, 32, 8, 2)


def exact_tiles_config(num_heads: int, k_cache: torch.Tensor) -> PrefillConfig:
    """Return the tile for launches with lists of query tiles."""
    config = exact_config(k_cache.shape[3], k_cache.element_size())
    return PrefillConfig(config.block_m, config.block_n, config.num_warps, config.num_stages)


def exact_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, *, scale: float, window: int | None = None,
    is_chunked: bool = False, softcap: float | None = None, key_starts: torch.Tensor | None = None,
    scales: HeadScales | None = None, sinks: torch.Tensor | None = None, tiles: QueryTiles | None = None,
    max_query: int = 0, max_length: int = 0, out: torch.Tensor | None = None, fill_padding: bool = True,
    config: ExactConfig | None = None, split_keys: int = SPLIT_KEYS, num_programs: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Do what `decode_attention` does for requests of at most `max_query` tokens and `max_length` keys, or what
    `prefill_attention` does for `tiles`; both give the same bits. num_programs: how many programs share a tile's
    splits."""
    name = "exact_attention"
    shape = check_attention(name, q, k_cache, v_cache, page_table, query_starts, lengths, live, out, window, is_chunked,
                            softcap, key_starts, scales, sinks)
    config = config or exact_config(shape.head_dim, q.element_size())
    group = shape.heads_per_kv
    require(group <= config.block_m, name, "q", f"has {group} heads for each of the cache's, at most {config.block_m}")
    require(split_keys % config.block_n == 0, name, "split_keys", f"is not a multiple of {config.block_n}")
    q_tile = config.block_m // group
    require(tiles is None or tiles.queries == q_tile, name, "tiles", "were built for other head counts")
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device) if out is None else out
    count = shape.num_requests if tiles is None else tiles.count
    if shape.num_tokens == 0 or count == 0:
        return out
    num_tiles = 1 if tiles is not None else cdiv(max_query, q_tile)
    keys = max_length if window is None else min(max_length, window + max_query - 1 + split_keys)
    num_parts = max(1, cdiv(keys, split_keys)) if tiles is None else 1
    if num_programs is None:
        num_programs = _PROGRAMS_PER_SM * num_sms(q.device) // (shape.num_kv_heads * count * num_tiles)
    num_programs = max(1, min(num_programs, num_parts))
    is_shared = num_programs > 1
    part_out, part_state = _parts(shape, max_query * num_parts if is_shared else 0, q.device)
    counters = counters_for(q.device, max(MIN_COUNTERS, next_power_of_two(count * shape.num_kv_heads * num_tiles)))
    pdl = uses_pdl(q.device) if pdl is None else pdl
    tile_requests, tile_indices, search = lengths, lengths, 0
    if tiles is not None:
        tile_requests, tile_indices, search = tiles.order.arguments(name, count, shape.num_requests, q.device)
    _exact_kernel[(shape.num_kv_heads, count, num_programs * num_tiles)](
        q, k_cache, v_cache, page_table, query_starts, lengths, live, lengths if key_starts is None else key_starts,
        tile_requests, tile_indices, out, part_out, part_state,
        counters, *(scales or (lengths, lengths)), lengths if sinks is None else sinks, scale, softcap or 1.0,
        window or 0, shape.num_tokens, shape.num_requests, num_tiles, max_query, num_parts, num_programs,
        *q.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3], page_table.stride(0), out.stride(0), out.stride(1),
        HEADS=shape.num_heads, GROUP=group, GROUP_PAD=next_power_of_two(group), D=shape.head_dim,
        D_PAD=shape.padded_dim, PAGE=shape.page_size, Q_TILE=q_tile, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        KEYS=split_keys, SHARED=is_shared, LISTED=tiles is not None,
        SEARCH=search, WINDOW_KIND=window_kind(window, is_chunked),
        HAS_SOFTCAP=softcap is not None, HAS_STARTS=key_starts is not None, HAS_SINKS=sinks is not None,
        FILL_PADDING=fill_padding, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out


def _parts(shape: AttentionShape, parts_per_request: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate memory for the results of every split of every query, in float32: (weighted values, peak and sum of
    weights)."""
    count = shape.num_requests * parts_per_request * shape.num_heads
    return (torch.empty(count, shape.padded_dim, dtype=torch.float32, device=device),
            torch.empty(count, 2, dtype=torch.float32, device=device))
