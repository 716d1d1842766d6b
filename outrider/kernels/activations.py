"""Activations between two products, by name. Gated activations take two projections side by side; "relu2" takes one
projection."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels import reference

GATED = ("silu", "gelu_pytorch_tanh")  # act(gate) * up, by the names configs use
CLAMPED = "clamped_swiglu"  # gpt-oss's: gate and up are limited, see `reference.clamped_swiglu`
PLAIN = ("relu2",)  # the square of relu, of one projection
_LIMITED = "limited_silu:"  # silu(gate) * up with limits, see `reference.limited_silu_mul`; the limit follows


def limited_silu(limit: float) -> str:
    """The name of the activation silu(gate) * up that limits gate and up first."""
    return f"{_LIMITED}{limit}"


def silu_limit(activation: str) -> float | None:
    """The limit in the name of an activation made by `limited_silu`; None for all other activations."""
    return float(activation.removeprefix(_LIMITED)) if activation.startswith(_LIMITED) else None


def is_known(activation: str) -> bool:
    return activation in (*GATED, CLAMPED, *PLAIN) or silu_limit(activation) is not None


def activate(projected: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return reference.silu_mul(projected)
    if activation == CLAMPED:
        return reference.clamped_swiglu(projected)
    if (limit := silu_limit(activation)) is not None:
        return reference.limited_silu_mul(projected, limit)
    return reference.gelu_tanh_mul(projected) if activation in GATED else reference.relu2(projected)
