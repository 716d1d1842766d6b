"""Shared parts of decode and prefill attention: the loop over a tile's keys, and the checks of their common arguments.

A tile is some query tokens of one request times the query heads of one key/value head, so that keys and values are
read once for all of them. Keys are visited in tiles anchored at position 0. Keys and values outside a tile's range
are never loaded: a page beyond the length, or one that left the window, may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import FLOATS, LOG2E, next_power_of_two, require, require_tensor, tanh

MAX_HEAD_DIM = 1024


@triton.jit
def _load_tile(at, inside, dim, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [keys, D_PAD]; columns past D are 0, and so is what is not inside, where that is asked."""
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
    elif D != D_PAD:
        return tl.load(at, mask=(dim < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def attend_keys(
    q, acc, peak, total, q_position, begin, end, lowest, highest, keys, values, table,
    k_page_stride, k_token_stride, v_page_stride, v_token_stride, scale, softcap, window,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EARLY_VALUES: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):
    """Folds keys [begin, end) into (acc, peak, total): the weighted values, the running maximum in base 2, and the
    sum of weights. Only positions in [lowest, highest) are loaded; without MASKED the caller vouches that all of
    [begin, end) is visible to every query. EARLY_VALUES: a tile's values are fetched together with its keys. STAGES:
    tiles on their way at a time, instead of the kernel's own number."""
    dim = tl.arange(0, D_PAD)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        inside = (position >= lowest) & (position < highest)
        if MASKED:
            page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + position // PAGE).to(tl.int64)
        k_at = keys + (page * k_page_stride + (position % PAGE) * k_token_stride)[:, None] + dim[None, :]
        v_at = values + (page * v_page_stride + (position % PAGE) * v_token_stride)[:, None] + dim[None, :]
        k = _load_tile(k_at, inside, dim, D, D_PAD, MASKED)
        if EARLY_VALUES:
            v = _load_tile(v_at, inside, dim, D, D_PAD, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * tanh(score / softcap)
        score = score * LOG2E
        if MASKED:
            visible = inside[None, :] & (position[None, :] <= q_position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[None, :] > q_position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        # A query that has seen no key yet keeps -inf: subtract 0 instead, as -inf minus -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, axis=1)
        if not EARLY_VALUES:
            v = _load_tile(v_at, inside, dim, D, D_PAD, MASKED)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def find_queries(
    tile, kv_head, first_token, length, num_live, Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr
):
    """The rows of a tile: query token of the request, head, whether the row is a live query, its position (-1 where it
    is none), token row."""
    row = tl.arange(0, BLOCK_M)
    query = tile * Q_TILE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_query = (row < Q_TILE * GROUP) & (query < num_live)
    q_position = tl.where(is_query, length - num_live + query, -1)
    return query, head, is_query, q_position, (first_token + query).to(tl.int64)


@triton.jit
def load_queries(q, token, head, is_query, dim, in_dim, q_token_stride, q_head_stride):
    return tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=is_query[:, None] & in_dim, other=0.0,
    )


@triton.jit
def store_result(
    out, acc, total, token, query, head, is_query, scheduled, dim, in_dim, out_token_stride, out_head_stride,
    Q_TILE: tl.constexpr, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
):
    """The mean of the values by their weights; scheduled tokens that are not live get 0."""
    row = tl.arange(0, BLOCK_M)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    is_scheduled = (row < Q_TILE * GROUP) & (query < scheduled)
    result = tl.where(is_query[:, None], result, 0.0)
    tl.store(
        out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :],
        result.to(out.dtype.element_ty), mask=is_scheduled[:, None] & in_dim,
    )


@triton.jit
def zero_padding(
    out, first, step, num_tokens, head_offset, out_token_stride, out_head_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
):
    """Zeroes HEADS heads of the token rows first, first + step, ...: what no request owns must not read as NaN."""
    head = tl.arange(0, HEADS_PAD)
    dim = tl.arange(0, D_PAD)
    at = out + first.to(tl.int64) * out_token_stride + (head_offset + head)[:, None] * out_head_stride + dim[None, :]
    valid = (head < HEADS)[:, None] & (dim < D)[None, :]
    zero = tl.zeros([HEADS_PAD, D_PAD], dtype=out.dtype.element_ty)
    for _ in range(first, num_tokens, step):
        tl.store(at, zero, mask=valid)
        at += step * out_token_stride


class AttentionShape(NamedTuple):
    """Host integers that a checked call of either kernel needs."""

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
    out: torch.Tensor | None, window: int | None, softcap: float | None, key_starts: torch.Tensor | None = None,
) -> AttentionShape:
    device, int32 = q.device, (torch.int32,)
    require_tensor(kernel, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, head_dim = q.shape
    require(0 < head_dim <= MAX_HEAD_DIM, kernel, "q", f"has head_dim {head_dim}, allowed are 1 to {MAX_HEAD_DIM}")
    require_tensor(kernel, "k_cache", k_cache, (None, None, None, head_dim), device, (q.dtype,))
    require_tensor(kernel, "v_cache", v_cache, k_cache.shape, device, (q.dtype,))
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
    if out is not None:
        require_tensor(kernel, "out", out, q.shape, device, (q.dtype,))
    require(window is None or window > 0, kernel, "window", f"is {window}, expected None or at least 1")
    require(softcap is None or softcap > 0, kernel, "softcap", f"is {softcap}, expected None or greater than 0")
    return AttentionShape(num_tokens, num_requests, num_heads, num_kv_heads, head_dim, page_size)
