"""The router of a mixture of experts: one product, and a rule that chooses. Scores are in float32 (float64 stays).

What a family does to the router's input (a norm, a scale) is the model's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.kernels.moe import Routed, RouteRule, distinct_experts, route
from outrider.layers.linear import Linear, WeightSlot

# (layer index, number of token rows) -> expert ids [tokens, k] int64, distinct within a token row.
RoutingOverride = Callable[[int, int], torch.Tensor]
# (layer index, expert ids [tokens, k]); runs inside the step, so it must not read them on the host.
RoutingObserver = Callable[[int, torch.Tensor], None]


class Router:
    # For benchmarks: random weights send every token row to the same experts, which no trained model does. The router
    # still runs and its weights count; only the ids are replaced.
    routing_override: RoutingOverride | None = None
    observer: RoutingObserver | None = None

    def __init__(
        self,
        index: int,
        hidden_size: int,
        rule: RouteRule,
        *,
        has_bias: bool = False,
        has_expert_scale: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """has_bias: a correction of the scores that counts for the choice alone."""
        self.index = index
        self.rule = rule
        self.gate = Linear(hidden_size, rule.num_experts, bias=False, dtype=dtype, device=device)
        # Corrections are far smaller than the scores they are added to: 16 bits would round them away.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.bias = torch.empty(rule.num_experts, dtype=wide, device=device) if has_bias else None
        self.expert_scale = torch.empty(rule.num_experts, dtype=wide, device=device) if has_expert_scale else None

    def weights(self, prefix: str, projection: str | None = None) -> dict[str, WeightSlot]:
        """projection: the name of the product's weight below the prefix, where it has one."""
        slots = self.gate.weights(prefix if projection is None else f"{prefix}.{projection}")
        if self.bias is not None:
            slots[f"{prefix}.e_score_correction_bias"] = WeightSlot.of(self.bias)
        if self.expert_scale is not None:
            slots[f"{prefix}.per_expert_scale"] = WeightSlot.of(self.expert_scale)
        return slots

    def finalize(self) -> None:
        self.gate.finalize()

    def __call__(self, x: torch.Tensor) -> Routed:
        """x: [tokens, hidden]. Returns ids and weights, [tokens, k] each."""
        routed = route(self.gate.wide(x), self.rule, self.bias, self.expert_scale)
        if self.routing_override is not None:
            routed = Routed(self.routing_override(self.index, x.shape[0]), routed.weights)
        if self.observer is not None:
            self.observer(self.index, routed.ids)
        return routed


class ExpertCounter:
    """An observer that keeps each layer's number of distinct experts in the last step, padded token rows included."""

    def __init__(self, num_layers: int, num_experts: int, *, device: torch.device) -> None:
        self.num_experts = num_experts
        self.distinct = torch.zeros(num_layers, dtype=torch.int64, device=device)  # 0 where a layer has no experts

    def __call__(self, index: int, ids: torch.Tensor) -> None:
        self.distinct[index].copy_(distinct_experts(ids, self.num_experts))


def find_routers(part: object) -> list[Router]:
    """Every router inside a model or a part of one, in the order of its layers."""
    found: list[Router] = []
    seen: set[int] = set()

    def walk(value: object) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif type(value).__module__.startswith("outrider.") and hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Router):
                found.append(value)
            for item in vars(value).values():
                walk(item)

    walk(part)
    return found
