"""Mixtures of experts on the CPU, with one product for each chosen expert. `moe.experts` is the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from outrider.kernels import activations, moe, ops
from outrider.kernels import cpu as native
from outrider.kernels.ops import exact
from outrider.kernels.scaled import Scaled

Weight = TypeVar("Weight", Tensor, Scaled)


def plan_on_host(ids: Tensor, num_experts: int) -> list[tuple[int, Tensor]]:
    """List the experts that were chosen, each with its pairs in order. This reads ids on the host, which is allowed
    only on the CPU: reading there waits for nothing, no graph captures the step, and each product needs its number of
    rows."""
    flat = ids.reshape(-1)
    counts = flat.bincount(minlength=num_experts).tolist()
    parts = flat.argsort(stable=True).split(counts)
    return [(expert, pairs) for expert, pairs in enumerate(parts) if counts[expert]]


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
            added: Tensor | None = None, biases: moe.ExpertBiases | None = None) -> Tensor:
    return _mix(ops.linear_wide, x, ids, weights, gate_up, down, activation, added, biases)


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
                  added: Tensor | None = None, biases: moe.ExpertBiases | None = None) -> Tensor:
    """Compute experts in exact mode: a token row's result has the same bits for any other rows in the batch."""
    return _mix(exact.linear_wide, x, ids, weights, gate_up, down, activation, added, biases)


def scaled_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Scaled, down: Scaled, activation: str,
                   added: Tensor | None = None, rounds: bool = False,
                   biases: moe.ExpertBiases | None = None) -> Tensor:
    """Compute the weighted sums of experts whose weights are codes with scales."""
    product = _rounding_product(ops.scaled_wide) if rounds else ops.scaled_wide
    return _mix(product, x, ids, weights, gate_up, down, activation, added, biases)


def exact_scaled_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Scaled, down: Scaled, activation: str,
                         added: Tensor | None = None, rounds: bool = False,
                         biases: moe.ExpertBiases | None = None) -> Tensor:
    product = _rounding_product(exact.scaled_wide) if rounds else exact.scaled_wide
    return _mix(product, x, ids, weights, gate_up, down, activation, added, biases)


def native_experts(x: Tensor, routed: moe.Routed, matrices: Sequence[Sequence[native.Matrix]], activation: str,
                   added: Tensor | None = None, biases: moe.ExpertBiases | None = None) -> Tensor:
    """Compute experts with native products, which are exact in every mode. matrices: the first projection of each
    expert, and its down projection."""
    num_tokens, top_k = routed.ids.shape
    made = x.new_empty(num_tokens * top_k, x.shape[1])
    for expert, pairs in plan_on_host(routed.ids, len(matrices)):
        first, down = matrices[expert]
        projected = native.product(x[pairs // top_k], first)
        made[pairs] = _with_down_bias(native.product(_activated(projected, activation, biases, expert), down), biases,
                                      expert)
    out = moe.combine(made.view(num_tokens, top_k, -1), routed.weights)
    return out if added is None else out.add_(added)


def _rounding_product(product: Callable[..., Tensor]) -> Callable[[Tensor, Scaled], Tensor]:
    """Return a function that rounds token rows to fp8 in the weight's groups, then multiplies them."""
    return lambda x, weight: product(x, weight, min(weight.group, x.shape[1]))


def _mix(product: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight,
         activation: str, added: Tensor | None, biases: moe.ExpertBiases | None) -> Tensor:
    moe.check_experts(x, ids, weights, gate_up, down, activation)
    num_tokens, top_k = ids.shape
    made = x.new_empty(num_tokens * top_k, x.shape[1])
    for expert, pairs in plan_on_host(ids, down.shape[0]):
        projected = product(x[pairs // top_k], gate_up[expert])
        gated = _activated(projected, activation, biases, expert)
        made[pairs] = _with_down_bias(product(gated.to(x.dtype), down[expert]), biases, expert).to(x.dtype)
    out = moe.combine(made.view(num_tokens, top_k, x.shape[1]), weights)
    return out if added is None else out.add_(added)


def _activated(projected: Tensor, activation: str, biases: moe.ExpertBiases | None, expert: int) -> Tensor:
    """Apply biases and the activation to one expert's first projection. Changes `projected` in place."""
    if biases is not None:
        projected += biases.gate_up[expert]
    is_gated = activation in activations.GATED or activations.silu_limit(activation) is not None
    return ops.gated(projected, activation) if is_gated else activations.activate(projected, activation)


def _with_down_bias(made: Tensor, biases: moe.ExpertBiases | None, expert: int) -> Tensor:
    return made if biases is None or biases.down is None else made.add_(biases.down[expert])
