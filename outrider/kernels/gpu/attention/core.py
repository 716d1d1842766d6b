"""Device functions shared by the kernels of decode, prefill and exact attention (find a tile's queries and keys, loop
over the keys, store the result), and the host's checks of their common arguments.

A tile is some query tokens of one request times the query heads of one key/value head, so that keys and values are read
once for all of them. Keys are visited in tiles that begin at multiples of the tile size. Keys and values outside of a
tile's range are never loaded, because a page beyond the length, or one that left the window, may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.attention.windows import first_seen
from outrider.kernels.gpu.common import FLOATS, LOG2E, next_power_of_two, require, require_tensor, tanh
from outrider.kernels.gpu.pages.fp8 import PAIRS_BELOW, check_cache_dtype, first_of_pairs, second_of_pairs

MAX_HEAD_DIM = 1024


@triton.jit
def _load_tile(at, inside, dim, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values [keys, D_PAD]. Columns past D are 0, and with MASKED also keys that are not inside."""
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    elif D != D_PAD:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _load_values(
    v_head, v_row, inside, dim, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr, PAIRED: tl.constexpr
):
    """Load values [keys, D_PAD] of rows that begin at v_row. PAIRED: load two neighbouring fp8 values as one 16-bit
    number, [keys, D_PAD / 2]."""
    if PAIRED:
        pair = tl.arange(0, D_PAD // 2)
        at = (v_head + v_row).to(tl.pointer_type(tl.int16), bitcast=True)
        return _load_tile(at[:, None] + pair[None, :], inside, pair, D // 2, D_PAD // 2, MASKED)
    else:
        return _load_tile(v_head + v_row[:, None] + dim[None, :], inside, dim, D, D_PAD, MASKED)


class RequestTokens(NamedTuple):
    """A request's token rows in the batch, and its length in the cache."""

    first_token: tl.tensor  # its first token row
    scheduled: tl.tensor  # its token rows
    length: tl.tensor  # its tokens in the cache, live ones included
    num_live: tl.tensor  # its token rows that are queries; the others are dead


class QueryRows(NamedTuple):
    """The query rows [BLOCK_M] of a tile, and the columns of a head."""

    query: tl.tensor  # query token of the request
    head: tl.tensor
    is_query: tl.tensor  # whether the row is a live query
    position: tl.tensor  # -1 where the row is no live query
    token: tl.tensor  # token row
    dim: tl.tensor  # [D_PAD] column
    in_dim: tl.tensor  # [1, D_PAD] whether the column is one of the head's


class PagedHead(NamedTuple):
    """One head's keys and values in all pages, and the page table of one request."""

    k_head: tl.tensor  # the head's keys in page 0
    v_head: tl.tensor
    table: tl.tensor
    k_page_stride: tl.tensor
    k_token_stride: tl.tensor
    v_page_stride: tl.tensor
    v_token_stride: tl.tensor


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """Return the initial sums of a tile: (weighted values, running maximum in base 2, sum of weights)."""
    acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    return acc, peak, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def weigh_scores(score, peak, total):
    """Compute a tile's softmax weights from scores in base 2, which are -inf where a query does not see a key. Returns
    (weights, factor for everything summed before, new peak, new sum of weights)."""
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    # A query that has seen no key yet keeps -inf: subtract 0 instead, as -inf minus -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    return weight, shrink, new_peak, total * shrink + tl.sum(weight, axis=1)


@triton.jit
def add_sinks(sinks, head, exists, peak, total, HAS_SINKS: tl.constexpr):
    """Add the weight of an attention sink to the sum of weights. A sink is one more key, with value 0 and a score per
    head in `sinks`. A sink far above all scores makes the sum infinite, and the result 0."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=exists, other=float("-inf")).to(tl.float32)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total += tl.exp2(tl.fma(sink, LOG2E, -base))
    return total


@triton.jit
def attend_keys(
    q, acc, peak, total, q_position, begin, end, lowest, highest, pages, scale, softcap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW_KIND: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EARLY_VALUES: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):
    """Add keys [begin, end) of a `PagedHead` to (acc, peak, total): weighted values, running maximum in base 2, sum of
    weights. Only positions in [lowest, highest) are loaded; without MASKED the caller guarantees that every query sees
    all of [begin, end). EARLY_VALUES: a tile's values are fetched together with its keys. STAGES: overrides how many
    tiles the kernel loads ahead. For an fp8 cache, `scale` may be [rows, 1], one number for each query's scores, and
    tiles with few rows multiply values in pairs (`pages/fp8.py`)."""
    dim = tl.arange(0, D_PAD)
    IN_FP8: tl.constexpr = pages.v_head.dtype.element_ty == tl.float8e4nv and q.dtype == tl.float16
    PAIRED: tl.constexpr = IN_FP8 and D % 2 == 0 and q.shape[0] < PAIRS_BELOW
    if PAIRED:
        even, odd = tl.split(acc.reshape(acc.shape[0], D_PAD // 2, 2))
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        inside = (position >= lowest) & (position < highest)
        if MASKED:
            page = tl.load(pages.table + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages.table + position // PAGE).to(tl.int64)
        k_row = page * pages.k_page_stride + (position % PAGE) * pages.k_token_stride
        k_at = pages.k_head + k_row[:, None] + dim[None, :]
        v_row = page * pages.v_page_stride + (position % PAGE) * pages.v_token_stride
        k = _load_tile(k_at, inside, dim, D, D_PAD, MASKED).to(q.dtype)
        if EARLY_VALUES:
            v = _load_values(pages.v_head, v_row, inside, dim, D, D_PAD, MASKED, PAIRED)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * tanh(score / softcap)
        score = score * LOG2E
        if MASKED:
            visible = inside[None, :] & (position[None, :] <= q_position[:, None])
            if WINDOW_KIND:
                visible = visible & (position[None, :] >= first_seen(q_position, window, WINDOW_KIND)[:, None])
            score = tl.where(visible, score, float("-inf"))
        weight, shrink, peak, total = weigh_scores(score, peak, total)
        if not EARLY_VALUES:
            v = _load_values(pages.v_head, v_row, inside, dim, D, D_PAD, MASKED, PAIRED)
        weight = weight.to(q.dtype)
        if PAIRED:
            even = tl.dot(weight, first_of_pairs(v), even * shrink[:, None], input_precision="ieee")
            odd = tl.dot(weight, second_of_pairs(v), odd * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weight, v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    if PAIRED:
        acc = tl.join(even, odd).reshape(acc.shape[0], D_PAD)
    return acc, peak, total


@triton.jit
def load_request(query_starts, lengths, live, request, exists):
    """Load the `RequestTokens` of a tile's request. For a program without a tile (`exists` is false) it has no token
    rows."""
    first_token = tl.load(query_starts + request)
    scheduled = tl.where(exists, tl.load(query_starts + request + 1) - first_token, 0)
    return RequestTokens(first_token, scheduled, tl.load(lengths + request),
                         tl.where(exists, tl.load(live + request), 0))


@triton.jit
def find_queries(
    tile, kv_head, tokens, D: tl.constexpr, D_PAD: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the `QueryRows` of a tile of a request's `RequestTokens`."""
    row = tl.arange(0, BLOCK_M)
    query = tile * Q_TILE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_query = (row < Q_TILE * GROUP) & (query < tokens.num_live)
    position = tl.where(is_query, tokens.length - tokens.num_live + query, -1)
    token = (tokens.first_token + query).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    return QueryRows(query, head, is_query, position, token, dim, (dim < D)[None, :])


@triton.jit
def first_position(tile, tokens, Q_TILE: tl.constexpr):
    """Return the position of a tile's first query."""
    return tokens.length - tokens.num_live + tile * Q_TILE


@triton.jit
def end_of_keys(tile, tokens, Q_TILE: tl.constexpr):
    """Return the position after the last key that any query of a tile sees; 0 if the tile has no live query."""
    context = tokens.length - tokens.num_live
    return tl.where(tile * Q_TILE < tokens.num_live, context + tl.minimum(tokens.num_live, (tile + 1) * Q_TILE), 0)


@triton.jit
def load_queries(q, rows, q_token_stride, q_head_stride):
    return tl.load(
        q + rows.token[:, None] * q_token_stride + rows.head[:, None] * q_head_stride + rows.dim[None, :],
        mask=rows.is_query[:, None] & rows.in_dim, other=0.0,
    )


@triton.jit
def store_result(
    out, acc, total, rows, scheduled, out_token_stride, out_head_stride,
    Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):
    """Store a tile's results: weighted values divided by the sum of weights. Scheduled tokens that are not live get
    0."""
    row = tl.arange(0, BLOCK_M)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    is_scheduled = (row < Q_TILE * GROUP) & (rows.query < scheduled)
    result = tl.where(rows.is_query[:, None], result, 0.0)
    tl.store(
        out + rows.token[:, None] * out_token_stride + rows.head[:, None] * out_head_stride + rows.dim[None, :],
        result.to(out.dtype.element_ty), mask=is_scheduled[:, None] & rows.in_dim,
    )


@triton.jit
def zero_padding(
    out, first, step, num_tokens, head_offset, out_token_stride, out_head_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
):
    """Zero HEADS heads of the token rows first, first + step, ..., because rows that no request owns must not read as
    NaN."""
    head = tl.arange(0, HEADS_PAD)
    dim = tl.arange(0, D_PAD)
    at = out + first.to(tl.int64) * out_token_stride + (head_offset + head)[:, None] * out_head_stride + dim[None, :]
    valid = (head < HEADS)[:, None] & (dim < D)[None, :]
    zero = tl.zeros([HEADS_PAD, D_PAD], dtype=out.dtype.element_ty)
    for _ in range(first, num_tokens, step):
        tl.store(at, zero, mask=valid)
        at += step * out_token_stride


class AttentionShape(NamedTuple):
    """The sizes that a launch of any attention kernel needs, known to the host after its checks."""

    num_tokens: int
    num_requests: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        return max(16, next_power_of_two(self.head_dim))


def check_attention(
    kernel: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor,
    out: torch.Tensor | None, window: int | None, is_chunked: bool, softcap: float | None,
    key_starts: torch.Tensor | None = None, scales: HeadScales | None = None, sinks: torch.Tensor | None = None,
) -> AttentionShape:
    device, int32 = q.device, (torch.int32,)
    require_tensor(kernel, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    require(0 < head_dim <= MAX_HEAD_DIM, kernel, "q", f"has head_dim {head_dim}, allowed are 1 to {MAX_HEAD_DIM}")
    check_cache_dtype(kernel, k_cache, v_cache, (None, None, None, head_dim), q, scales)
    page_size, num_kv_heads = k_cache.shape[1:3]
    require(page_size & (page_size - 1) == 0 and page_size > 0, kernel, "k_cache",
            f"has {page_size} tokens per page, expected a power of two")
    require(num_kv_heads > 0 and num_heads % num_kv_heads == 0, kernel, "q",
            f"has {num_heads} heads, expected a multiple of the cache's {num_kv_heads}")
    num_requests = page_table.shape[0]
    require_tensor(kernel, "page_table", page_table, (None, None), device, int32)
    require_tensor(kernel, "lengths", lengths, (num_requests,), device, int32)
    require_tensor(kernel, "query_starts", query_starts, (num_requests + 1,), device, int32)
    require_tensor(kernel, "live", live, (num_requests,), device, int32)
    if key_starts is not None:
        require_tensor(kernel, "key_starts", key_starts, (num_requests,), device, int32)
    if sinks is not None:
        require_tensor(kernel, "sinks", sinks, (num_heads,), device, (torch.float32,))
    if out is not None:
        require_tensor(kernel, "out", out, q.shape, device, (q.dtype,))
    require(window is None or window > 0, kernel, "window", f"is {window}, expected None or at least 1")
    require(window is not None or not is_chunked, kernel, "is_chunked", "is True, expected a window: the chunk's size")
    require(softcap is None or softcap > 0, kernel, "softcap", f"is {softcap}, expected None or greater than 0")
    return AttentionShape(num_tokens, num_requests, num_heads, num_kv_heads, head_dim, page_size)
