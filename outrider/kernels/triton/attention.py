"""Paged attention for few query tokens per request (decoding and checking drafts), split over the keys.

One program serves one request, one key/value head and one split; a second kernel merges the splits, in split order,
of those requests that have more than one. Long requests come first where an order is given: the last programs are then
short ones. Lengths and live counts are read on the device: host bounds only size the grid. Without a fixed `split_size`
the split grows with the request's own length, so the result of a request depends on the number of splits but not on
batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.attention_core import (
    add_sink,
    attend_keys,
    check_attention,
    zero_padding,
)
from outrider.kernels.triton.common import (
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)

MIN_SPLIT = 256  # keys; smaller splits cost more in the merge than they save
_MERGE = 32  # splits merged at once; fixed, so that the order of additions never depends on the grid
_INTS = ["page_table", "query_starts", "lengths", "live", "key_starts", "order"]
_VARYING = ["num_tokens", "num_requests", "split_size", "num_splits", "window", "num_tiles", "max_query"]


@triton.jit
def _split_geometry(length, live, window, first_key, split_size, num_splits, BLOCK_N: tl.constexpr,
                    HAS_WINDOW: tl.constexpr):
    """(first position of split 0, keys per split, splits with work). The last split takes whatever is left."""
    lowest = first_key
    if HAS_WINDOW:
        lowest = tl.maximum(length - live - window + 1, first_key)
    needed = tl.cdiv(length - lowest, num_splits)
    size = tl.maximum(split_size, tl.cdiv(needed, BLOCK_N) * BLOCK_N)
    base = lowest // size * size
    return base, size, tl.minimum(tl.cdiv(length - base, size), num_splits)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _decode_kernel(
    q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, order, sinks, out, part_out, part_lse,
    scale, softcap, window, num_tokens, num_requests, split_size, num_splits, num_tiles,
    q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride,
    v_page_stride, v_token_stride, v_head_stride, table_stride, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_ORDER: tl.constexpr, FILL_PADDING: tl.constexpr, GROUP_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    if HAS_ORDER:
        request = tl.load(order + request)
    split = tl.program_id(2) // num_tiles
    tile = tl.program_id(2) % num_tiles
    first_token = tl.load(query_starts + request)
    scheduled = tl.load(query_starts + request + 1) - first_token
    length = tl.load(lengths + request)
    num_live = tl.load(live + request)

    first_key = 0
    if HAS_STARTS:
        first_key = tl.load(key_starts + request)
    base, size, num_active = _split_geometry(
        length, num_live, window, first_key, split_size, num_splits, BLOCK_N, HAS_WINDOW
    )
    if SPLIT:
        if split >= num_active:
            return

    row = tl.arange(0, BLOCK_M)
    query = tile * Q_TILE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_query = (row < Q_TILE * GROUP) & (query < num_live)
    q_position = tl.where(is_query, length - num_live + query, -1)
    token = (first_token + query).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    in_dim = (dim < D)[None, :]
    queries = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=is_query[:, None] & in_dim, other=0.0,
    )

    # Keys any query of this tile can see, cut to this split.
    highest = tl.where(tile * Q_TILE < num_live, length - num_live + tl.minimum(num_live, (tile + 1) * Q_TILE), 0)
    lowest = first_key
    begin = base + split * size
    if HAS_WINDOW:
        lowest = tl.maximum(length - num_live + tile * Q_TILE - window + 1, first_key)
    if HAS_WINDOW or HAS_STARTS:
        begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    if SPLIT:
        highest = tl.where(split + 1 < num_active, tl.minimum(highest, base + (split + 1) * size), highest)
    acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, peak, total = attend_keys(
        queries, acc, peak, total, q_position, begin, highest, lowest, highest,
        k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride,
        page_table + request.to(tl.int64) * table_stride,
        k_page_stride, k_token_stride, v_page_stride, v_token_stride, scale, softcap, window,
        D, D_PAD, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP,
    )

    is_part = SPLIT and num_active > 1
    if is_part:
        divisor = tl.where(total > 0, total, 1.0)
        result = acc / divisor[:, None]
        lse = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
        part = (token * HEADS + head) * num_splits + split
        tl.store(part_out + part[:, None] * D_PAD + dim[None, :], result, mask=is_query[:, None])
        tl.store(part_lse + part, lse, mask=is_query)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_query, other=float("-inf"))
            acc, peak, total = add_sink(acc, tl.where(is_query, peak, 0.0), total, sink)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        is_scheduled = (row < Q_TILE * GROUP) & (query < scheduled)
        result = tl.where(is_query[:, None], result, 0.0)
        tl.store(
            out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :],
            result.to(out.dtype.element_ty), mask=is_scheduled[:, None] & in_dim,
        )
        if FILL_PADDING and not SPLIT:
            first = tl.load(query_starts + num_requests) + request + tile * num_tokens  # tile 0 does it
            zero_padding(out, first, num_requests, num_tokens, kv_head * GROUP, out_token_stride, out_head_stride,
                         D, D_PAD, GROUP, GROUP_PAD)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _merge_kernel(
    part_out, part_lse, query_starts, lengths, live, key_starts, sinks, out,
    window, num_tokens, num_requests, split_size, num_splits, max_query, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_STARTS: tl.constexpr,
    FILL_PADDING: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    head = tl.program_id(0)
    query = tl.program_id(1)
    request = tl.program_id(2)
    wait_for_inputs(PDL)
    first_token = tl.load(query_starts + request)
    scheduled = tl.load(query_starts + request + 1) - first_token
    length = tl.load(lengths + request)
    num_live = tl.load(live + request)
    first_key = 0
    if HAS_STARTS:
        first_key = tl.load(key_starts + request)
    base, size, num_active = _split_geometry(
        length, num_live, window, first_key, split_size, num_splits, BLOCK_N, HAS_WINDOW
    )
    is_written = num_active == 1  # by its only split
    num_active = tl.where(query < num_live, num_active, 0)
    num_active = tl.where(is_written, 0, num_active)

    dim = tl.arange(0, D_PAD)
    token = (first_token + query).to(tl.int64)
    part = (token * HEADS + head) * num_splits
    # One-element axes, so that the merge reads as the key loop does.
    acc = tl.zeros([1, D_PAD], dtype=tl.float32)
    peak = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for start in range(0, num_active, MERGE):
        split = start + tl.arange(0, MERGE)
        valid = split < num_active
        lse = tl.load(part_lse + part + split, mask=valid, other=float("-inf"))
        value = tl.load(
            part_out + (part + split)[:, None] * D_PAD + dim[None, :], mask=valid[:, None], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(lse - offset)
        shrink = tl.exp2(peak - offset)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, None] * value, axis=0)[None, :]
        peak = new_peak
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        acc, peak, total = add_sink(acc, peak, total, sink)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = out + token * out_token_stride + head * out_head_stride + dim[None, :]
    mask = (dim < D)[None, :] & (query < scheduled) & (not is_written)
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)
    if FILL_PADDING:
        first = tl.load(query_starts + num_requests) + request * max_query + query
        zero_padding(out, first, num_requests * max_query, num_tokens, head, out_token_stride, out_head_stride,
                     D, D_PAD, 1, 1)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["lengths"])
def _order_kernel(lengths, order, num_requests, PAD: tl.constexpr, ROWS: tl.constexpr):
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, PAD)
    own = tl.load(lengths + request, mask=request < num_requests, other=-1)[:, None]
    theirs = tl.load(lengths + other, mask=other < num_requests, other=-1)[None, :]
    is_before = (theirs > own) | ((theirs == own) & (other[None, :] < request[:, None]))
    rank = tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(order + rank, request, mask=request < num_requests)


def longest_first(lengths: torch.Tensor) -> torch.Tensor:
    """[requests] int32: requests by falling length, for `decode_attention`'s order."""
    require_tensor("longest_first", "lengths", lengths, (None,), lengths.device, (torch.int32,))
    num_requests = lengths.shape[0]
    order = torch.empty_like(lengths)
    _order_kernel[(triton.cdiv(num_requests, 16),)](
        lengths, order, num_requests, PAD=next_power_of_two(num_requests), ROWS=16, num_warps=4
    )
    return order


