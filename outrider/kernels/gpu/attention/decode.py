"""Paged attention for few query tokens per request (decoding and verifying drafts), split over the keys.

Each program serves one request, one key/value head and one split, which follow from its place in the grid or from its
entry in a list. If there are several splits, the program that ends last merges them in split order, so that the result
does not depend on which program that is. Lengths and live counts are read on the device; sizes that the host knows only
set the grid. Without a fixed `split_size` splits grow with the request's own length, so a request's result depends on
the number of splits but not on its batch mates. `splits.py` plans tiles and splits. Batches whose requests may share
pages have a kernel of their own (`packs.py`).
"""

from __future__ import annotations

from functools import lru_cache

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
from outrider.kernels.gpu.attention.merge import (
    MIN_COUNTERS,
    arrive,
    counters_for,
    merge_parts,
    store_part,
    tile_counter,
)
from outrider.kernels.gpu.attention.packs import launch_packed
from outrider.kernels.gpu.attention.splits import (
    LONG_SPLIT,
    MOST_SPLITS,
    DecodeConfig,
    SplitList,
    plan_launch,
    split_geometry,
)
from outrider.kernels.gpu.attention.windows import first_seen, window_kind
from outrider.kernels.gpu.common import (
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import is_collecting, kernel
from outrider.kernels.gpu.pages.fp8 import fit_queries, scaled_values

_INTS = ["page_table", "query_starts", "lengths", "live", "key_starts", "items", "count", "k_scales", "v_scales",
         "sinks"]
_TAIL = tl.constexpr(16)  # keys of a tile with a mask, where pages are in fp8
_VARYING = ["num_tokens", "num_requests", "max_query", "split_size", "coarse_size", "num_splits", "window", "num_tiles"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _decode_kernel(
    q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, items, count, out, part_out,
    part_lse, counters, k_scales, v_scales, sinks, scale, softcap, window, num_tokens, num_requests, max_query,
    split_size, coarse_size, num_splits, num_tiles, q_token_stride, q_head_stride, k_page_stride, k_token_stride,
    k_head_stride, v_page_stride, v_token_stride, v_head_stride, table_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW_KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_SINKS: tl.constexpr, LISTED: tl.constexpr, FILL_PADDING: tl.constexpr,
    GROUP_PAD: tl.constexpr, EARLY_VALUES: tl.constexpr, LONG_STAGES: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2) // num_tiles
    tile = tl.program_id(2) % num_tiles
    if LISTED:
        item = tl.load(items + request)
        if request >= tl.load(count):
            return
        request = item // MOST_SPLITS
        split = item % MOST_SPLITS
    if FILL_PADDING:
        num_scheduled = tl.load(query_starts + num_requests)  # early: at the end it would be waited for
    tokens = load_request(query_starts, lengths, live, request, True)
    first_key = tl.load(key_starts + request) if HAS_STARTS else 0
    base, size, num_active = split_geometry(
        tokens.length, tokens.num_live, window, first_key, split_size, coarse_size, num_splits, BLOCK_N, WINDOW_KIND
    )
    if SPLIT and not LISTED:
        if split >= tl.maximum(num_active, 1):  # the first one also writes what dead tokens get
            return

    rows = find_queries(tile, kv_head, tokens, D, D_PAD, Q_TILE, BLOCK_M, GROUP)
    queries = load_queries(q, rows, q_token_stride, q_head_stride)
    queries, scale = fit_queries(queries, scale, k_scales, kv_head, k_cache)
    begin, lowest, highest = _keys_of_split(
        tile, tokens, split, base, size, num_active, first_key, window, Q_TILE, BLOCK_N, SPLIT, WINDOW_KIND, HAS_STARTS
    )
    pages = PagedHead(
        k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride,
        page_table + request.to(tl.int64) * table_stride,
        k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    )
    acc, peak, total = _attend_split(
        queries, rows.position, first_position(tile, tokens, Q_TILE), begin, lowest, highest, pages, scale, softcap,
        window, D, D_PAD, PAGE, BLOCK_M, BLOCK_N, WINDOW_KIND, HAS_SOFTCAP, HAS_STARTS, EARLY_VALUES, LONG_STAGES,
    )

    is_last = True
    if SPLIT:
        acc, peak, total, is_last = _merge_splits(
            acc, peak, total, rows, request, kv_head, tile, split, num_active, part_out, part_lse, counters, max_query,
            num_splits, num_tiles, HEADS, BLOCK_M, D_PAD,
        )
    if is_last:
        total = add_sinks(sinks, rows.head, rows.is_query, peak, total, HAS_SINKS)
        acc = scaled_values(acc, v_scales, kv_head, v_cache)
        store_result(out, acc, total, rows, tokens.scheduled, out_token_stride, out_head_stride, Q_TILE, BLOCK_M,
                     GROUP)
    if FILL_PADDING:
        # One split of one tile does it.
        padding = num_scheduled + request + (tile + split) * num_tokens
        zero_padding(out, padding, num_requests, num_tokens, kv_head * GROUP, out_token_stride, out_head_stride,
                     D, D_PAD, GROUP, GROUP_PAD)


@triton.jit
def _keys_of_split(
    tile, tokens, split, base, size, num_active, first_key, window, Q_TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW_KIND: tl.constexpr, HAS_STARTS: tl.constexpr,
):
    """Return (begin, lowest, highest): the keys of one split that some query of the tile sees. The split's key tiles
    begin at `begin`; only positions in [lowest, highest) may be loaded."""
    highest = end_of_keys(tile, tokens, Q_TILE)
    lowest = first_key
    begin = base + split * size
    if WINDOW_KIND:
        lowest = tl.maximum(first_seen(first_position(tile, tokens, Q_TILE), window, WINDOW_KIND), first_key)
    if WINDOW_KIND or HAS_STARTS:
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    if SPLIT:
        highest = tl.where(split + 1 < num_active, tl.minimum(highest, base + (split + 1) * size), highest)
    return begin, lowest, highest


@triton.jit
def _attend_split(
    queries, q_position, first_query, begin, lowest, highest, pages, scale, softcap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW_KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_STARTS: tl.constexpr, EARLY_VALUES: tl.constexpr,
    LONG_STAGES: tl.constexpr,
):
    """Return (weighted values, peak, sum of weights) over the keys of a split. A split of many tiles runs a loop that
    loads more tiles ahead, although that loop takes longer to begin. first_query: position of the tile's first
    query."""
    IN_FP8: tl.constexpr = pages.k_head.dtype.element_ty == tl.float8e4nv
    acc, peak, total = no_sums(BLOCK_M, D_PAD)
    if IN_FP8 and not WINDOW_KIND and not HAS_STARTS:
        # The instructions of masks would take longer than so few bytes: most tiles are seen whole, and need none. Short
        # tiles for the others leave the registers to these.
        whole_end = tl.maximum(tl.minimum(first_query + 1, highest) // BLOCK_N * BLOCK_N, begin)
        acc, peak, total = attend_keys(
            queries, acc, peak, total, q_position, begin, whole_end, lowest, highest, pages, scale, softcap, window,
            D, D_PAD, PAGE, BLOCK_N, False, WINDOW_KIND, HAS_SOFTCAP, EARLY_VALUES, LONG_STAGES or None,
        )
        acc, peak, total = attend_keys(
            queries, acc, peak, total, q_position, whole_end, highest, lowest, highest, pages, scale, softcap, window,
            D, D_PAD, PAGE, _TAIL, True, WINDOW_KIND, HAS_SOFTCAP, EARLY_VALUES,
        )
    elif LONG_STAGES > 0 and highest - begin > LONG_SPLIT:
        acc, peak, total = attend_keys(
            queries, acc, peak, total, q_position, begin, highest, lowest, highest, pages, scale, softcap, window,
            D, D_PAD, PAGE, BLOCK_N, True, WINDOW_KIND, HAS_SOFTCAP, EARLY_VALUES, LONG_STAGES,
        )
    else:
        acc, peak, total = attend_keys(
            queries, acc, peak, total, q_position, begin, highest, lowest, highest, pages, scale, softcap, window,
            D, D_PAD, PAGE, BLOCK_N, True, WINDOW_KIND, HAS_SOFTCAP, EARLY_VALUES,
        )
    return acc, peak, total


@triton.jit
def _merge_splits(
    acc, peak, total, rows, request, kv_head, tile, split, num_active, part_out, part_lse, counters, max_query,
    num_splits, num_tiles, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr,
):
    """Return the result of a tile: (weighted values, peak, sum of weights, whether they cover the whole tile). If a
    tile has several splits, each program stores its part, and the last to arrive merges them."""
    is_last = num_active <= 1
    if num_active > 1:
        part = (((request * max_query + rows.query) * HEADS + rows.head) * num_splits).to(tl.int64)
        store_part(part_out, part_lse, part + split, acc, peak, total, rows.is_query, D_PAD)
        is_last = arrive(tile_counter(counters, request, kv_head, tile, num_tiles), num_active)
        if is_last:
            acc, peak, total = merge_parts(part_out, part_lse, part, rows.is_query, num_active, num_active, BLOCK_M,
                                           D_PAD)
    return acc, peak, total, is_last


_plan = lru_cache(maxsize=1024)(plan_launch)  # every layer of a step has the same


def _check_bounds(
    name: str, max_query: int, max_length: int, columns: int, page_size: int, split_size: int | None,
    num_splits: int | None,
) -> None:
    require(max_query >= 1, name, "max_query", f"is {max_query}, expected at least 1")
    require(max_length <= columns * page_size, name, "max_length",
            f"is {max_length}, but page_table has {columns} columns of {page_size} tokens")
    require(split_size is None or split_size > 0, name, "split_size", f"is {split_size}, expected at least 1")
    require(num_splits is None or num_splits >= 1, name, "num_splits", f"is {num_splits}, expected at least 1")


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, *,
    scale: float, window: int | None = None, is_chunked: bool = False, softcap: float | None = None,
    key_starts: torch.Tensor | None = None, scales: HeadScales | None = None, sinks: torch.Tensor | None = None,
    max_query: int, max_length: int,
    splits: SplitList | None = None, split_size: int | None = None, num_splits: int | None = None,
    out: torch.Tensor | None = None, fill_padding: bool = True, config: DecodeConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Attend for q [tokens, heads, dim] to paged keys and values; returns [tokens, heads, dim].

    Every token row of `out` is written: dead tokens get zeros and, with fill_padding, so do the rows past the last
    request. A call that shares `out` with another call passes fill_padding=False. key_starts [requests]: the first key
    that each request may see. `splits`: what `list_splits` returned for the same batch. `split_size` fixes the keys per
    split, for results that do not depend on the grid; `num_splits` overrides the number that would be chosen. scales:
    each head's scales, for an fp8 cache. sinks [heads] float32: each head's score of an attention sink.
    """
    name = "decode_attention"
    pdl = uses_pdl(q.device) if pdl is None else pdl
    shape = check_attention(name, q, k_cache, v_cache, page_table, query_starts, lengths, live, out,
                            window, is_chunked, softcap, key_starts, scales, sinks)
    _check_bounds(name, max_query, max_length, page_table.shape[1], shape.page_size, split_size, num_splits)
    heads = (shape.num_requests, shape.num_heads, shape.num_kv_heads, shape.head_dim, k_cache.element_size())
    if splits is not None:
        require(split_size is None and num_splits is None and config is None, name, "splits", "plan the launch already")
        listed_for = (*heads, max_query, max_length, window, is_chunked)
        require(splits.is_for(listed_for, (lengths, live, key_starts)), name, "splits", "were listed for another batch")
    plan = _plan(*heads, num_sms(q.device), max_query=max_query, max_length=max_length, window=window,
                 split_size=split_size, num_splits=num_splits, config=config) if splits is None else splits.plan
    require(split_size is None or split_size % plan.config.block_n == 0, name, "split_size",
            f"is {split_size}, expected a multiple of {plan.config.block_n}")
    if out is None:
        out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    if shape.num_tokens == 0 or shape.num_requests == 0:
        return out
    part_out = part_lse = out
    if plan.is_split:
        num_slots = plan.num_splits if splits is None else splits.num_slots
        parts = shape.num_requests * max_query * shape.num_heads * num_slots
        part_out = torch.empty(parts, shape.padded_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    flags = {"WINDOW_KIND": window_kind(window, is_chunked), "HAS_STARTS": key_starts is not None,
             "HAS_SOFTCAP": softcap is not None, "HAS_SINKS": sinks is not None, "LISTED": splits is not None}
    counters = counters_for(q.device, max(MIN_COUNTERS, next_power_of_two(shape.num_requests * shape.num_kv_heads
                                                                     * plan.num_tiles)))
    if splits is not None and splits.packs is not None:
        launch_packed(q, k_cache, v_cache, page_table, query_starts, lengths, live, splits, splits.packs, out, part_out,
                      part_lse, counters, shape, scale=scale, softcap=softcap, scales=scales,
                      sinks=sinks, max_query=max_query, fill_padding=fill_padding, pdl=pdl)
        return out
    head_scales = scales or (lengths, lengths)
    items, count = (lengths, lengths) if splits is None else (splits.items, splits.count)
    grid = (shape.num_kv_heads, shape.num_requests, plan.num_splits * plan.num_tiles)
    if splits is not None:
        grid = (shape.num_kv_heads, len(splits.items), plan.num_tiles)
    # A kernel for short splits alone needs half the shared memory, and starts sooner. Later steps may be longer.
    for is_long in (False, True) if is_collecting() else (plan.may_be_long,):
        _decode_kernel[grid](
            q, k_cache, v_cache, page_table, query_starts, lengths, live, lengths if key_starts is None else key_starts,
            items, count, out, part_out, part_lse, counters, *head_scales, lengths if sinks is None else sinks, scale,
            softcap or 1.0, window or 0, shape.num_tokens, shape.num_requests, max_query, plan.split_size,
            plan.coarse_size, plan.num_splits, plan.num_tiles,
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], page_table.stride(0), *out.stride()[:2],
            HEADS=shape.num_heads, GROUP=shape.heads_per_kv, GROUP_PAD=next_power_of_two(shape.heads_per_kv),
            D=shape.head_dim, D_PAD=shape.padded_dim, PAGE=shape.page_size, Q_TILE=plan.q_tile, BLOCK_M=plan.block_m,
            BLOCK_N=plan.config.block_n, SPLIT=plan.is_split, FILL_PADDING=fill_padding,
            EARLY_VALUES=plan.config.early_values, LONG_STAGES=plan.config.long_stages if is_long else 0, PDL=pdl,
            num_warps=plan.config.num_warps, num_stages=plan.config.num_stages, **flags, **pdl_options(pdl),
        )
    return out
