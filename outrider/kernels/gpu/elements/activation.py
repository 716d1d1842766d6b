"""Activation functions of MLPs: gated ones, whose input holds the gate in its first half of columns and the gated
numbers in its second half, and relu squared.

Token rows may be strided; columns are packed.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    limited,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.linear.rounding import empty_rounded, keep_rounded, rounding_warps
from outrider.kernels.gpu.linear.scaled_codes import store_rounded

_COLUMNS = 1024
_MAX_ROUNDED = 32768  # columns of a token row that one program holds


@kernel
def _gated_kernel(
    x, out, x_stride, out_stride, width, GELU: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < width
    gate = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_stride + width + column, mask=valid, other=0.0).to(tl.float32)
    if LIMIT > 0:
        gate, up = limited(gate, up, LIMIT)
    result = gated(gate, up, GELU)
    tl.store(out + token * out_stride + column, result.to(out.dtype.element_ty), mask=valid)


@kernel(do_not_specialize=["scale_t", "scale_g"])
def _gated_rounded_kernel(
    x, out, codes, scales, x_stride, out_stride, scale_t, scale_g, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):
    """Compute one gated token row, and also round it to fp8."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    valid = column < WIDTH
    gate = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_stride + WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    result = gated(gate, up, GELU).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + column, result, mask=valid)
    SPLIT: tl.constexpr = COLUMNS if GROUP >= WIDTH else GROUP
    groups = tl.reshape(result.to(tl.float32), (COLUMNS // SPLIT, SPLIT))
    store_rounded(groups, codes + token * WIDTH, scales + token * scale_t, scale_g, WIDTH, GROUP)


def _gated(kernel: str, x: torch.Tensor, gelu: bool, rounding: int, pdl: bool | None,
           limit: float = 0.0) -> torch.Tensor:
    pdl = uses_pdl(x.device) if pdl is None else pdl
    require_tensor(kernel, "x", x, (None, None), x.device, FLOATS)
    num_tokens, fused = x.shape
    require(fused % 2 == 0, kernel, "x", f"needs an even number of columns, has {fused}")
    width = fused // 2
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or width == 0:
        return out
    if rounding and width <= _MAX_ROUNDED:
        require(rounding >= width or next_power_of_two(rounding) == rounding, kernel, "rounding", f"is {rounding}")
        made = empty_rounded(num_tokens, width, rounding, x.device, by_group=rounding < width)
        keep_rounded(out, rounding, made)
        _gated_rounded_kernel[(num_tokens,)](
            x, out, *made, x.stride(0), out.stride(0), *made.scales.stride(), WIDTH=width,
            COLUMNS=next_power_of_two(width), GROUP=rounding, GELU=gelu, PDL=pdl, num_warps=rounding_warps(width),
            **pdl_options(pdl),
        )
        return out
    grid = (num_tokens, cdiv(width, _COLUMNS))
    _gated_kernel[grid](
        x, out, x.stride(0), out.stride(0), width, GELU=gelu, LIMIT=limit, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )
    return out


def silu_mul(x: torch.Tensor, rounding: int = 0, *, pdl: bool | None = None) -> torch.Tensor:
    """Return silu(x[:, :width]) * x[:, width:] of x [tokens, 2 * width]. rounding: if not 0, the result is also rounded
    to fp8, and the next product finds the codes attached to it (`linear/rounding.py`)."""
    return _gated("silu_mul", x, False, rounding, pdl)


def gelu_tanh_mul(x: torch.Tensor, rounding: int = 0, *, pdl: bool | None = None) -> torch.Tensor:
    """Return gelu_tanh(x[:, :width]) * x[:, width:] of x [tokens, 2 * width]. rounding: as in `silu_mul`."""
    return _gated("gelu_tanh_mul", x, True, rounding, pdl)


def limited_silu_mul(x: torch.Tensor, limit: float, *, pdl: bool | None = None) -> torch.Tensor:
    """Return silu(x[:, :width]) * x[:, width:] of x [tokens, 2 * width], after clamping the first half to at most
    `limit` and the second half to -limit .. limit."""
    return _gated("limited_silu_mul", x, False, 0, pdl, limit)


@kernel
def _relu2_kernel(x, out, x_stride, out_stride, width, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < width
    value = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    value = tl.where(value < 0.0, 0.0, value)  # what is not a number stays so
    tl.store(out + token * out_stride + column, (value * value).to(out.dtype.element_ty), mask=valid)


def relu2(x: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """Return the square of relu(x) of x [tokens, width]."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    require_tensor("relu2", "x", x, (None, None), x.device, FLOATS)
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or width == 0:
        return out
    grid = (num_tokens, cdiv(width, _COLUMNS))
    _relu2_kernel[grid](
        x, out, x.stride(0), out.stride(0), width, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, **pdl_options(pdl)
    )
    return out
