"""Small operations by device: Triton on a GPU, native code on the CPU, plain torch where neither serves.

Every operation means what `reference.py` says. Layers call these; only this file chooses.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F

from outrider.kernels import native, reference


@lru_cache(maxsize=1)
def triton_kernels() -> ModuleType | None:
    """The Triton kernels, where there is a GPU that runs them."""
    if not torch.cuda.is_available():
        return None
    try:
        from outrider.kernels import triton
    except ImportError:
        return None
    return triton


def _kernels(x: torch.Tensor) -> ModuleType | None:
    if x.is_cuda:
        return None if x.dtype == torch.float64 else triton_kernels()
    return native if x.dtype == torch.float32 and native.available() else None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    kernels = _kernels(x)
    if kernels is None or x.dim() != 2:
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)
    result: torch.Tensor = kernels.rms_norm(x, weight, eps)
    return result


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to the residual in place; returns the norm of the sum."""
    kernels = _kernels(x)
    if kernels is None:
        return rms_norm(residual.add_(x), weight, eps)
    result = kernels.add_rms_norm(x, residual, weight, eps)
    return result[0] if isinstance(result, tuple) else result


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [tokens, gate | up]."""
    module = _kernels(gate_up) or reference
    operation = module.silu_mul if activation == "silu" else module.gelu_tanh_mul
    result: torch.Tensor = operation(gate_up)
    return result


THIN_ROWS = 16  # up to here a product is a matter of reading the weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed."""
    if x.is_cuda and x.shape[0] <= THIN_ROWS and x.dtype == torch.bfloat16 and triton_kernels() is not None:
        result: torch.Tensor = _triton().thin_linear(x, weight, bias)
        return result
    return F.linear(x, weight, bias)


def linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same on a GPU with results in float32."""
    if x.shape[0] <= THIN_ROWS and x.dtype == torch.bfloat16 and triton_kernels() is not None:
        result: torch.Tensor = _triton().thin_linear(x, weight, out_dtype=torch.float32)
        return result
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _triton() -> ModuleType:
    kernels = triton_kernels()
    assert kernels is not None
    return kernels
