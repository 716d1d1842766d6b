"""Small operations by device: Triton on a GPU, native code on the CPU, plain torch where neither serves.

Every operation means what `reference.py` says. Layers call these; only this file chooses.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F

from outrider.kernels import drafting, reference, step
from outrider.kernels.native import checks
from outrider.kernels.ops import conditions
from outrider.kernels.ops.operation import (
    FLOAT32,
    UP_TO_FLOAT32,
    Kernel,
    Operation,
    has_native,
    has_triton,
    native_kernel,
    operations,
    triton_kernel,
    using,
)

__all__ = ["Kernel", "Operation", "has_native", "has_triton", "native_kernel", "operations", "triton_kernel", "using"]

TINY_WEIGHT = 7 << 20  # bytes


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


# Norms

rms_norm = Operation(
    reference.rms_norm,
    native_kernel("outrider.kernels.native:rms_norm", FLOAT32, checks.takes_rms_norm),
    triton_kernel("outrider.kernels.triton.norm:rms_norm", UP_TO_FLOAT32, conditions.is_matrix),
)
add_rms_norm = Operation(
    reference.add_rms_norm,
    native_kernel("outrider.kernels.native:add_rms_norm", FLOAT32, checks.takes_add_rms_norm),
    triton_kernel("outrider.kernels.triton.norm:add_rms_norm", UP_TO_FLOAT32),
)


def _norm_add_norm(x: torch.Tensor, post_weight: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                   factor: float = 1.0) -> torch.Tensor:
    """residual becomes factor * residual + norm(x) in place; returns the norm of that."""
    if factor != 1.0:
        residual.mul_(factor)
    return add_rms_norm(rms_norm(x, post_weight, eps), residual, weight, eps)


norm_add_norm = Operation(
    _norm_add_norm,
    triton_kernel("outrider.kernels.triton.norm:norm_add_norm", UP_TO_FLOAT32),
    name="norm_add_norm",
)
gated_norm = Operation(
    reference.gated_norm, triton_kernel("outrider.kernels.triton.gated_norm:gated_norm", UP_TO_FLOAT32)
)

# Activations

silu_mul = Operation(
    reference.silu_mul,
    native_kernel("outrider.kernels.native:silu_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.triton.activation:silu_mul", UP_TO_FLOAT32),
)
gelu_tanh_mul = Operation(
    reference.gelu_tanh_mul,
    native_kernel("outrider.kernels.native:gelu_tanh_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.triton.activation:gelu_tanh_mul", UP_TO_FLOAT32),
)
relu2 = Operation(reference.relu2, triton_kernel("outrider.kernels.triton.activation:relu2", UP_TO_FLOAT32))


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [tokens, gate | up]."""
    return silu_mul(gate_up) if activation == "silu" else gelu_tanh_mul(gate_up)


# Attention on the CPU; on a GPU a backend plans its launches (mixers/paged)

