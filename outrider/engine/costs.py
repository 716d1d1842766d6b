"""Measures what a step costs by its number of tokens, and what the drafter adds, once at start-up.

Runs whole steps of null rows: everything but the reading of context, which the choice of drafts hardly changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from outrider.core import Limits
from outrider.runner.cuda import CudaRunner
from outrider.runner.graphs import GraphKey, empty_batch, empty_plan, empty_shape
from outrider.runner.step import DeviceStep
from outrider.sched.drafts import StepCosts

REPEATS = 3


@torch.inference_mode()
def measure_costs(step: DeviceStep, limits: Limits, runner: CudaRunner | None = None,
                  sizes: Sequence[int] | None = None) -> StepCosts:
    k = limits.max_drafts
    most = min(limits.max_requests * (1 + k), limits.max_batched_tokens)
    if sizes is None:
        few = (1, 2, 4) if runner is not None else (1, 2, 3, 5)  # captured sizes, where there are graphs
        sizes = sorted({*few, *(size for size in (8, 16, 32, 64, 128, 256, 512) if size < most), most})
    seconds = [_seconds(step, limits, runner, size, propose=0) for size in sizes]
    for i in range(1, len(seconds)):
        seconds[i] = max(seconds[i], seconds[i - 1])  # more tokens never cost less; a dip is noise
    fixed = each = 0.0
    if step.drafter is not None and step.drafter.attention_layers:
        one, all_drafts = (_seconds(step, limits, runner, 1, propose) - seconds[0] for propose in (1, k))
        fixed = max(0.0, one)
        each = max(0.0, (all_drafts - one) / max(1, k - 1))
    is_padded = runner is not None and runner.graphs is not None
    return StepCosts(tuple(sizes), tuple(seconds), fixed, each, is_padded)


def _seconds(step: DeviceStep, limits: Limits, runner: CudaRunner | None, tokens: int, propose: int) -> float:
    """The best of a few runs of a step of `tokens` token rows."""
    requests = min(tokens, limits.max_requests)
    if runner is not None and runner.graphs is not None:
        tokens = -(-tokens // requests) * requests
        captured = runner.graphs.get(GraphKey(requests, tokens, False, propose, tokens > requests))
        return _best(captured.graph.replay, step.state.device)
    key = GraphKey(requests, tokens, False, propose, tokens > requests)
    shape = empty_shape(key, limits.max_drafts if tokens > requests else 0, limits.max_len)
    ints = empty_batch(shape, step.state.device)
    return _best(lambda: step.body(shape, ints, empty_plan(key)), step.state.device)


def _best(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
