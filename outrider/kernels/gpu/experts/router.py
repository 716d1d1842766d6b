"""A mixture of experts' router in one kernel: it turns a token row's router logits into scores, and chooses the best k
experts and their weights, perhaps within the best groups. One program serves a token row.

The logits are float32. `kernels.moe.RouteRule` says how experts are chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    next_power_of_two,
    pdl_options,
    refuse,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.moe import Routed, RouteRule

MAX_EXPERTS = 1024
_TINY = tl.constexpr(1e-20)  # as kernels.moe.TINY
_LOWEST = tl.constexpr(-1e38)  # the sum of two is still above minus infinity
_TAKEN = tl.constexpr(-(1 << 31))  # below every value, in their order


@triton.jit
def _ordered(values):
    """Map floats to integers in the same order, because a single instruction finds the greatest integer of a warp."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are one value
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(order, index):
    """Return the index of the greatest value; of equals, the lowest index."""
    return tl.min(tl.where(order == tl.max(order, axis=0), index, 1 << 30), axis=0)


@triton.jit
def _in_best_groups(ranked, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """Return ranked [GROUPS * SIZE] with minus infinity outside of the best groups."""
    grouped = tl.reshape(ranked, [GROUPS, SIZE])
    worth = tl.max(grouped, axis=1)
    if TOP2:
        member = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(grouped == worth[:, None], member, SIZE), axis=1)
        worth += tl.max(tl.where(member == first[:, None], float("-inf"), grouped), axis=1)
    group = tl.arange(0, GROUPS)
    left = _ordered(worth)
    chosen = tl.zeros([GROUPS], dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = _best(left, group)
        chosen = tl.where(group == best, 1, chosen)
        left = tl.where(group == best, _TAKEN, left)
    return tl.reshape(tl.where(chosen[:, None] > 0, grouped, float("-inf")), [GROUPS * SIZE])


@kernel
def _route_kernel(
    logits, bias, expert_scale, ids, weights, logits_stride, scale,
    E: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_EXPERT_SCALE: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    exists = expert < E
    logit = tl.load(logits + token * logits_stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    ranked = score
    if HAS_BIAS:
        ranked += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    # What is not a number ranks last among the experts there are: ids stay in range, and distinct, in dead token rows.
    ranked = tl.where(ranked == ranked, ranked, _LOWEST)
    ranked = tl.where(exists, ranked, float("-inf"))
    if TOP_GROUPS < GROUPS:
        ranked = _in_best_groups(ranked, GROUPS, EXPERTS // GROUPS, TOP_GROUPS, TOP2)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], dtype=tl.int32)
    left = _ordered(ranked)
    for k in tl.static_range(K):
        best = _best(left, expert)
        chosen = tl.where(slot == k, best, chosen)
        left = tl.where(expert == best, _TAKEN, left)
    is_own = (slot < K)[:, None] & (expert[None, :] == chosen[:, None])
    weight = tl.sum(tl.where(is_own, score[None, :], 0.0), axis=1)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + _TINY)
    weight *= scale
    if HAS_EXPERT_SCALE:
        weight *= tl.load(expert_scale + chosen, mask=slot < K, other=0.0).to(tl.float32)
    tl.store(ids + token * K + slot, chosen.to(tl.int64), mask=slot < K)
    tl.store(weights + token * K + slot, weight, mask=slot < K)


def can_route(rule: RouteRule) -> bool:
    """Whether the kernel serves the rule: groups become rows of a matrix whose sides must be powers of two."""
    is_split = rule.top_groups < rule.num_groups
    shapes = (rule.num_groups, rule.group_size) if is_split else ()
    return rule.num_experts <= MAX_EXPERTS and all(n == next_power_of_two(n) for n in shapes)


def takes_rule(logits: torch.Tensor, rule: RouteRule, *_: object) -> bool:
    return can_route(rule)


def route(
    logits: torch.Tensor, rule: RouteRule, bias: torch.Tensor | None = None, expert_scale: torch.Tensor | None = None,
    *, pdl: bool | None = None,
) -> Routed:
    """Choose experts from logits [tokens, experts]: returns ids [tokens, k] int64 and weights [tokens, k] float32."""
    pdl = uses_pdl(logits.device) if pdl is None else pdl
    name, device, num_tokens, experts = "route", logits.device, logits.shape[0], rule.num_experts
    if not can_route(rule):
        refuse(name, "rule", f"is not supported: {rule}")
    require_tensor(name, "logits", logits, (None, experts), device, FLOATS)
    for argument, vector in (("bias", bias), ("expert_scale", expert_scale)):
        if vector is not None:
            require_tensor(name, argument, vector, (experts,), device, FLOATS)
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return Routed(ids, weights)
    width = next_power_of_two(experts)
    _route_kernel[(num_tokens,)](
        logits, logits if bias is None else bias, logits if expert_scale is None else expert_scale, ids, weights,
        logits.stride(0), rule.scale, E=experts, EXPERTS=width, K=rule.top_k, SLOTS=next_power_of_two(rule.top_k),
        GROUPS=rule.num_groups, TOP_GROUPS=rule.top_groups, TOP2=rule.group_score == "top2",
        SIGMOID=rule.scoring == "sigmoid", RENORMALISE=rule.renormalise, HAS_BIAS=bias is not None,
        HAS_EXPERT_SCALE=expert_scale is not None, PDL=pdl, num_warps=1 if width <= 256 else 2, **pdl_options(pdl),
    )
    return Routed(ids, weights)
