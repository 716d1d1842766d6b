"""Linear layers with few outputs for 2 to 16 token rows: the warps of each program share the inner dimension.

With few outputs there are few programs, and one warp's loop over the inner dimension would wait for memory again and
again. Here every program loads several parts of it at the same time and adds them up at the end, always in the same
order. A token row's result does not depend on other rows, nor on their number.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel

MAX_ROWS = 16
_PARTS, _COLUMNS = 4, 128  # of the inner dimension: parts, and columns of each part at a time


@kernel(do_not_specialize=["M"])
def _split_kernel(
    x, weight, residual, out, x_stride, weight_stride, residual_stride, out_stride, M, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    weight_row = weight + row.to(tl.int64)[None, None, :] * weight_stride
    mask = (token < M)[:, None] & (row < N)[None, :]
    if HAS_RESIDUAL:  # asked for before the sums, which no load is moved across
        at = residual + token[:, None] * residual_stride + row[None, :]
        added = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([PARTS, ROWS, BLOCK_N], dtype=tl.float32)
    for start in range(0, K // PARTS, BLOCK_K):
        column = (part * (K // PARTS))[:, None] + start + tl.arange(0, BLOCK_K)[None, :]
        w = tl.load(weight_row + column[:, :, None], mask=(row < N)[None, None, :], other=0.0,
                    eviction_policy="evict_first")
        value = tl.load(x + token[None, :, None] * x_stride + column[:, None, :], mask=(token < M)[None, :, None],
                        other=0.0)
        acc = tl.dot(value, w, acc, input_precision="ieee")
    result = tl.sum(acc, axis=0)
    if HAS_RESIDUAL:
        result += added
    tl.store(out + token[:, None] * out_stride + row[None, :], result.to(out.dtype.element_ty), mask=mask)


def is_fastest(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether this kernel is the fastest: for up to 16 token rows and a weight [n, k] from 1024 x 2048 to 4096 x
    4096."""
    n, k = weight.shape
    return bias is None and 0 < x.shape[0] <= MAX_ROWS and n <= 4096 and k <= 4096 and k % (_PARTS * _COLUMNS) == 0


def split_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: None = None, *, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply x [rows, k] with weight [n, k] transposed, plus residual [rows, n], which `out` may be; 1 to 16 rows."""
    name, device = "split_linear", x.device
    require(bias is None, name, "bias", "is not supported")
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    num_rows, (n, k) = x.shape[0], weight.shape
    require_tensor(name, "weight", weight, (None, x.shape[1]), device, (x.dtype,))
    require(1 <= num_rows <= MAX_ROWS, name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    require(k % (_PARTS * _COLUMNS) == 0, name, "weight", f"has {k} columns, expected a multiple of 512")
    if residual is not None:
        require_tensor(name, "residual", residual, (num_rows, n), device, FLOATS)
    if out is None:
        out = torch.empty(num_rows, n, dtype=x.dtype, device=device)
    else:
        require_tensor(name, "out", out, (num_rows, n), device, FLOATS)
    pdl = uses_pdl(device) if pdl is None else pdl
    block_n = 8 if n <= 2688 else 16
    added = x if residual is None else residual
    _split_kernel[(cdiv(n, block_n),)](
        x, weight, added, out, x.stride(0), weight.stride(0), added.stride(0), out.stride(0), num_rows, n,
        K=k, BLOCK_N=block_n, BLOCK_K=_COLUMNS, PARTS=_PARTS, ROWS=MAX_ROWS, HAS_RESIDUAL=residual is not None,
        PDL=pdl, num_warps=4, num_stages=3, **pdl_options(pdl),
    )
    return out
