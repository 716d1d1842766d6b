"""Norms, activations and lookups of token rows by the C code. `checks.py` says which arguments are allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> Tensor:
    tokens, width = x.shape
    out = torch.empty(tokens, width)
    library().rms_norm(
        x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), out.data_ptr(), tokens, width, eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> Tensor:
    tokens, width = x.shape
    out = torch.empty(tokens, width)
    library().rms_norm(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(), out.data_ptr(), tokens,
        width, eps, torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: Tensor, rounding: int = 0) -> Tensor:
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor, rounding: int = 0) -> Tensor:
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width)
    library().gated(
        gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), tokens, width, gelu, torch.get_num_threads()
    )
    return out


# How native.c numbers functions of single elements.
_SIGMOID_SCALE, _GELU_SCALE, _CAP = range(3)


def sigmoid_scale(x: Tensor, gate: Tensor) -> Tensor:
    return _elements(x, gate, _SIGMOID_SCALE)


def gelu_scale(gate: Tensor, x: Tensor) -> Tensor:
    return _elements(gate, x, _GELU_SCALE)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    return _elements(logits, logits, _CAP, cap, out=logits)


def _elements(x: Tensor, y: Tensor, kind: int, cap: float = 1.0, out: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape) if out is None else out
    library().elements(
        x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), y.shape[1], out.data_ptr(), *x.shape, cap, kind,
        torch.get_num_threads(),
    )
    return out


def find_ngram(tokens: Tensor, known: Tensor, rows: Tensor, width: int, num_wanted: int, min_n: int,
               max_n: int) -> tuple[Tensor, Tensor]:
    requests, width = rows.shape[0], min(width, tokens.shape[1])
    drafts, counts = torch.empty(requests, num_wanted, dtype=torch.int64), torch.empty(requests, dtype=torch.int64)
    library().find_ngram(
        tokens.data_ptr(), tokens.stride(0), known.data_ptr(), rows.data_ptr(), requests, width, num_wanted, min_n,
        max_n, drafts.data_ptr(), counts.data_ptr(),
    )
    return drafts, counts
