"""The activation of experts with biases, between their two products: bias, limits and gate of each pair's outputs.
Products with quantised weights call `clamped_swiglu_of` in their own kernels instead.

A pair is one (token row, chosen expert).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    limited,
    pdl_options,
    release_dependents,
    require_tensor,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.reference import SWIGLU_GAIN, SWIGLU_LIMIT

_COLUMNS = 1024
_LIMIT, _GAIN = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_GAIN)


@triton.jit
def clamped_swiglu_of(gate, up):
    """Apply gpt-oss's activation, a SwiGLU with clamped inputs; float32 in and out."""
    gate, up = limited(gate, up, _LIMIT)
    return gate / (1.0 + tl.exp(gate * -_GAIN)) * (up + 1.0)


@kernel
def _clamped_swiglu_kernel(
    x, bias, ids, out, x_stride, bias_stride, out_stride, width, HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + pair * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + pair * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own = bias + tl.load(ids + pair) * bias_stride + column
        gate += tl.load(own, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(own + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair * out_stride + column, clamped_swiglu_of(gate, up).to(out.dtype.element_ty), mask=inside)


def clamped_swiglu(x: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, *, pdl: bool = False) -> torch.Tensor:
    """Add the chosen experts' biases to x [pairs, 2 x width] and apply gpt-oss's activation: [pairs, width]. ids: each
    pair's expert, packed in any shape; bias [experts, 2 x width]."""
    name, (num_pairs, fused), device = "clamped_swiglu", x.shape, x.device
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    require_tensor(name, "ids", ids.view(-1), (num_pairs,), device, (torch.int64,))
    if bias is not None:
        require_tensor(name, "bias", bias, (None, fused), device, FLOATS)
    out = torch.empty(num_pairs, fused // 2, dtype=x.dtype, device=device)
    if num_pairs:
        given = x if bias is None else bias
        _clamped_swiglu_kernel[(num_pairs, cdiv(fused // 2, _COLUMNS))](
            x, given, ids, out, x.stride(0), given.stride(0), out.stride(0), fused // 2,
            HAS_BIAS=bias is not None, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )
    return out
