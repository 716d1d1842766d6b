"""Mixtures of experts in plain torch: the choice of experts for each token row, and their weighted results.

A *pair* is one (token row, chosen expert); pair p belongs to token row p // k. This file works on tensors; layers load
the weights and add shared experts and norms. Any float type is served; sums are in float32, or in float64 for a float64
model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels import reference
from outrider.kernels.activations import CLAMPED, GATED, PLAIN, activate, is_known, limited_silu
from outrider.kernels.scaled import Scaled, rounded

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")  # a group is worth its best expert, or the sum of its two best
# Most weight elements gathered at a time where no kernel reads them in place; bounds that path's memory.
MAX_GATHERED = 1 << 26
# Added to a sum that divides: sigmoid scores may all vanish.
TINY = 1e-20
LOWEST = -1e38  # below any score, and the sum of two is still above minus infinity


@dataclass(frozen=True)
class RouteRule:
    """The settings of a router, without its weights: how it chooses experts from scores."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalise: bool = True  # the chosen weights add up to one, before `scale`
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1  # groups that may be chosen from
    group_score: str = "max"

    def __post_init__(self) -> None:
        assert self.scoring in SCORINGS and self.group_score in GROUP_SCORES
        assert self.num_experts % self.num_groups == 0 and 1 <= self.top_groups <= self.num_groups
        assert 1 <= self.top_k <= self.top_groups * self.group_size
        assert self.num_groups == 1 or self.group_score == "max" or self.group_size >= 2

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups


class ExpertBiases(NamedTuple):
    """The biases of all experts, in the order of the weights' outputs: gate before up."""

    gate_up: Tensor  # [experts, 2 x width]
    down: Tensor | None  # [experts, hidden]; None on ranks that leave it to another


class Routed(NamedTuple):
    ids: Tensor  # [tokens, k] int64, best first; ties go to the lowest id
    weights: Tensor  # [tokens, k] float32, or float64


def route(logits: Tensor, rule: RouteRule, bias: Tensor | None = None, expert_scale: Tensor | None = None) -> Routed:
    """Choose experts from logits [tokens, experts], float32 or float64. bias [experts] is added for the choice but not
    in the weights. expert_scale [experts] multiplies the weights of the chosen experts at the end."""
    logits = reference.widened(logits)
    scores = logits.softmax(dim=-1) if rule.scoring == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    # A dead token row may hold anything; what is not a number ranks last, so its ids are in range and distinct.
    ranked = ranked.nan_to_num(nan=LOWEST)
    if rule.top_groups < rule.num_groups:
        ranked = _in_best_groups(ranked, rule)
    # A stable sort, since topk does not say which of two equals it takes.
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k].contiguous()
    weights = scores.gather(-1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    weights = weights * rule.scale
    return Routed(ids, weights if expert_scale is None else weights * expert_scale[ids])


def _in_best_groups(ranked: Tensor, rule: RouteRule) -> Tensor:
    """Return the scores, with minus infinity for experts outside of the best groups."""
    grouped = ranked.view(-1, rule.num_groups, rule.group_size)
    worth = grouped.topk(1 if rule.group_score == "max" else 2, dim=-1).values.sum(dim=-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~chosen[..., None], -torch.inf).view_as(ranked)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
            added: Tensor | None = None, biases: ExpertBiases | None = None) -> Tensor:
    """Return the weighted sum of each token row's experts, plus `added` if given: x and added [tokens, hidden] ->
    [tokens, hidden].

    ids and weights [tokens, k]. down [experts, hidden, width]; gate_up [experts, 2 x width, hidden], gate first, or
    [experts, width, hidden] if the activation takes no gate. Shapes are fixed and nothing is read on the host, on any
    device; the price is a copy of each pair's weights.
    """
    return _mix(x, ids, weights, gate_up, down, activation, added, biases)


