"""Linear layers for 1 to 64 token rows, which share one tile on the tensor cores: the time is that of reading weights.

A row's result does not depend on other rows, and on their number only by whether there are more than 16. The inner
dimension is not split, so additions are always in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    num_sms,
    pdl_options,
    refuse,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel

FEW_ROWS, MAX_ROWS = 16, 64  # of a tile: one size or the other
SMALL_WEIGHT = 16 << 20  # bytes
_LINE = tl.constexpr(128)  # bytes the memory system fetches at once
_LINES = tl.constexpr(8)  # of a weight row, asked for ahead of time
_GELU_TANH = tl.constexpr(2)
_GATES = {"silu": 1, "gelu_pytorch_tanh": 2}


@triton.jit
def prefetch_rows(weight, row, width, N, K: tl.constexpr):
    """Prefetch the first lines of this program's weight rows while the kernel before it still runs."""
    bytes_per: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    column = tl.minimum(tl.arange(0, _LINES) * (_LINE // bytes_per), K - 1)
    address = (weight + tl.minimum(row, N - 1).to(tl.int64)[:, None] * width + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_weight(weight, in_rows, inside, WHOLE: tl.constexpr):
    """Load a weight. It is read only once, so it need not stay in the cache."""
    mask = in_rows[:, None] if WHOLE else in_rows[:, None] & inside[None, :]
    return tl.load(weight, mask=mask, other=0.0, eviction_policy="evict_first")


@kernel(do_not_specialize=["M"])
def _thin_kernel(
    x, weight, bias, residual, out, x_stride, weight_stride, residual_stride, out_stride, M, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    if PDL:
        prefetch_rows(weight, row, weight_stride, N, K)
    wait_for_inputs(PDL)
    token = tl.arange(0, ROWS)
    in_tokens = token < M
    weight_row = weight + row.to(tl.int64)[:, None] * weight_stride
    x_row = x + token[:, None] * x_stride
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < K
        w = load_weight(weight_row + column[None, :], in_rows, inside, K % BLOCK_K == 0)
        mask = in_tokens[:, None] if K % BLOCK_K == 0 else in_tokens[:, None] & inside[None, :]
        value = tl.load(x_row + column[None, :], mask=mask, other=0.0)
        acc = tl.dot(value, tl.trans(w), acc, input_precision="ieee")
        if GATE:
            w = load_weight(weight_row + N * weight_stride + column[None, :], in_rows, inside, K % BLOCK_K == 0)
            up = tl.dot(value, tl.trans(w), up, input_precision="ieee")
    if GATE:
        # Rounded as the two products would be, had they been stored.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gated(gate, up.to(out.dtype.element_ty).to(tl.float32), GATE == _GELU_TANH)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    mask = in_tokens[:, None] & in_rows[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + token[:, None] * residual_stride + row[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * out_stride + row[None, :], acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class ThinConfig:
    """Weight rows and columns per tile, and options of the compiler."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=64)
def gated_config(num_rows: int) -> ThinConfig:
    """Return the tile of a gated product: half of a plain one, since each program reads gate rows and up rows."""
    return ThinConfig(32, 256 if num_rows <= FEW_ROWS else 128, 4, 4)


@lru_cache(maxsize=1024)
def thin_config(n: int, sms: int, num_rows: int = 1) -> ThinConfig:
    """Return the widest tile that gives every multiprocessor about two programs, or about one if tiles have many
    rows."""
    if num_rows > FEW_ROWS:
        return ThinConfig(32 if n >= sms * 32 * 15 // 16 else 16, 256, 4, 3)
    sizes = (64, 32, 16, 8)
    block_n = next((size for size in sizes if n >= 2 * sms * size * 15 // 16), sizes[-1])
    if block_n == 16:
        return ThinConfig(16, 256, 2, 5)
    # Where the smallest tile leaves one program per multiprocessor, more stages keep enough bytes on their way.
    return ThinConfig(block_n, 128 if block_n == 64 else 256, 4, 8 if block_n == 8 else 4)


def is_small(weight: torch.Tensor) -> bool:
    """Whether the weight is read in a few microseconds. A product then mostly waits, which the library does not
    avoid."""
    return weight.numel() * weight.element_size() <= SMALL_WEIGHT


def is_fastest_gated(x: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
    """Whether this kernel is faster than the library: measured for 17 to 64 rows and weights of up to 12 MB."""
    num_rows = x.shape[0]
    return 0 < num_rows <= MAX_ROWS and is_small(weight) and (num_rows <= FEW_ROWS or weight.shape[1] <= 2048)


def is_fastest(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return bias is None and is_fastest_gated(x, weight)


def thin_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, config: ThinConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply x [rows, k] with weight [n, k] transposed, plus bias [n] and residual [rows, n]; 1 to 64 rows. `out` may
    be `residual` itself: each element is read and written by one program."""
    name, device = "thin_linear", x.device
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    num_rows, k = x.shape
    n = weight.shape[0]
    require_tensor(name, "weight", weight, (n, k), device, (x.dtype,))
    if not 1 <= num_rows <= MAX_ROWS:
        refuse(name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    if bias is not None:
        require_tensor(name, "bias", bias, (n,), device, FLOATS)
    if residual is not None:
        require_tensor(name, "residual", residual, (num_rows, n), device, FLOATS)
    if out is None:
        out = torch.empty(num_rows, n, dtype=out_dtype or x.dtype, device=device)
    else:
        require_tensor(name, "out", out, (num_rows, n), device, FLOATS if out_dtype is None else (out_dtype,))
    _launch(x, weight, bias, residual, out, 0, config or thin_config(n, num_sms(device), num_rows), pdl)
    return out


def gated_linear(
    x: torch.Tensor, weight: torch.Tensor, activation: str, *, config: ThinConfig | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Return act(gate) * up [rows, n] for 1 to 64 token rows; weight [2 * n, k] holds the gate rows, then the up
    rows."""
    name, device = "gated_linear", x.device
    require(activation in _GATES, name, "activation", f"is {activation!r}")
    require_tensor(name, "weight", weight, (None, None), device, (x.dtype,))
    rows, k = weight.shape
    num_rows, n = x.shape[0], rows // 2
    require_tensor(name, "x", x, (num_rows, k), device, FLOATS)
    if not 1 <= num_rows <= MAX_ROWS:
        refuse(name, "x", f"has {num_rows} rows, allowed are 1 to {MAX_ROWS}")
    out = torch.empty(num_rows, n, dtype=x.dtype, device=device)
    _launch(x, weight, None, None, out, _GATES[activation], config or gated_config(num_rows), pdl)
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, out: torch.Tensor,
    gate: int, config: ThinConfig, pdl: bool | None,
) -> None:
    (num_rows, k), n = x.shape, out.shape[1]
    # A product of many waves that starts early only takes the place of the kernel before it.
    pdl = is_small(weight) and uses_pdl(x.device) if pdl is None else pdl
    added = x if residual is None else residual
    _thin_kernel[(cdiv(n, config.block_n),)](
        x, weight, x if bias is None else bias, added, out, x.stride(0), weight.stride(0), added.stride(0),
        out.stride(0), num_rows, n, K=k, ROWS=FEW_ROWS if num_rows <= FEW_ROWS else MAX_ROWS,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, GATE=gate, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages,
        **pdl_options(pdl),
    )
