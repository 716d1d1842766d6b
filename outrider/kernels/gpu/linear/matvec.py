"""Linear layers for 1 to 4 token rows without tensor cores: any weight for one row, small weights for two to four.

With more rows, arithmetic would take longer than reading a large weight. Every row's sums are made in the same order,
whatever the number of rows, so a row has the same bits alone and among others. The inner dimension is not split.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    pdl_options,
    refuse,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.linear.thin import ThinConfig, is_small, load_weight, prefetch_rows

MAX_ROWS = 4
_SILU, _GELU_TANH, _RELU2 = (tl.constexpr(i) for i in range(1, 4))
TINY_WEIGHT = 7 << 20  # bytes
_MANY_OUTPUTS = 6144  # the fewest for which tiles of eight weight rows were measured
GATED = ("silu", "gelu_pytorch_tanh")
ACTIVATIONS = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "relu2": 3}


@triton.jit
def _load_row(x, inside):
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _add_columns(acc, up, w, u, x, x_stride, column, K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Add the products of some columns to (acc, up) of four token rows. Token rows past the last one are not
    changed."""
    w, inside = w.to(tl.float32), column < K
    a0, a1, a2, a3 = acc
    b0, b1, b2, b3 = up
    v0 = _load_row(x + column, inside)
    a0 += w * v0
    if ROWS > 1:
        v1 = _load_row(x + x_stride + column, inside)
        a1 += w * v1
    if ROWS > 2:
        v2 = _load_row(x + 2 * x_stride + column, inside)
        a2 += w * v2
    if ROWS > 3:
        v3 = _load_row(x + 3 * x_stride + column, inside)
        a3 += w * v3
    if GATED:
        u = u.to(tl.float32)
        b0 += u * v0
        if ROWS > 1:
            b1 += u * v1
        if ROWS > 2:
            b2 += u * v2
        if ROWS > 3:
            b3 += u * v3
    return (a0, a1, a2, a3), (b0, b1, b2, b3)


@triton.jit
def _load_added(residual, row, in_rows, HAS_RESIDUAL: tl.constexpr):
    """Load the residual values that are added to one token row's outputs; zero if there are none."""
    if HAS_RESIDUAL:
        return tl.load(residual + row, mask=in_rows, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _finish(acc, up, added, row, in_rows, bias, out, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
            HAS_RESIDUAL: tl.constexpr):
    """Store one token row's outputs: its sums with bias, activation and residual."""
    result = tl.sum(acc, axis=1)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        result += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)
    if (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH):
        # Rounded as the two products would be, had they been stored.
        result = gated(result.to(dtype).to(tl.float32), tl.sum(up, axis=1).to(dtype).to(tl.float32),
                       ACTIVATION == _GELU_TANH)
    elif ACTIVATION == _RELU2:
        result = result.to(dtype).to(tl.float32)
        result = tl.where(result < 0, 0.0, result * result)  # not a maximum, which would turn NaN into a number
    if HAS_RESIDUAL:
        result += added
    tl.store(out + row, result.to(dtype), mask=in_rows)