@dataclass(frozen=True)
class DecodeConfig:
    """How one launch is cut: rows and keys per tile, and what the compiler is told."""

    block_n: int
    max_rows: int  # rows of the largest tile, where one query's heads fit
    num_warps: int = 4
    num_stages: int = 5


def decode_config(padded_dim: int, num_requests: int | None = None) -> DecodeConfig:
    """Measured on an H200. With few requests latency is all, and wide key tiles have the fewest turns."""
    # A key tile waits for its page ids, so the compiler spends three of the stages before the first buffer pays.
    if num_requests is None:  # one choice for all
        num_requests = 1 << 30
    if padded_dim <= 128:
        if num_requests <= 2:
            return DecodeConfig(block_n=128, max_rows=64, num_warps=8, num_stages=4)
        if num_requests <= 16:
            return DecodeConfig(block_n=128, max_rows=64, num_warps=4, num_stages=3)
        return DecodeConfig(block_n=32, max_rows=64)
    if padded_dim <= 256:
        if num_requests <= 16:
            return DecodeConfig(block_n=64, max_rows=64, num_warps=8, num_stages=2)
        return DecodeConfig(block_n=32, max_rows=32)
    if num_requests <= 64:
        return DecodeConfig(block_n=64, max_rows=32, num_warps=8, num_stages=2)
    return DecodeConfig(block_n=32, max_rows=16, num_warps=4, num_stages=2)


