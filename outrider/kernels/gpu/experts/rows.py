"""Products of one or two token rows with the experts they chose, without tensor cores, as in `linear/matvec.py`. In the
kernel of the first product a program serves a few weight rows of one pair (token row, expert). In the kernel of the
second product it adds up all pairs of a token row. A shared expert of the same shape is served in the same launches.

So few pairs rarely share an expert, and then tiles for tensor cores are mostly empty; many small programs keep more
reads in flight. A token row's result does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    cdiv,
    gated,
    limited,
    next_power_of_two,
    pdl_options,
    release_dependents,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.linear.thin import ThinConfig, load_weight

MAX_PAIRS = 16
_SILU, _GELU_TANH, _RELU2 = (tl.constexpr(i) for i in range(1, 4))


@triton.jit
def _find_expert(weight, shared, ids, pair, shared_token, expert_stride, PAIRS_PER_ROW: tl.constexpr,
                 SHARED: tl.constexpr):
    """Return (weight of a pair's expert, token row of the pair). A pair below zero stands for token row `shared_token`
    with the shared expert."""
    own, token = shared, shared_token
    if SHARED:
        if pair >= 0:
            own = weight + tl.load(ids + pair) * expert_stride
            token = pair // PAIRS_PER_ROW
    else:
        own = weight + tl.load(ids + pair) * expert_stride
        token = pair // PAIRS_PER_ROW
    return own, token


@triton.jit
def _first_columns(at, early, pair, in_rows, inside, WHOLE: tl.constexpr, SHARED: tl.constexpr):
    """Return the first weights [rows, columns] of a pair's expert in float32; those of the shared expert were loaded
    early."""
    w = load_weight(at, in_rows & (pair >= 0), inside, WHOLE).to(tl.float32)
    if SHARED:
        w = tl.where(pair < 0, early.to(tl.float32), w)
    return w


@kernel
def _expert_rows_kernel(
    x, weight, shared, out, ids, x_stride, expert_stride, weight_stride, out_stride, P, num_shared, N,
    K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Compute a projection of every pair: out[pair] = activation(x[pair // PAIRS_PER_ROW] @ weight[expert of the
    pair].T), with weights [rows, K] and N outputs.

    With a gated activation weight rows 0 to N are the gate and the next N are what it gates. Rows of out from P on are
    token rows with the shared expert. Their programs come first: they need no choice of experts, so they read their
    weights while the router still works."""
    GATED: tl.constexpr = (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH)
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    release_dependents(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    pair = (tl.program_id(1) - num_shared).to(tl.int64)  # below zero with the shared expert
    offset = row.to(tl.int64)[:, None] * weight_stride
    up_offset = offset + N * weight_stride
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    shared_token = pair + num_shared
    early, early_up = None, None
    if SHARED:
        early = load_weight(shared + offset + column[None, :], in_rows & (pair < 0), inside, WHOLE)
        if GATED:
            early_up = load_weight(shared + up_offset + column[None, :], in_rows & (pair < 0), inside, WHOLE)
    wait_for_inputs(PDL)
    own, token = _find_expert(weight, shared, ids, pair, shared_token, expert_stride, PAIRS_PER_ROW, SHARED)
    x_row = x + token * x_stride
    value = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    acc = _first_columns(own + offset + column[None, :], early, pair, in_rows, inside, WHOLE, SHARED) * value
    up = acc
    if GATED:
        up = _first_columns(own + up_offset + column[None, :], early_up, pair, in_rows, inside, WHOLE, SHARED) * value
    for start in range(BLOCK_K, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        value = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += load_weight(own + offset + column[None, :], in_rows, inside, WHOLE).to(tl.float32) * value
        if GATED:
            up += load_weight(own + up_offset + column[None, :], in_rows, inside, WHOLE).to(tl.float32) * value
    result = tl.sum(acc, axis=1)
    if GATED:
        factor = tl.sum(up, axis=1)
        if LIMIT > 0:
            result, factor = limited(result, factor, LIMIT)
        result = gated(result, factor, ACTIVATION == _GELU_TANH)
    elif ACTIVATION == _RELU2:
        result = tl.where(result < 0, 0.0, result * result)  # not a maximum, which would turn NaN into a number
    to = out + tl.where(pair < 0, P + token, pair) * out_stride + row
    tl.store(to, result.to(out.dtype.element_ty), mask=in_rows)


@kernel
def _mix_rows_kernel(
    x, weight, shared, added, out, ids, shares, x_stride, expert_stride, weight_stride, added_stride, out_stride, P, N,
    K: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the second projection and add up each token row's experts. out[token] = the sum over its PAIRS rows of x
    of share * (row @ weight[expert].T), with weights [N, K]; plus x[P + token] @ (shared expert's weight).T, plus
    added[token]."""
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    release_dependents(PDL)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    offset = row.to(tl.int64)[:, None] * weight_stride
    column = tl.arange(0, BLOCK_K)
    if SHARED:  # the first columns are read while the kernel before still runs
        w = load_weight(shared + offset + column[None, :], in_rows, column < K, WHOLE)
    wait_for_inputs(PDL)
    if HAS_ADDED:
        kept = tl.load(added + token * added_stride + row, mask=in_rows, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        for slot in tl.static_range(PAIRS):
            pair = token * PAIRS + slot
            own = weight + tl.load(ids + pair) * expert_stride + offset
            value = tl.load(x + pair * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            value *= tl.load(shares + pair)
            acc += load_weight(own + column[None, :], in_rows, inside, WHOLE).to(tl.float32) * value[None, :]
        if SHARED:
            if start > 0:
                w = load_weight(shared + offset + column[None, :], in_rows, inside, WHOLE)
            value = tl.load(x + (P + token) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            acc += w.to(tl.float32) * value[None, :]
    result = tl.sum(acc, axis=1)
    if HAS_ADDED:
        result = result.to(out.dtype.element_ty).to(tl.float32) + kept  # as if the sum had been stored
    tl.store(out + token * out_stride + row, result.to(out.dtype.element_ty), mask=in_rows)


def expert_rows_config(k: int) -> ThinConfig:
    """Return the tile for k inputs. Each thread has 8 columns, as in `matvec_config`."""
    if k >= 2048:
        return ThinConfig(2, 2048, 8, 1)
    return ThinConfig(2, max(128, next_power_of_two(k)), 4, 1)


def expert_rows(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, n: int, activation: tuple[int, float], pdl: bool,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the first projection of token rows x: [pairs, n], where row p is pair p of ids [tokens, k]. With a shared
    expert's weight [rows, k], rows for all token rows follow. activation: the kernel's number for it, and its limit or
    0. The caller has checked the arguments."""
    k, (num_tokens, top_k) = weight.shape[2], ids.shape
    config = expert_rows_config(k)
    num_shared = 0 if shared is None else num_tokens
    out = torch.empty(ids.numel() + num_shared, n, dtype=x.dtype, device=x.device)
    _expert_rows_kernel[(cdiv(n, config.block_n), len(out))](
        x, weight, weight if shared is None else shared, out, ids, x.stride(0), weight.stride(0), weight.stride(1),
        out.stride(0), ids.numel(), num_shared, n, K=k, PAIRS_PER_ROW=top_k, ACTIVATION=activation[0],
        LIMIT=activation[1], SHARED=shared is not None, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out


def mix_rows(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, pdl: bool,
    shared: torch.Tensor | None = None, added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the second projection: [tokens, n], the results of `expert_rows` times weight [experts, n, k], added up
    by their shares [tokens, top_k] float32, together with the shared expert's weight [n, k] and `added` [tokens, n].
    The caller has checked the arguments."""
    (_, n, k), (num_tokens, top_k) = weight.shape, ids.shape
    config = expert_rows_config(k)
    out = torch.empty(num_tokens, n, dtype=x.dtype, device=x.device)
    kept = out if added is None else added
    _mix_rows_kernel[(cdiv(n, config.block_n), num_tokens)](
        x, weight, weight if shared is None else shared, kept, out, ids, shares, x.stride(0), weight.stride(0),
        weight.stride(1), kept.stride(0), out.stride(0), ids.numel(), n, K=k, PAIRS=top_k, SHARED=shared is not None,
        HAS_ADDED=added is not None, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out
