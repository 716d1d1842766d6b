"""RMS norm over token rows: plain, after adding to the residual, and between two norms (norm, add, norm).

Statistics are in float32 and are taken from the residual as it is stored, so that the fused kernel gives the same
result as an addition and then a norm.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
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

_MAX_WIDTH = 65536


@kernel(do_not_specialize=["scale_t", "scale_g"])
def _rms_norm_kernel(
    x, post_weight, residual, weight, out, codes, scales, x_stride, residual_stride, out_stride, scale_t, scale_g,
    width, eps, factor, HAS_POST: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr,
    ROUNDED: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Norm one token row. ROUNDED: the width, if rows are also rounded to fp8; otherwise 0."""
    release_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    valid = column < width
    gain = tl.load(weight + column, mask=valid, other=0.0).to(tl.float32)
    if HAS_POST:
        post = tl.load(post_weight + column, mask=valid, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + token * residual_stride + column
        kept = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_POST:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
        value = (value * scale * post).to(dtype).to(tl.float32)  # as if it had been stored
    if HAS_RESIDUAL:
        if HAS_POST:
            kept = (kept * factor).to(dtype).to(tl.float32)
        stored = (value + kept).to(dtype)
        tl.store(at, stored, mask=valid)
        value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    result = (value * scale * gain).to(dtype)
    tl.store(out + token * out_stride + column, result, mask=valid)
    if ROUNDED:
        SPLIT: tl.constexpr = COLUMNS if GROUP >= ROUNDED else GROUP
        groups = tl.reshape(result.to(tl.float32), (COLUMNS // SPLIT, SPLIT))
        store_rounded(groups, codes + token * ROUNDED, scales + token * scale_t, scale_g, ROUNDED, GROUP)


def _launch(
    kernel: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    rounding: int, pdl: bool | None, post_weight: torch.Tensor | None = None, factor: float = 1.0,
) -> torch.Tensor:
    pdl = uses_pdl(x.device) if pdl is None else pdl
    require_tensor(kernel, "x", x, (None, None), x.device, FLOATS)
    num_tokens, width = x.shape
    require(0 < width <= _MAX_WIDTH, kernel, "x", f"has {width} columns, allowed are 1 to {_MAX_WIDTH}")
    require_tensor(kernel, "weight", weight, (width,), x.device, FLOATS)
    if post_weight is not None:
        require_tensor(kernel, "post_weight", post_weight, (width,), x.device, FLOATS)
    if residual is not None:
        require_tensor(kernel, "residual", residual, (num_tokens, width), x.device, (x.dtype,))
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    columns = next_power_of_two(width)
    codes, scales = out, out  # unused, unless rows are rounded
    if rounding:
        require(rounding >= width or next_power_of_two(rounding) == rounding, kernel, "rounding", f"is {rounding}")
        made = empty_rounded(num_tokens, width, rounding, x.device, by_group=rounding < width)
        codes, scales = made
        keep_rounded(out, rounding, made)
    _rms_norm_kernel[(num_tokens,)](
        x, weight if post_weight is None else post_weight, residual if residual is not None else x, weight, out, codes,
        scales, x.stride(0), residual.stride(0) if residual is not None else 0, out.stride(0), *scales.stride(), width,
        eps, factor, HAS_POST=post_weight is not None, HAS_RESIDUAL=residual is not None, COLUMNS=columns,
        ROUNDED=width if rounding else 0, GROUP=rounding, PDL=pdl,
        num_warps=rounding_warps(width) if rounding else min(16, max(1, columns // 512)), **pdl_options(pdl),
    )
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: int = 0, *, pdl: bool | None = None
) -> torch.Tensor:
    """Return x / rms(x) * weight of x [tokens, width]. rounding: if not 0, fp8 codes are attached to the result for the
    next product (`linear/rounding.py`)."""
    return _launch("rms_norm", x, None, weight, eps, rounding, pdl)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rounding: int = 0, *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Add x [tokens, width] to residual in place, and return the norm of the sum."""
    return _launch("add_rms_norm", x, residual, weight, eps, rounding, pdl)


def norm_add_norm(
    x: torch.Tensor, post_weight: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
    factor: float = 1.0, rounding: int = 0, *, pdl: bool | None = None,
) -> torch.Tensor:
    """Set residual [tokens, width] to factor * residual + rms_norm(x, post_weight), in place, and return the norm of
    the new residual."""
    return _launch("norm_add_norm", x, residual, weight, eps, rounding, pdl, post_weight, factor)