def decode_splits(programs: int, max_keys: int, sms: int) -> int:
    """Splits of one call without a fixed split size: two programs per multiprocessor, one split for a full card."""
    return max(1, min(triton.cdiv(max_keys, MIN_SPLIT), 2 * sms // max(1, programs), 64))


def _plan_splits(
    programs: int, sms: int, max_query: int, max_length: int, window: int | None,
    split_size: int | None, num_splits: int | None,
) -> tuple[int, int]:
    """(number of splits, least keys per split). A window needs no more splits than it has keys."""
    if split_size is not None:  # the window may begin anywhere in its first split
        keys = max_length if window is None else min(max_length, window + max_query - 1 + split_size)
        return max(1, triton.cdiv(keys, split_size)), split_size
    if num_splits is None:
        keys = max_length if window is None else min(max_length, window + max_query - 1)
        num_splits = decode_splits(programs, keys, sms)
    return num_splits, MIN_SPLIT


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    key_starts: torch.Tensor | None = None, order: torch.Tensor | None = None, max_query: int, max_length: int,
    split_size: int | None = None, num_splits: int | None = None, out: torch.Tensor | None = None,
    fill_padding: bool = True, config: DecodeConfig | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """q [tokens, heads, dim] against paged keys and values; returns [tokens, heads, dim].

    Every token row of `out` is written: dead tokens and, with fill_padding, the rows past the last request get zeros.
    key_starts [requests] is the first key each request may see; order [requests] the one in which they are served. A
    batch that shares `out` with another call passes fill_padding=False. `split_size` fixes the keys per split, for
    results that do not depend on the grid; `num_splits` only overrides the number chosen from the bounds.
    """
    name = "decode_attention"
    pdl = uses_pdl(q.device) if pdl is None else pdl
    shape = check_attention(name, q, k_cache, v_cache, page_table, query_starts, lengths, live, sinks, out,
                            window, softcap, key_starts)
    # With a fixed split size results must not depend on the number of requests, so neither may the tiles.
    config = config or decode_config(shape.padded_dim, shape.num_requests if split_size is None else None)
    require(max_query >= 1, name, "max_query", f"is {max_query}, expected at least 1")
    require(max_length <= page_table.shape[1] * shape.page_size, name, "max_length",
            f"is {max_length}, but page_table has {page_table.shape[1]} columns of {shape.page_size} tokens")
    require(split_size is None or (split_size > 0 and split_size % config.block_n == 0), name, "split_size",
            f"is {split_size}, expected a multiple of {config.block_n}")
    require(num_splits is None or num_splits >= 1, name, "num_splits", f"is {num_splits}, expected at least 1")
    if order is not None:
        require_tensor(name, "order", order, (shape.num_requests,), q.device, (torch.int32,))
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if shape.num_tokens == 0 or shape.num_requests == 0:
        return out
    group = shape.heads_per_kv
    # As many queries as the tile's rows hold: a kernel then serves every number of queries of its tile.
    block_m = max(16, next_power_of_two(min(max_query, max(1, config.max_rows // group)) * group))
    q_tile = block_m // group
    num_tiles = triton.cdiv(max_query, q_tile)
    programs = shape.num_requests * shape.num_kv_heads * num_tiles
    num_splits, split_size = _plan_splits(
        programs, num_sms(q.device), max_query, max_length, window, split_size, num_splits
    )
    is_split = num_splits > 1
    parts = shape.num_tokens * shape.num_heads * num_splits if is_split else 1
    part_out = torch.empty(parts, shape.padded_dim, dtype=torch.float32, device=q.device) if is_split else out
    part_lse = torch.empty(parts, dtype=torch.float32, device=q.device) if is_split else out
    shared = {"HEADS": shape.num_heads, "D": shape.head_dim, "D_PAD": shape.padded_dim, "BLOCK_N": config.block_n,
              "HAS_WINDOW": window is not None, "HAS_SINKS": sinks is not None,
              "HAS_STARTS": key_starts is not None, "PDL": pdl, **pdl_options(pdl)}
    sinks = q if sinks is None else sinks
    key_starts = lengths if key_starts is None else key_starts
    _decode_kernel[(shape.num_kv_heads, shape.num_requests, num_splits * num_tiles)](
        q, k_cache, v_cache, page_table, query_starts, lengths, live, key_starts, lengths if order is None else order,
        sinks, out, part_out, part_lse, scale, softcap or 1.0, window or 0, shape.num_tokens, shape.num_requests,
        split_size, num_splits, num_tiles,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), page_table.stride(0), out.stride(0), out.stride(1),
        GROUP=group, GROUP_PAD=next_power_of_two(group), PAGE=shape.page_size, Q_TILE=q_tile,
        BLOCK_M=block_m, SPLIT=is_split, HAS_SOFTCAP=softcap is not None, HAS_ORDER=order is not None,
        FILL_PADDING=fill_padding, num_warps=config.num_warps, num_stages=config.num_stages, **shared,
    )
    if is_split:
        _merge_kernel[(shape.num_heads, max_query, shape.num_requests)](
            part_out, part_lse, query_starts, lengths, live, key_starts, sinks, out, window or 0, shape.num_tokens,
            shape.num_requests, split_size, num_splits, max_query, out.stride(0), out.stride(1),
            MERGE=_MERGE, FILL_PADDING=fill_padding, num_warps=4, **shared,
        )
    return out