def scaled_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Scaled, down: Scaled, activation: str,
                   added: Tensor | None = None, rounds: bool = False,
                   biases: ExpertBiases | None = None) -> Tensor:
    """Compute `experts` with weights that are codes with scales. rounds: token rows are rounded to fp8 before the first
    projection, and the activation's results before the second. Each row is rounded by itself, in groups of as many
    inputs as share a scale."""
    return _mix(x, ids, weights, gate_up, down, activation, added, biases, rounds)


def _mix(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor | Scaled, down: Tensor | Scaled, activation: str,
         added: Tensor | None, biases: ExpertBiases | None, rounds: bool = False) -> Tensor:
    check_experts(x, ids, weights, gate_up, down, activation)
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    token = torch.arange(flat.shape[0], device=x.device) // top_k
    chunk = max(1, MAX_GATHERED // (math.prod(gate_up.shape[1:]) + math.prod(down.shape[1:])))
    parts = []
    for rows, chosen in zip(token.split(chunk), flat.split(chunk), strict=True):
        projected = _products(x[rows], gate_up[chosen], rounds)
        if biases is not None:
            projected += biases.gate_up[chosen]
        made = _products(activate(projected, activation).to(x.dtype), down[chosen], rounds)
        if biases is not None and biases.down is not None:
            made += biases.down[chosen]
        parts.append(made.to(x.dtype))
    out = combine(torch.cat(parts).view(num_tokens, top_k, x.shape[1]), weights)
    return out if added is None else out.add_(added)


def _products(x: Tensor, weights: Tensor | Scaled, rounds: bool) -> Tensor:
    """Multiply x [pairs, inputs] with the weight of each pair [pairs, outputs, inputs]: [pairs, outputs]."""
    if isinstance(weights, Scaled):
        x = rounded(x, min(weights.group, x.shape[1])) if rounds else x
        weights = weights.numbers()
    wide = reference.widened(x)
    return torch.einsum("pi,poi->po", wide, weights.to(wide.dtype))


def experts_with_shared(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str,
                        shared_gate_up: Tensor, shared_down: Tensor) -> Tensor:
    """Compute `experts` plus the result of one shared expert, which every token row takes. shared_gate_up [2 x width,
    hidden], or [width, hidden] without a gate; shared_down [hidden, width]. The shared expert's width may differ from
    the others'."""
    wide = reference.widened(x)
    hidden = reference.widened(activate(wide @ reference.widened(shared_gate_up).t(), activation).to(x.dtype))
    shared = (hidden @ reference.widened(shared_down).t()).to(x.dtype)
    return experts(x, ids, weights, gate_up, down, activation, shared)


def check_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor | Scaled, down: Tensor | Scaled,
                  activation: str) -> None:
    if not is_known(activation):
        known = ", ".join((*GATED, CLAMPED, *PLAIN, limited_silu(10.0)))
        raise ValueError(f"experts: activation is {activation!r}, it must be one of {known}")
    num_experts, hidden, width = down.shape
    rows = width if activation in PLAIN else 2 * width
    for name, tensor, shape in (
        ("x", x, (ids.shape[0], hidden)),
        ("ids", ids, (x.shape[0], ids.shape[-1])),
        ("weights", weights, tuple(ids.shape)),
        ("gate_up", gate_up, (num_experts, rows, hidden)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"experts: {name} has shape {list(tensor.shape)}, expected {list(shape)}")


def combine(made: Tensor, weights: Tensor) -> Tensor:
    """Add up made [tokens, k, hidden] with weights [tokens, k]: [tokens, hidden], in the order of k on every device."""
    total = reference.widened(made[:, 0]) * weights[:, :1]
    for slot in range(1, made.shape[1]):
        total = total + reference.widened(made[:, slot]) * weights[:, slot, None]
    return total.to(made.dtype)


def distinct_experts(ids: Tensor, num_experts: int) -> Tensor:
    """Return the number of distinct experts that the token rows chose, as a device scalar: a step reads the weights of
    these."""
    taken = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    return taken.scatter_(0, ids.reshape(-1), 1).sum()
