"""RMS norm over groups of columns with a gate, silu(z) or sigmoid(z), on its input or on its output, in one launch.

Recurrent layers norm their output this way. Everything is computed in float32 and rounded once, at the end. Token rows
may be strided; columns are packed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel

_TILE = 2048  # columns of a program, if a group has not more by itself
_MAX_GROUP = 65536


@triton.jit
def _gated(gate, value, IS_SIGMOID: tl.constexpr):
    if IS_SIGMOID:
        return value / (1.0 + tl.exp(-gate))
    else:
        return gated(gate, value, False)


@kernel
def _gated_norm_kernel(
    y, z, weight, out, y_stride, z_stride, out_stride, num_groups, group_size, eps,
    IS_SHARED: tl.constexpr, GATE_FIRST: tl.constexpr, IS_SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    valid = (group < num_groups) & (column < group_size)
    at = group * group_size + column
    gain = tl.load(weight + (column if IS_SHARED else at), mask=valid, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(y + token * y_stride + at, mask=valid, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + at, mask=valid, other=0.0).to(tl.float32)
    if GATE_FIRST:
        value = _gated(gate, value, IS_SIGMOID)
    mean = tl.sum(value * value, axis=1) / group_size
    result = value * tl.rsqrt(mean + eps)[:, None] * gain
    if not GATE_FIRST:
        result = _gated(gate, result, IS_SIGMOID)
    tl.store(out + token * out_stride + at, result.to(out.dtype.element_ty), mask=valid)


def gated_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float, gate_first: bool,
    activation: str = "silu", *, pdl: bool | None = None,
) -> torch.Tensor:
    """Norm y [tokens, size] over groups of columns, gated by z [tokens, size]. With `gate_first` the result is
    rms_norm(y * silu(z)) * weight, else rms_norm(y) * weight * silu(z), in z's dtype. weight [size], or [group_size]
    for all groups. activation: "silu" or "sigmoid", the function of z."""
    pdl = uses_pdl(y.device) if pdl is None else pdl
    name = "gated_norm"
    require_tensor(name, "y", y, (None, None), y.device, FLOATS)
    num_tokens, size = y.shape
    require_tensor(name, "z", z, (num_tokens, size), y.device, FLOATS)
    ok = 0 < group_size <= min(size, _MAX_GROUP) and size % group_size == 0
    require(ok, name, "group_size", f"is {group_size}, expected a part of {size} columns and at most {_MAX_GROUP}")
    require(activation in ("silu", "sigmoid"), name, "activation", f"is {activation!r}, expected 'silu' or 'sigmoid'")
    is_shared = weight.shape[0] == group_size
    require_tensor(name, "weight", weight, (group_size if is_shared else size,), y.device, FLOATS)
    out = torch.empty(num_tokens, size, dtype=z.dtype, device=y.device)
    if num_tokens == 0:
        return out
    columns, num_groups = next_power_of_two(group_size), size // group_size
    groups = min(max(1, _TILE // columns), next_power_of_two(num_groups))
    _gated_norm_kernel[(num_tokens, cdiv(num_groups, groups))](
        y, z, weight, out, y.stride(0), z.stride(0), out.stride(0), num_groups, group_size, eps,
        IS_SHARED=is_shared, GATE_FIRST=gate_first, IS_SIGMOID=activation == "sigmoid", GROUPS=groups, COLUMNS=columns,
        PDL=pdl,
        num_warps=min(16, max(1, groups * columns // 512)), **pdl_options(pdl),
    )
    return out
