"""Linear layers for 1 to 16 token rows, where the time is that of reading the weights once.

One row is a matrix-vector product on the vector units; up to 16 rows share one tile on the tensor cores. A row's
result does not depend on the other rows nor, on the tensor-core path, on how many there are: `exact_rows` takes that
path for one row too. There is no split over the inner dimension, so additions always go in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import (
    FLOATS,
    gated,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)

MAX_ROWS = 16
_SMALL_WEIGHT = 16 << 20  # bytes
_LINE = tl.constexpr(128)  # bytes the memory system fetches at once
_NONE, _RMS_NORM, _SILU_MUL, _GELU_TANH_MUL = (tl.constexpr(i) for i in range(4))
_PROLOGUES = {None: 0, "rms_norm": 1, "silu_mul": 2, "gelu_tanh_mul": 3}


@triton.jit
def _prefetch(weight, row, width, N, K: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first lines of this program's weight rows while the kernel before it still runs."""
    bytes_per: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    column = tl.arange(0, LINES) * (_LINE // bytes_per)
    column = tl.minimum(column, K - 1)
    row = tl.minimum(row, N - 1)
    address = (weight + row.to(tl.int64)[:, None] * width + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_inputs(x, norm_weight, column, mask, inside, K: tl.constexpr, PROLOGUE: tl.constexpr, PLUS_ONE: tl.constexpr):
    """(inputs as the product takes them, raw values) of a tile; float32. The scale of a norm is applied at the end."""
    raw = tl.load(x, mask=mask, other=0.0)
    if PROLOGUE == _NONE:
        return raw, raw
    else:
        value = raw.to(tl.float32)
        if PROLOGUE == _RMS_NORM:
            gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
            if PLUS_ONE:
                gain += 1.0
            return (value * gain).to(raw.dtype), value
        else:
            up = tl.load(x + K, mask=mask, other=0.0).to(tl.float32)
            return gated(value, up, PROLOGUE == _GELU_TANH_MUL).to(raw.dtype), value


@triton.jit
def _matvec_kernel(
    x, weight, bias, norm_weight, residual, out, weight_stride, N, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROLOGUE: tl.constexpr, PLUS_ONE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    if PDL:
        _prefetch(weight, row, weight_stride, N, K, BLOCK_N, LINES)
    wait_for_inputs(PDL)
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    square = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        if K % BLOCK_K == 0:
            w = tl.load(weight_row + column[None, :], mask=in_rows[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(weight_row + column[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0,
                        eviction_policy="evict_first")
        value, raw = _load_inputs(x + column, norm_weight, column, inside, inside, K, PROLOGUE, PLUS_ONE)
        if PROLOGUE == _RMS_NORM:
            square += raw * raw
        acc += w.to(tl.float32) * value.to(tl.float32)[None, :]
        if EPILOGUE != _NONE:
            w = tl.load(weight_row + N * weight_stride + column[None, :], mask=in_rows[:, None] & inside[None, :],
                        other=0.0, eviction_policy="evict_first")
            up += w.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(acc, axis=1)
    if PROLOGUE == _RMS_NORM:
        result *= tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    if EPILOGUE != _NONE:
        other = tl.sum(up, axis=1)
        if PROLOGUE == _RMS_NORM:
            other *= tl.rsqrt(tl.sum(square, axis=0) / K + eps)
        # Rounded as the two products would be, had they been stored.
        gate = result.to(out.dtype.element_ty).to(tl.float32)
        result = gated(gate, other.to(out.dtype.element_ty).to(tl.float32), EPILOGUE == _GELU_TANH_MUL)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        result += tl.load(residual + row, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=in_rows)


@triton.jit(do_not_specialize=["M"])
def _thin_kernel(
    x, weight, bias, norm_weight, residual, out, x_stride, weight_stride, residual_stride, out_stride, M, N, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROLOGUE: tl.constexpr, PLUS_ONE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr, EPILOGUE: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    if PDL:
        _prefetch(weight, row, weight_stride, N, K, BLOCK_N, LINES)
    wait_for_inputs(PDL)
    token = tl.arange(0, ROWS)
    in_tokens = token < M
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    x_row = x + token[:, None] * x_stride
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    square = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        if K % BLOCK_K == 0:
            w = tl.load(weight_row + column[None, :], mask=in_rows[:, None], other=0.0, eviction_policy="evict_first")
            mask = in_tokens[:, None]
        else:
            w = tl.load(weight_row + column[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0,
                        eviction_policy="evict_first")
            mask = in_tokens[:, None] & inside[None, :]
        value, raw = _load_inputs(x_row + column[None, :], norm_weight, column[None, :], mask, inside[None, :],
                                  K, PROLOGUE, PLUS_ONE)
        if PROLOGUE == _RMS_NORM:
            square += raw * raw
        acc = tl.dot(value, tl.trans(w), acc, input_precision="ieee")
        if EPILOGUE != _NONE:
            w = tl.load(weight_row + N * weight_stride + column[None, :], mask=in_rows[:, None] & inside[None, :],
                        other=0.0, eviction_policy="evict_first")
            up = tl.dot(value, tl.trans(w), up, input_precision="ieee")
    if PROLOGUE == _RMS_NORM:
        acc *= tl.rsqrt(tl.sum(square, axis=1) / K + eps)[:, None]
        up *= tl.rsqrt(tl.sum(square, axis=1) / K + eps)[:, None]
    if EPILOGUE != _NONE:
        # Rounded as the two products would be, had they been stored.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gated(gate, up.to(out.dtype.element_ty).to(tl.float32), EPILOGUE == _GELU_TANH_MUL)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    mask = in_tokens[:, None] & in_rows[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + token[:, None] * residual_stride + row[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * out_stride + row[None, :], acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class ThinConfig:
    """Weight rows and columns per tile, and what the compiler is told."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def thin_config(num_rows: int, n: int, k: int, sms: int) -> ThinConfig:
    """The widest tile that gives every multiprocessor about two programs."""
    if num_rows == 1:
        # 8 columns for each thread: inputs then need no exchange between threads. Two weight rows a program won at
        # every shape measured: many programs keep more reads on their way than wide ones.
        return ThinConfig(2, 2048, 8, 1) if k >= 2048 else ThinConfig(2, 1024, 4, 1)
    sizes = (64, 32, 16, 8)
    block_n = next((size for size in sizes if n >= 2 * sms * size * 15 // 16), sizes[-1])
    if block_n == 16:
        return ThinConfig(16, 256, 2, 5)
    # Where the smallest tile leaves one program per multiprocessor, more stages keep enough bytes on their way.
    return ThinConfig(block_n, 128 if block_n == 64 else 256, 4, 8 if block_n == 8 else 4)


def thin_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    prologue: str | None = None, norm_weight: torch.Tensor | None = None, eps: float = 1e-6, plus_one: bool = False,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    exact_rows: bool = False, config: ThinConfig | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """f(x) [rows, k] times weight [n, k] transposed, plus bias [n] and residual [rows, n]; 1 to 16 rows.

    prologue: None; "rms_norm" (with norm_weight [k], eps, plus_one); "silu_mul" or "gelu_tanh_mul", for which x is
    [rows, 2 * k]. `out` may be `residual` itself: each element is read and written by one program.
    """
    name, device = "thin_linear", x.device
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    require_tensor(name, "weight", weight, (None, None), device, (x.dtype,))
    num_rows, (n, k) = x.shape[0], weight.shape
    require(prologue in _PROLOGUES, name, "prologue", f"is {prologue!r}, known are {list(_PROLOGUES)}")
    is_gated = prologue in ("silu_mul", "gelu_tanh_mul")
    require(x.shape[1] == (2 * k if is_gated else k), name, "x",
            f"has {x.shape[1]} columns, expected {2 * k if is_gated else k}")
    require(1 <= num_rows <= MAX_ROWS, name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    require((norm_weight is not None) == (prologue == "rms_norm"), name, "norm_weight", "goes with prologue 'rms_norm'")
    for argument, vector, size in (("bias", bias, n), ("norm_weight", norm_weight, k)):
        if vector is not None:
            require_tensor(name, argument, vector, (size,), device, FLOATS)
    if residual is not None:
        require_tensor(name, "residual", residual, (num_rows, n), device, FLOATS)
    if out is None:
        out = torch.empty(num_rows, n, dtype=out_dtype or x.dtype, device=device)
    require_tensor(name, "out", out, (num_rows, n), device, FLOATS if out_dtype is None else (out_dtype,))
    return _launch(x, weight, bias, norm_weight, residual, out, prologue, eps, plus_one, exact_rows, config, pdl)


def is_small(weight: torch.Tensor) -> bool:
    """Read in a few microseconds: what a product costs then is waiting, which a library does not save."""
    return weight.numel() * weight.element_size() <= _SMALL_WEIGHT


def _overlaps(weight: torch.Tensor) -> bool:
    """Whether to start while the kernel before still runs: a product of many waves only takes its place away."""
    return is_small(weight) and uses_pdl(weight.device)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, prologue: str | None, eps: float, plus_one: bool,
    exact_rows: bool, config: ThinConfig | None, pdl: bool | None,
) -> torch.Tensor:
    num_rows, (n, k) = x.shape[0], weight.shape
    pdl = _overlaps(weight) if pdl is None else pdl
    is_vector = num_rows == 1 and not exact_rows
    config = config or thin_config(1 if is_vector else MAX_ROWS, n, k, num_sms(x.device))
    options = {
        "K": k, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "PROLOGUE": _PROLOGUES[prologue],
        "PLUS_ONE": plus_one, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "LINES": 8,
        "PDL": pdl, "num_warps": config.num_warps, "num_stages": config.num_stages, **pdl_options(pdl),
    }
    grid = (triton.cdiv(n, config.block_n),)
    bias = x if bias is None else bias
    norm_weight = x if norm_weight is None else norm_weight
    added = x if residual is None else residual
    if is_vector:
        _matvec_kernel[grid](x, weight, bias, norm_weight, added, out, weight.stride(0), n, eps, EPILOGUE=0, **options)
    else:
        _thin_kernel[grid](x, weight, bias, norm_weight, added, out, x.stride(0), weight.stride(0), added.stride(0),
                           out.stride(0), num_rows, n, eps, ROWS=MAX_ROWS, EPILOGUE=0, **options)
    return out


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, activation: str, *, exact_rows: bool = False,
    config: ThinConfig | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """act(gate) * up for 1 to 16 token rows: weight [2 * n, k] holds gate rows, then up rows. Returns [rows, n]."""
    name, device = "gated_linear", x.device
    require(activation in ("silu_mul", "gelu_tanh_mul"), name, "activation", f"is {activation!r}")
    require_tensor(name, "weight", weight, (None, None), device, (x.dtype,))
    num_rows, n, k = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    require_tensor(name, "x", x, (num_rows, k), device, FLOATS)
    require(1 <= num_rows <= MAX_ROWS, name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=device)
    pdl = _overlaps(weight) if pdl is None else pdl
    is_vector = num_rows == 1 and not exact_rows
    # Each program reads its rows of both halves: half the tile of a plain product.
    config = config or (thin_config(1, n, k, num_sms(device)) if is_vector else GATED)
    options = {
        "K": k, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "PROLOGUE": 0, "PLUS_ONE": False,
        "HAS_BIAS": False, "HAS_RESIDUAL": False, "LINES": 8, "PDL": pdl, "EPILOGUE": _PROLOGUES[activation],
        "num_warps": config.num_warps, "num_stages": config.num_stages, **pdl_options(pdl),
    }
    grid = (triton.cdiv(n, config.block_n),)
    if is_vector:
        _matvec_kernel[grid](x, weight, x, x, x, out, weight.stride(0), n, 1e-6, **options)
    else:
        _thin_kernel[grid](x, weight, x, x, x, out, x.stride(0), weight.stride(0), x.stride(0), out.stride(0), num_rows,
                           n, 1e-6, ROWS=MAX_ROWS, **options)
    return out


GATED = ThinConfig(32, 256, 4, 4)
