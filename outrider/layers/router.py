"""The router of a mixture of experts: one product makes scores, and a rule chooses experts by these scores. Scores are
float32 (float64 in a float64 model).

A model family that norms or scales the router's input does so in its own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from outrider.formats import FormatChoice
from outrider.kernels import ops
from outrider.kernels.moe import Routed, RouteRule, distinct_experts
from outrider.layers.base import Module, Parameter
from outrider.layers.context import StepContext
from outrider.layers.linear import Linear

# (layer index, number of token rows) -> expert ids [tokens, k] int64, distinct within a token row.
RoutingOverride = Callable[[int, int], torch.Tensor]
# (layer index, expert ids [tokens, k]); runs inside the step, so it must not read them on the host.
RoutingObserver = Callable[[int, torch.Tensor], None]


class Router(Module):
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
        projection: str = "",
        bias_name: str = "e_score_correction_bias",
        has_linear_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """has_bias: the checkpoint has a correction of the scores, which counts for the choice of experts but not for
        their weights. projection, bias_name: the checkpoint's names of the matrix and of the correction, below the
        router's prefix. has_linear_bias: the matrix has a bias, which counts for the weights too."""
        self.index = index
        self.rule = rule
        self.projection, self.bias_name = projection, bias_name
        self._route = ops.route
        self.gate = Linear(hidden_size, rule.num_experts, bias=has_linear_bias, dtype=dtype, device=device)
        # Corrections are far smaller than the scores they are added to: 16 bits would round them away.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.bias = torch.empty(rule.num_experts, dtype=wide, device=device) if has_bias else None
        self.expert_scale = torch.empty(rule.num_experts, dtype=wide, device=device) if has_expert_scale else None

    def parts(self) -> Sequence[tuple[str, Module]]:
        tensors = {self.bias_name: self.bias, "per_expert_scale": self.expert_scale}
        own = [(name, Parameter(tensor)) for name, tensor in tensors.items() if tensor is not None]
        return [(self.projection, self.gate), *own]

    def declare_formats(self, choice: FormatChoice, prefix: str = "") -> None:
        """Keep the matrix unquantised unless the files quantise it: the choice of experts is sensitive to rounding."""
        super().declare_formats(replace(choice, quantization=None), prefix)

    def set_exact(self, exact: bool) -> None:
        self._route = ops.route.variant(exact)

    def __call__(self, x: torch.Tensor, context: StepContext) -> Routed:
        """Choose experts for x [tokens, hidden]. Returns ids and weights, [tokens, k] each."""
        routed = self._route(self.gate.wide(x, context), self.rule, self.bias, self.expert_scale)
        if self.routing_override is not None:
            routed = Routed(self.routing_override(self.index, x.shape[0]), routed.weights)
        if self.observer is not None:
            self.observer(self.index, routed.ids)
        return routed


class ExpertTally:
    """An observer that counts the distinct experts that each layer reads in decode steps (steps of at most
    `most_tokens` token rows), and sums the counts over steps. Steps are counted on the host; the sums are read at the
    end."""

    def __init__(self, routers: Sequence[Router], most_tokens: int, *, device: torch.device) -> None:
        self._num_experts = {router.index: router.rule.num_experts for router in routers}
        self._totals = {index: torch.zeros((), dtype=torch.int64, device=device) for index in self._num_experts}
        self._steps = dict.fromkeys(self._num_experts, 0)
        self._most_tokens = most_tokens

    def __call__(self, index: int, ids: torch.Tensor) -> None:
        if ids.shape[0] <= self._most_tokens:
            self._totals[index].add_(distinct_experts(ids, self._num_experts[index]))
            self._steps[index] += 1

    def mean(self) -> float | None:
        """Return the mean number of distinct experts of a layer in a step; None if no step was counted."""
        means = [total.item() / self._steps[index] for index, total in self._totals.items() if self._steps[index]]
        return sum(means) / len(means) if means else None


class SpreadRouting:
    """A routing override that draws experts by a hash, about as evenly as a trained router does for a batch. The hash
    reads the layer, the token row and the step's number. The number is on the device, so that every replay of a CUDA
    graph draws other experts.

    The router that is called first in a step draws for all layers at once, because small kernels for every layer would
    slow the step.
    """

    _ODD = (-7046029254386353131, -4658895280553007687)  # multipliers of a 64-bit mixer
    _PLACES = 1 << 14  # places of the table
    _STEP = 5_851  # places from one step to the next

    def __init__(self, routers: Sequence[Router], *, device: torch.device) -> None:
        rule = routers[0].rule
        if any((r.rule.num_experts, r.rule.top_k) != (rule.num_experts, rule.top_k) for r in routers):
            raise ValueError("--routing spread needs the same number of experts, and of experts for each token, in "
                             "every layer; this model's layers differ: leave --routing out")
        self._first = routers[0].index
        self._place = {router.index: place for place, router in enumerate(routers)}
        self._table = self._drawn(rule).to(device)  # [layers, places, k]
        self._rows = torch.arange(self._PLACES, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._ids: torch.Tensor | None = None  # [layers, tokens, k] of this step

    def _drawn(self, rule: RouteRule) -> torch.Tensor:
        strides = [n for n in range(1, max(2, rule.num_experts)) if math.gcd(n, rule.num_experts) == 1]
        keys = (torch.tensor(list(self._place)) + 1)[:, None] * self._ODD[0]
        bits = keys + torch.arange(self._PLACES) * self._ODD[1]
        for shift, odd in zip((30, 27), self._ODD, strict=True):
            bits = (bits ^ (bits >> shift)) * odd
        first = ((bits >> 3) & 0xFFFFFF) % rule.num_experts
        # Strides are coprime to the experts: no id comes twice.
        stride = torch.tensor(strides)[((bits >> 35) & 0xFFFFFF) % len(strides)]
        return (first[..., None] + stride[..., None] * torch.arange(rule.top_k)) % rule.num_experts

    def __call__(self, index: int, num_tokens: int) -> torch.Tensor:
        if index == self._first:
            self._step.add_(self._STEP)
            self._ids = self._draw(num_tokens)
        if self._ids is None or self._ids.shape[1] != num_tokens:  # a drafter's pass has token rows of its own
            return self._draw(num_tokens)[self._place[index]]
        return self._ids[self._place[index]]

    def _draw(self, num_tokens: int) -> torch.Tensor:
        rows = self._rows[:num_tokens] if num_tokens <= self._PLACES else torch.arange(num_tokens).to(self._rows)
        return self._table[:, (self._step + rows).remainder_(self._PLACES)]
