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


def is_single(x: torch.Tensor) -> bool:
    """One token row on a GPU: products are a matter of reading the weights once, and small kernels of their number."""
    return x.is_cuda and x.shape[0] == 1 and x.dtype == torch.bfloat16 and triton_kernels() is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed."""
    if is_single(x):
        result: torch.Tensor = _triton().thin_linear(x, weight, bias)
        return result
    return F.linear(x, weight, bias)


def linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same on a GPU with results in float32."""
    if is_single(x):
        result: torch.Tensor = _triton().thin_linear(x, weight, out_dtype=torch.float32)
        return result
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


# Products with what follows them. A norm before a product is better done once, by its own kernel: every program of the
# product would read and scale the whole input again.


def is_thin(x: torch.Tensor) -> bool:
    """Few token rows on a GPU: a product with its activation costs no more than the product alone."""
    return x.is_cuda and x.shape[0] <= 16 and x.dtype == torch.bfloat16 and triton_kernels() is not None


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up with weight [gate | up, in]."""
    kind = "silu_mul" if activation == "silu" else "gelu_tanh_mul"
    result: torch.Tensor = _triton().gated_linear(x, weight, kind)
    return result


def linear_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """residual += x @ weight' + bias, in place."""
    _triton().thin_linear(x, weight, bias, residual=residual, out=residual)


def choose(logits: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, sample_index: torch.Tensor,
           position: torch.Tensor) -> torch.Tensor | None:
    """The greatest logit of each row, after Gumbel noise where `temperature` is not 0; None if no kernel serves.

    Only whether a temperature is 0 matters: the logits are already divided by it."""
    if logits.dtype != torch.float32 or not logits.is_cuda or triton_kernels() is None:
        return None
    result: torch.Tensor = _triton().sample_logits(logits, temperature.sign(), seed, sample_index, position)
    return result


def _triton() -> ModuleType:
    kernels = triton_kernels()
    assert kernels is not None
    return kernels
