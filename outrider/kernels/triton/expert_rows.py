"""Products of one or two token rows with the experts they chose, on the vector units: one program for a few weight rows
of one pair, as in `matvec`. A shared expert of the same shape can be served in the same launch.

So few pairs seldom share an expert, and then tiles for tensor cores are mostly empty: many small programs keep more
reads on their way. A pair's result depends on no other pair.
"""

from __future__ import annotations

import torch

import triton.language as tl
from outrider.kernels.triton.common import (
    cdiv,
    gated,
    next_power_of_two,
    pdl_options,
    release_dependents,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel
from outrider.kernels.triton.thin_linear import ThinConfig, load_weight

MAX_PAIRS = 16
_SILU, _GELU_TANH, _RELU2 = (tl.constexpr(i) for i in range(1, 4))


@kernel
def _expert_rows_kernel(
    x, weight, shared, out, ids, x_stride, expert_stride, weight_stride, out_stride, P, first_shared, N,
    K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = activation(x[pair // PAIRS_PER_ROW] times its expert's weight [rows, K] transposed); N outputs.

    With a gated activation weight rows 0 to N are the gate and the next N are what it gates. From number P on, pairs
    are token rows with the shared expert: pair P takes row first_shared of x."""
    GATED: tl.constexpr = (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH)
    release_dependents(PDL)
    wait_for_inputs(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    own, x_row = weight, x
    if SHARED:
        if pair < P:
            own += tl.load(ids + pair) * expert_stride
            x_row += pair // PAIRS_PER_ROW * x_stride
        else:
            own = shared
            x_row += (pair - P + first_shared) * x_stride
    else:
        own += tl.load(ids + pair) * expert_stride
        x_row += pair // PAIRS_PER_ROW * x_stride
    weight_row = own + row.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        value = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += load_weight(weight_row + column[None, :], in_rows, inside, K % BLOCK_K == 0).to(tl.float32) * value
        if GATED:
            w = load_weight(weight_row + N * weight_stride + column[None, :], in_rows, inside, K % BLOCK_K == 0)
            up += w.to(tl.float32) * value
    result = tl.sum(acc, axis=1)
    if GATED:
        result = gated(result, tl.sum(up, axis=1), ACTIVATION == _GELU_TANH)
    elif ACTIVATION == _RELU2:
        result = tl.where(result < 0, 0.0, result * result)  # not a maximum, which would turn NaN into a number
    tl.store(out + pair * out_stride + row, result.to(out.dtype.element_ty), mask=in_rows)


def expert_rows_config(k: int) -> ThinConfig:
    """8 columns for each thread, as in `matvec_config`."""
    if k >= 2048:
        return ThinConfig(2, 2048, 8, 1)
    return ThinConfig(2, max(128, next_power_of_two(k)), 4, 1)


def expert_rows(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, pairs_per_row: int, n: int, activation: int, pdl: bool,
    shared: torch.Tensor | None = None, config: ThinConfig | None = None,
) -> torch.Tensor:
    """[pairs, n], row p for pair p, from row p // pairs_per_row of x. With a shared expert's weight [rows, k] rows for
    all token rows follow; where x holds one row for each pair, so do theirs. Arguments are checked by the caller."""
    k, num_pairs = weight.shape[2], ids.numel()
    config = config or expert_rows_config(k)
    num_rows = num_pairs + (0 if shared is None else ids.shape[0])
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    _expert_rows_kernel[(cdiv(n, config.block_n), num_rows)](
        x, weight, weight if shared is None else shared, out, ids, x.stride(0), weight.stride(0), weight.stride(1),
        out.stride(0), num_pairs, num_pairs if pairs_per_row == 1 else 0, n, K=k, PAIRS_PER_ROW=pairs_per_row,
        ACTIVATION=activation, SHARED=shared is not None, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out
