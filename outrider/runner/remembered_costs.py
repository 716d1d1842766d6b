"""Stores step costs measured on a CPU, so that an engine with a default drafter starts quickly. Costs are measured at
the first start and checked at later ones.

Measuring takes a second or more, too long for engines that did not ask for drafts. A later start times three steps
instead. If all three are slower or faster by the same factor, all stored costs are multiplied by it; otherwise
everything is measured again. The three steps are timed in several rounds if need be, because on a busy machine the
shortest times are the least disturbed. Costs that a busy machine made implausible are used for this start and not
stored.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.costs import DraftCost, StepCosts
from outrider.kernels import cpu as native
from outrider.kernels.cpu.measured import recall, remember
from outrider.runner.graphs.costs import measure_costs, step_seconds
from outrider.runner.step import DeviceStep

MOST_DIFFERENCE = 0.2  # between the factors by which steps are slower
MOST_ROUNDS = 4  # in which the three steps are timed
# Settings that products, attention or the sizes of steps depend on.
SETTINGS = ("model", "dtype", "attention_backend", "kv_cache_dtype", "page_size", "exact", "packed_weights",
            "keep_quantized", "activation_bits", "enable_lora")


def remembered_costs(config: EngineConfig, step: DeviceStep, limits: Limits) -> StepCosts:
    if not native.available() or step.ranks.count > 1:  # ranks must run equally many steps, whatever they remember
        return measure_costs(step, limits)
    name = _name(config, limits)
    known = _read(recall(name))
    if known is not None and (factor := _factor(known, step, limits)) is not None:
        return _times(known, factor)
    costs = measure_costs(step, limits)
    if _is_plausible(costs, limits.max_drafts):
        remember(name, {"tokens": costs.tokens, "seconds": costs.seconds, "drafting": costs.drafting})
    return costs


def _name(config: EngineConfig, limits: Limits) -> str:
    settings = [getattr(config, field) for field in SETTINGS]
    key = repr((settings, config.drafter_settings, limits, torch.get_num_threads()))
    return f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _read(found: Any) -> StepCosts | None:
    """Read the costs from a stored entry; None if the entry is damaged."""
    try:
        costs = StepCosts(tuple(map(int, found["tokens"])), tuple(map(float, found["seconds"])),
                          drafting=tuple(DraftCost(int(n), float(first), float(each))
                                         for n, first, each in found["drafting"]))
    except (KeyError, TypeError, ValueError):
        return None
    is_usable = len(costs.tokens) == len(costs.seconds) > 0 and all(seconds > 0 for seconds in costs.seconds)
    return costs if is_usable else None


@torch.inference_mode()
def _factor(known: StepCosts, step: DeviceStep, limits: Limits) -> float | None:
    """Return the factor by which steps are slower now than when they were measured. None if the three timed steps
    disagree: one token, one token with all its drafts checked, one token with a proposal."""
    drafts = limits.max_drafts
    steps = (1, 0), (1 + drafts, 0), (1, drafts)  # token rows, and drafts that are proposed
    before = [known.step(tokens) + known.draft(num_wanted) for tokens, num_wanted in steps]
    now = [float("inf")] * len(steps)
    for _ in range(MOST_ROUNDS):
        now = [min(best, step_seconds(step, limits, None, tokens, num_wanted, repeats=1))
               for best, (tokens, num_wanted) in zip(now, steps, strict=True)]
        one, *others = (seconds / known_seconds for seconds, known_seconds in zip(now, before, strict=True))
        if all(abs(other / one - 1) <= MOST_DIFFERENCE for other in others):
            return one
    return None


def _is_plausible(costs: StepCosts, max_drafts: int) -> bool:
    """Whether measured costs are plausible: a step takes no longer than its tokens in steps of one token each, and a
    proposal takes no longer than a step."""
    one = costs.step(1)
    return costs.draft(max_drafts) <= one and all(
        seconds <= size * one for size, seconds in zip(costs.tokens, costs.seconds, strict=True))


def _times(costs: StepCosts, factor: float) -> StepCosts:
    return replace(costs, seconds=tuple(factor * seconds for seconds in costs.seconds),
                   drafting=tuple(DraftCost(n, factor * first, factor * each) for n, first, each in costs.drafting))