@kernel
def _matvec_kernel(
    x, weight, bias, residual, out, x_stride, weight_stride, residual_stride, out_stride, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):
    GATED: tl.constexpr = (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH)
    release_dependents(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    if PDL:
        prefetch_rows(weight, row, weight_stride, N, K)
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    up_row = weight_row + N * weight_stride if GATED else weight_row
    none = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    sums = (none, none, none, none), (none, none, none, none)
    FIRST: tl.constexpr = BLOCK_K if PDL else 0
    # The first columns of the weight are read while the kernel before still runs, which has not written them. Where
    # none runs, a loop over all columns alike asks for more of them at a time.
    if PDL:
        column = tl.arange(0, BLOCK_K)
        w = load_weight(weight_row + column[None, :], in_rows, column < K, K % BLOCK_K == 0)
        u = load_weight(up_row + column[None, :], in_rows, column < K, K % BLOCK_K == 0) if GATED else w
    wait_for_inputs(PDL)
    # Loads are not moved across the sums of `_finish`, so what is added is asked for here.
    added0 = _load_added(residual, row, in_rows, HAS_RESIDUAL)
    added1, added2, added3 = added0, added0, added0
    if ROWS > 1:
        added1 = _load_added(residual + residual_stride, row, in_rows, HAS_RESIDUAL)
    if ROWS > 2:
        added2 = _load_added(residual + 2 * residual_stride, row, in_rows, HAS_RESIDUAL)
    if ROWS > 3:
        added3 = _load_added(residual + 3 * residual_stride, row, in_rows, HAS_RESIDUAL)
    if PDL:
        sums = _add_columns(sums[0], sums[1], w, u, x, x_stride, column, K, ROWS, GATED)
    for start in range(FIRST, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        w = load_weight(weight_row + column[None, :], in_rows, column < K, K % BLOCK_K == 0)
        u = load_weight(up_row + column[None, :], in_rows, column < K, K % BLOCK_K == 0) if GATED else w
        sums = _add_columns(sums[0], sums[1], w, u, x, x_stride, column, K, ROWS, GATED)
    acc, up = sums
    _finish(acc[0], up[0], added0, row, in_rows, bias, out, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
    if ROWS > 1:
        _finish(acc[1], up[1], added1, row, in_rows, bias, out + out_stride, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
    if ROWS > 2:
        _finish(acc[2], up[2], added2, row, in_rows, bias, out + 2 * out_stride, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
    if ROWS > 3:
        _finish(acc[3], up[3], added3, row, in_rows, bias, out + 3 * out_stride, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)


@lru_cache(maxsize=256)
def matvec_config(n: int, k: int, *, is_small: bool, is_gated: bool = False) -> ThinConfig:
    """Return the tile for n outputs of k inputs. Each thread has 8 columns, so that inputs need no exchange between
    threads. One or two weight rows per program were fastest at nearly every shape measured, because many programs keep
    more reads in flight. The exception is a large weight with between one and two tiles of 2048 columns: tiles that
    divide its columns leave no thread idle, but are slower with the second sum of a gated product."""
    if k < 2048:
        return ThinConfig(2, 1024, 4, 1)
    if is_small:
        return ThinConfig(2, 2048, 8, 1)
    if 2048 < k < 4096 and k % 512 == 0 and n >= _MANY_OUTPUTS and not is_gated:
        return ThinConfig(8, 512, 4, 1)
    return ThinConfig(1 if k >= 4096 else 2, 2048, 8, 1)


def matvec(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    config: ThinConfig | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Return activation(x [rows, k] times weight [n, k] transposed, plus bias [n]) plus residual [rows, n]; 1 to 4
    rows.

    activation: None, "relu2", or act(gate) * up with "silu" or "gelu_pytorch_tanh" and a weight [2 * n, k] that holds
    the gate rows, then the up rows. `out` may be `residual` itself: each element is read and written by one program.
    """
    name, device, num_rows = "matvec", x.device, x.shape[0]
    if activation not in ACTIVATIONS:
        refuse(name, "activation", f"is {activation!r}, known are {list(ACTIVATIONS)[1:]}")
    require_tensor(name, "weight", weight, (None, None), device, (x.dtype,))
    is_gated = activation in GATED
    n, k = weight.shape
    n //= 2 if is_gated else 1
    require_tensor(name, "x", x, (num_rows, k), device, FLOATS)
    if not 1 <= num_rows <= MAX_ROWS:
        refuse(name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    if bias is not None:
        require_tensor(name, "bias", bias, (n,), device, FLOATS)
        require(not is_gated, name, "bias", "goes with no gated activation")
    if residual is not None:
        require_tensor(name, "residual", residual, (num_rows, n), device, FLOATS)
    if out is None:
        out = torch.empty(num_rows, n, dtype=out_dtype or x.dtype, device=device)
    else:
        require_tensor(name, "out", out, (num_rows, n), device, FLOATS if out_dtype is None else (out_dtype,))
    # A product of many waves that starts early only takes the place of the kernel before it.
    small = is_small(weight)
    pdl = small and uses_pdl(device) if pdl is None else pdl
    config = config or matvec_config(n, k, is_small=small, is_gated=is_gated)
    added = x if residual is None else residual
    _matvec_kernel[(cdiv(n, config.block_n),)](
        x, weight, x if bias is None else bias, added, out, x.stride(0), weight.stride(0), added.stride(0),
        out.stride(0), n, K=k, ROWS=num_rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        ACTIVATION=ACTIVATIONS[activation], HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(pdl),
    )
    return out


def is_fastest(x: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
    """Whether this kernel is the fastest: for one token row, or for up to four rows and a weight so small that it is
    read before tensor cores would have started."""
    num_rows = x.shape[0]
    return num_rows == 1 or (1 < num_rows <= MAX_ROWS and weight.numel() * weight.element_size() <= TINY_WEIGHT)


def matvec_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return matvec(x, weight, out_dtype=torch.float32)


def gated_matvec(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    return matvec(x, weight, activation=activation)


def relu2_matvec(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return matvec(x, weight, activation="relu2")


def add_matvec(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    matvec(x, weight, bias, residual=residual, out=residual)
