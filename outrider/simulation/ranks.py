"""The cost table of several tensor-parallel ranks, estimated from that of one.

Each rank reads its share of the weights and of the contexts and computes its share of the products. The ranks sum the
hidden states twice in every layer, over links of a given speed. The rest of a step's time (launches, norms, sampling)
is assumed to be the same as with one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from outrider.core.costs import MixedStepCosts, ReadCost, StepCosts
from outrider.runner.interface import BoundedSteps, MeasuredDrafting, WorkerInfo
from outrider.simulation.cost_table import CostTable, ModelFacts

Costs = TypeVar("Costs", StepCosts, MixedStepCosts)
SUMS_PER_LAYER = 2  # after attention and after the feed-forward part


@dataclass(frozen=True)
class Link:
    """The network link of each rank to the others: its speed and latency."""

    bandwidth: float  # bytes per second, in each direction
    latency: float  # seconds of the smallest sum over all ranks


def over_ranks(table: CostTable, num_ranks: int, link: Link) -> CostTable:
    """Estimate the cost table of an engine with `num_ranks` tensor-parallel ranks, which divide the weights, heads and
    pages."""
    if num_ranks == 1:
        return table

    def seconds_of(num_tokens: int, seconds: float) -> float:
        work = min(seconds, work_seconds(table.model, num_tokens))
        return seconds - work + work / num_ranks + sum_seconds(table.model, num_tokens, num_ranks, link)

    decoding = tuple(replace(own, seconds=tuple(seconds_of(count * (1 + own.num_drafts), seconds)
                                                for count, seconds in zip(own.requests, own.seconds, strict=True)))
                     for own in table.decoding)
    prompts = tuple(replace(own, seconds=tuple(map(seconds_of, own.tokens, own.seconds))) for own in table.prompts)
    return replace(table, decoding=decoding, prompts=prompts, info=_info(table, num_ranks, seconds_of),
                   reading=_shared(table.reading, num_ranks), attending=_shared(table.attending, num_ranks))


def work_seconds(model: ModelFacts, num_tokens: int) -> float:
    """The least seconds of a step with this many tokens: the time to read the weights or to compute the matrix
    products, whichever is longer."""
    return max(model.weight_bytes / model.bandwidth, num_tokens * model.token_operations / model.operations)


def sum_seconds(model: ModelFacts, num_tokens: int, num_ranks: int, link: Link) -> float:
    """Seconds of a step that ranks spend on all-reduces. In each all-reduce, a rank sends and receives its share of the
    hidden states twice."""
    num_bytes = num_tokens * model.hidden_size * model.itemsize
    each = link.latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / link.bandwidth
    return SUMS_PER_LAYER * model.num_layers * each


def _shared(costs: tuple[ReadCost, ...], num_ranks: int) -> tuple[ReadCost, ...]:
    return tuple(cost._replace(seconds=cost.seconds / num_ranks) for cost in costs)


def _info(table: CostTable, num_ranks: int, seconds_of: Callable[[int, float], float]) -> WorkerInfo:
    """The report that workers on several ranks would give of themselves. The scheduler's costs are estimated for all
    ranks. There are more pages, because dividing the weights leaves more memory."""
    info, drafting, prompt_steps = table.info, table.info.drafting, table.info.prompt_steps

    def scaled(costs: Costs) -> Costs:
        return replace(costs, seconds=tuple(map(seconds_of, costs.tokens, costs.seconds)),
                       reading=_shared(costs.reading, num_ranks))

    if isinstance(drafting, MeasuredDrafting):
        drafting = replace(drafting, costs=scaled(drafting.costs))
    if isinstance(prompt_steps, BoundedSteps):
        attending = _shared(prompt_steps.costs.attending, num_ranks)
        prompt_steps = replace(prompt_steps, costs=replace(scaled(prompt_steps.costs), attending=attending))
    freed = table.model.weight_bytes * (num_ranks - 1) // info.layout.page_bytes
    return replace(info, drafting=drafting, prompt_steps=prompt_steps, num_pages=info.num_pages * num_ranks + freed)
