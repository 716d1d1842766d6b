"""Measures at start-up the costs of steps in which prompts run beside requests that decode. Matrix products are
measured by the number of tokens, attention by the number of pairs of a token and a key.

The measured steps are captured if possible, and the captures are kept, so that no step of these sizes waits for a
capture later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from outrider.core import Limits
from outrider.core.costs import MEASURED_BOUNDS, SMALL_STEP, MixedStepCosts, ReadCost
from outrider.mixers import AttentionLayer
from outrider.mixers.paged.backend import KeyValueCache
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.costs import best_seconds, read_costs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.sizes import GraphSizes
from outrider.runner.graphs.warm_up import run_dead
from outrider.runner.step import DeviceStep

CHUNK, CONTEXT = 1024, 7168  # tokens whose attention is measured, and computed tokens before them
LEAST_TOKENS = 64  # tokens of the smallest step that is measured
FEW_REQUESTS = (16, 64)  # small steps have few requests, and graphs for so many: logits of more take time
MANY_REQUESTS = 256  # requests of the graphs that are measured, at most: logits of more take time that few steps need
CALLS = 4  # calls of a kernel between two looks at the clock


@torch.inference_mode()
def measure_mixed_costs(step: DeviceStep, limits: Limits, graphs: StepGraphs | None,
                        max_seconds: float) -> MixedStepCosts:
    """Measure the costs of steps with prompts, up to sizes that take well over `max_seconds`."""
    def seconds_of(size: int) -> float:
        own = best_seconds(_step_of(step, limits, graphs, size), step.state.device)
        return step.ranks.link.decide(lambda: own)  # it decides whether larger steps run

    sizes = mixed_sizes(GraphSizes.from_limits(limits))
    useful = with_larger_sizes(useful_sizes(seconds_up_to(max_seconds, sizes, seconds_of)), sizes)
    reading, row_seconds = read_costs(step)
    costs = MixedStepCosts(tuple(useful), tuple(useful.values()), attend_costs(step), reading=reading,
                           row_seconds=row_seconds)
    if graphs is not None:
        small = step.ranks.link.decide(lambda: costs.largest_size(SMALL_STEP * costs.seconds[0]))
        for requests in FEW_REQUESTS:
            graphs.get(_mixed_key(graphs, min(requests, limits.max_requests), small))
    return costs


def seconds_up_to(max_seconds: float, sizes: Sequence[int], seconds_of: Callable[[int], float]) -> dict[int, float]:
    """Measure the seconds of each size in turn, and stop after the first size that takes far more than `max_seconds`.
    If even the smallest size takes longer than `max_seconds`, because a step reads all weights, the limit is relative
    to that size instead, so that prompts get as much time as decoding."""
    found: dict[int, float] = {}
    for size in sizes:
        found[size] = seconds_of(size)
        if found[size] > MEASURED_BOUNDS * max(max_seconds, found[sizes[0]]):
            break
    return found


def useful_sizes(found: dict[int, float]) -> dict[int, float]:
    """Drop the sizes that took longer than a larger one, and sort the rest in ascending order."""
    useful: dict[int, float] = {}
    for size in sorted(found, reverse=True):
        if found[size] <= min(useful.values(), default=found[size]):
            useful[size] = found[size]
    return dict(reversed(useful.items()))


def with_larger_sizes(measured: dict[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """Add estimates for the sizes beyond the largest measured one, which occur in a burst of prompts. They occupy the
    whole device, so their time is taken to be proportional to their tokens. Measuring them would make start-up longer.
    """
    largest = max(measured)
    return {**measured, **{size: measured[largest] / largest * size for size in sizes if size > largest}}


def mixed_sizes(sizes: GraphSizes) -> list[int]:
    """Return the sizes of the steps to measure, ascending. Steps with fewer tokens than the first size are padded to
    it: they would take hardly less time, because every step reads all weights."""
    return [size for size in sizes.prompt_tokens if size >= LEAST_TOKENS] or sizes.prompt_tokens[-1:]


def _step_of(step: DeviceStep, limits: Limits, graphs: StepGraphs | None,
             tokens: int) -> Callable[[], None]:
    """Return a function that runs one step of `tokens` token rows, with the longest contexts, the most drafts and, if
    captured, checkpoints."""
    if graphs is None:
        lens = [min(limits.max_len, tokens - start) for start in range(0, tokens, limits.max_len)]
        return lambda: run_dead(step, lens, num_wanted=limits.max_drafts, bound=limits.max_len)
    captured = graphs.get(_mixed_key(graphs, min(MANY_REQUESTS, limits.max_requests), tokens))
    return lambda: captured.replay(lambda: None)


def _mixed_key(graphs: StepGraphs, requests: int, tokens: int) -> GraphKey:
    max_drafts, takes_checkpoints = graphs.keys.limits.max_drafts, graphs.keys.takes_checkpoints
    return GraphKey(requests, tokens, max_drafts, max_drafts > 0, takes_checkpoints, has_prompts=True)


def attend_costs(step: DeviceStep) -> tuple[ReadCost, ...]:
    """Measure the seconds of attention for each pair of a prompt's token and a key, summed over all layers with the
    same window. Empty if the backend has nothing to time."""
    every = [*step.model.attention_layers, *(() if step.drafter is None else step.drafter.attention_layers)]
    layers = [layer for layer in every if isinstance(layer, AttentionLayer)]  # latent ones have kernels of their own
    kinds = Counter((own.num_heads, own.num_kv_heads, own.head_dim, own.window) for own in layers)
    by_window: dict[int | None, float] = {}
    for layer in layers:
        count = kinds.pop((layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window), 0)
        cache = KeyValueCache.from_pool(step.pool, layer.index)
        attend = step.backend.probe_prompt(layer, cache, CHUNK, CONTEXT, step.model.dtype) if count else None
        if attend is not None:
            seconds = count * _pair_seconds(attend, layer, step.state.device)
            by_window[layer.window] = by_window.get(layer.window, 0.0) + seconds
    return tuple(ReadCost(window, seconds) for window, seconds in by_window.items())


def _pair_seconds(attend: Callable[[], object], layer: AttentionLayer, device: torch.device) -> float:
    """Measure the seconds that attention takes in one layer for one pair of a query and a key."""
    def run() -> None:
        for _ in range(CALLS):
            attend()

    keys = CONTEXT + (CHUNK + 1) / 2
    pairs = CHUNK * (keys if layer.window is None else min(keys, layer.window))
    attend()
    return best_seconds(run, device) / (CALLS * pairs)