rope_write = Operation(
    reference.rope_write,
    native_kernel("outrider.kernels.native:rope_write", FLOAT32, checks.takes_rope_write),
)
paged_attention = Operation(
    reference.paged_attention,
    native_kernel("outrider.kernels.native:paged_attention", FLOAT32, checks.takes_paged_attention),
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed."""
    if is_single(x) or is_tiny(x, weight):
        result: torch.Tensor = _triton().matvec(x, weight, bias)
        return result
    if bias is None and is_one_tile(x):
        if is_thin(x) and _triton().can_split(weight):
            split: torch.Tensor = _triton().split_linear(x, weight)
            return split
        if _triton().beats_library(x, weight):
            thin: torch.Tensor = _triton().thin_linear(x, weight)
            return thin
    return F.linear(x, weight, bias)


def linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same on a GPU with results in float32."""
    if is_single(x) or is_tiny(x, weight):
        result: torch.Tensor = _triton().matvec(x, weight, out_dtype=torch.float32)
        return result
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


# Which kernel is best for few token rows, by what was measured.


def is_single(x: torch.Tensor) -> bool:
    """One token row on a GPU: products are a matter of reading the weights once, and small kernels of their number."""
    return x.is_cuda and x.shape[0] == 1 and x.dtype == torch.bfloat16 and triton_kernels() is not None


def is_one_tile(x: torch.Tensor) -> bool:
    """Token rows on a GPU that share one tile of a product."""
    return x.is_cuda and x.shape[0] <= 64 and x.dtype == torch.bfloat16 and triton_kernels() is not None


def is_thin(x: torch.Tensor) -> bool:
    """Few token rows on a GPU: the smallest tile holds them."""
    return x.shape[0] <= 16 and is_one_tile(x)


def is_tiny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Two to four token rows and a weight that is read before the tensor cores have begun."""
    return is_thin(x) and x.shape[0] <= 4 and weight.numel() * weight.element_size() <= TINY_WEIGHT


def gates_thin(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gated_linear` beats a product and then its activation."""
    return is_single(x) or (is_one_tile(x) and bool(_triton().beats_library(x, weight)))


# Products with what follows them. A norm before a product is better done once, by its own kernel: every program of the
# product would read and scale the whole input again.


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up with weight [gate | up, in]."""
    kind = "silu_mul" if activation == "silu" else "gelu_tanh_mul"
    if is_single(x):
        single: torch.Tensor = _triton().matvec(x, weight, activation=kind)
        return single
    result: torch.Tensor = _triton().gated_linear(x, weight, kind)
    return result


def relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The square of relu of a product, for one token row on a GPU."""
    result: torch.Tensor = _triton().matvec(x, weight, activation="relu2")
    return result


def linear_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """residual += x @ weight' + bias, in place, for one token row on a GPU."""
    _triton().matvec(x, weight, bias, residual=residual, out=residual)


# Around draft heads


def head_kernels(x: torch.Tensor) -> ModuleType | None:
    return triton_kernels() if x.is_cuda and x.dtype != torch.float64 else None


def join_embedding(tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, *, scale: float | None = None,
                   gains: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
                   hidden_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """([tokens, embedding | hidden], its hidden part), both parts normed where there are `gains`. The second may be a
    view of the first, which a caller that goes on in place has to be done with."""
    kernels, width = head_kernels(hidden), hidden.shape[1]
    if kernels is not None:
        joined: torch.Tensor = kernels.join_embedding(tokens, table, hidden, scale=scale, gains=gains, eps=eps,
                                                      hidden_first=hidden_first)
        return joined, joined[:, :width] if hidden_first else joined[:, width:]
    embedded = F.embedding(tokens, table)
    embedded = embedded if scale is None else embedded * scale
    if gains is not None:
        embedded, hidden = rms_norm(embedded, gains[0], eps), rms_norm(hidden, gains[1], eps)
    return torch.cat((hidden, embedded) if hidden_first else (embedded, hidden), dim=-1), hidden


def take_rows(first: torch.Tensor, second: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first[index], second[index])"""
    kernels = head_kernels(first)
    if first is second or kernels is None:
        taken = first[index]
        return taken, taken if first is second else second[index]
    one, other = kernels.take_rows(first, second, index)
    return one, other


# Text


find_ngram = Operation(
    reference.find_ngram,
    native_kernel("outrider.kernels.native:find_ngram", takes=checks.takes_find_ngram),
    triton_kernel("outrider.kernels.triton.ngram:find_ngram"),
)


# Sampling


def sampling_kernels(logits: torch.Tensor) -> ModuleType | None:
    return triton_kernels() if logits.is_cuda and logits.dtype == torch.float32 else None


def draw(logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: tuple[torch.Tensor, ...],
         any_sampled: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(tokens, which are bad) of logit rows that ask for a temperature at most; None if no kernel serves. `keys` are
    temperatures, seeds and sample indices by row."""
    kernels = sampling_kernels(logits)
    if kernels is None:
        return None
    tokens, bad = kernels.draw_tokens(logits, row, position, kernels.Keys(*keys), any_sampled=any_sampled)
    return tokens, bad


def choose(scaled: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
           keys: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The greatest logit of each logit row, after Gumbel noise where its temperature, by which they are divided
    already, is not 0; None if no kernel serves."""
    kernels = sampling_kernels(scaled)
    if kernels is None:
        return None
    result: torch.Tensor = kernels.choose_scaled(scaled, row, position, kernels.Keys(*keys))
    return result


# Steps and proposals


prepare_step = Operation(step.prepare_step, triton_kernel("outrider.kernels.triton.step:prepare_step"),
                         subject=lambda packet, *_, **__: packet.rows)
commit_step = Operation(step.commit_step, triton_kernel("outrider.kernels.triton.step:commit_step"))
store_drafts = Operation(step.store_drafts, triton_kernel("outrider.kernels.triton.draft:store_drafts"))
plan_draft_passes = Operation(drafting.plan_draft_passes,
                              triton_kernel("outrider.kernels.triton.draft:plan_draft_passes"),
                              subject=lambda requests, *_, **__: requests.rows)
plan_reading_pass = Operation(drafting.plan_reading_pass,
                              triton_kernel("outrider.kernels.triton.draft:plan_reading_pass"),
                              subject=lambda requests, *_, **__: requests.rows)
forget_pages = Operation(drafting.forget_pages, triton_kernel("outrider.kernels.triton.draft:forget_pages"),
                         subject=lambda requests, *_, **__: requests.rows)


def _triton() -> ModuleType:
    kernels = triton_kernels()
    assert kernels is not None
    return kernels
