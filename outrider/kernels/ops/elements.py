"""Entries of the table of operations: norms and activations."""

from __future__ import annotations

import torch

from outrider.kernels import activations, reference
from outrider.kernels.cpu import checks
from outrider.kernels.ops.conditions import is_matrix
from outrider.kernels.ops.operation import FLOAT32, UP_TO_FLOAT32, Exactness, Operation, native_kernel, triton_kernel

rms_norm = Operation(
    reference.rms_norm,
    native_kernel("outrider.kernels.cpu:rms_norm", FLOAT32, checks.takes_rms_norm),
    triton_kernel("outrider.kernels.gpu.elements.norm:rms_norm", UP_TO_FLOAT32, is_matrix),
    exact=Exactness.ROW_BY_ROW,
)
add_rms_norm = Operation(
    reference.add_rms_norm,
    native_kernel("outrider.kernels.cpu:add_rms_norm", FLOAT32, checks.takes_add_rms_norm),
    triton_kernel("outrider.kernels.gpu.elements.norm:add_rms_norm", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)


def _norm_add_norm(x: torch.Tensor, post_weight: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                   factor: float = 1.0, rounding: int = 0) -> torch.Tensor:
    """Set residual to factor * residual + norm(x) in place, and return the norm of the new residual."""
    if factor != 1.0:
        residual.mul_(factor)
    return add_rms_norm(rms_norm(x, post_weight, eps), residual, weight, eps)


norm_add_norm = Operation(
    _norm_add_norm,
    triton_kernel("outrider.kernels.gpu.elements.norm:norm_add_norm", UP_TO_FLOAT32),
    name="norm_add_norm", exact=Exactness.ROW_BY_ROW,
)
gated_norm = Operation(
    reference.gated_norm, triton_kernel("outrider.kernels.gpu.elements.gated_norm:gated_norm", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:gated_norm",
)
silu_mul = Operation(
    reference.silu_mul,
    native_kernel("outrider.kernels.cpu:silu_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.gpu.elements.activation:silu_mul", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
gelu_tanh_mul = Operation(
    reference.gelu_tanh_mul,
    native_kernel("outrider.kernels.cpu:gelu_tanh_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.gpu.elements.activation:gelu_tanh_mul", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
relu2 = Operation(reference.relu2, triton_kernel("outrider.kernels.gpu.elements.activation:relu2", UP_TO_FLOAT32),
                  exact=Exactness.ROW_BY_ROW)


def _limited_silu_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Compute `reference.limited_silu_mul` with the operation `silu_mul`, whose bits do not depend on other token
    rows."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1))


limited_silu_mul = Operation(
    _limited_silu_mul,
    triton_kernel("outrider.kernels.gpu.elements.activation:limited_silu_mul", UP_TO_FLOAT32),
    name="limited_silu_mul", exact=Exactness.ROW_BY_ROW,
)
sigmoid_scale = Operation(
    reference.sigmoid_scale,
    native_kernel("outrider.kernels.cpu:sigmoid_scale", FLOAT32, checks.takes_elements),
    exact=Exactness.ROW_BY_ROW,
)
gelu_scale = Operation(
    reference.gelu_scale,
    native_kernel("outrider.kernels.cpu:gelu_scale", FLOAT32, checks.takes_elements),
    exact=Exactness.ROW_BY_ROW,
)
cap_logits = Operation(
    reference.cap_logits,
    native_kernel("outrider.kernels.cpu:cap_logits", FLOAT32, checks.takes_logits),
    exact=Exactness.ROW_BY_ROW,
)


def gated(gate_up: torch.Tensor, activation: str, rounding: int = 0) -> torch.Tensor:
    """act(gate) * up of [tokens, gate | up]. rounding: as in `reference.silu_mul`."""
    if (limit := activations.silu_limit(activation)) is not None:
        return limited_silu_mul(gate_up, limit)
    hint = (rounding,) if rounding else ()
    return silu_mul(gate_up, *hint) if activation == "silu" else gelu_tanh_mul(gate_up, *hint)
