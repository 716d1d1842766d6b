"""Captured steps: a whole decode step (inputs, forward, finish, draft) as one CUDA graph per padded size.

A request's number of drafts is data, not a key: a graph serves any batch that fits its padded requests and tokens. The
host copies the batch's integers into the graph's buffer and replays; lengths are read on the device. Only here is the
worst-case length bound made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.attention.base import LengthBound
from outrider.core import Limits, ScheduledBatch
from outrider.runner.inputs import BatchShape, PaddedSize
from outrider.runner.step import DeviceResult, DeviceStep, StepPlan
from outrider.sample.extras import StepExtras, StepNeeds


@dataclass(frozen=True)
class GraphKey:
    requests: int
    tokens: int
    any_sampled: bool
    propose: int
    has_drafts: bool  # not said by the counts: a few drafts may fit into the padding of the requests


@dataclass(frozen=True)
class CapturedStep:
    key: GraphKey
    graph: torch.cuda.CUDAGraph
    ints: torch.Tensor
    result: DeviceResult


def request_ladder(max_requests: int) -> list[int]:
    sizes = [1, 2, 4, 8, *range(16, 129, 8), *range(144, max_requests + 1, 16)]
    return sorted({size for size in sizes if size < max_requests} | {max_requests})


class StepGraphs:
    def __init__(self, step: DeviceStep, limits: Limits) -> None:
        self._step = step
        self._limits = limits
        self._ladder = request_ladder(limits.max_requests)
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._pool: tuple[int, int] | None = None

    def key_for(self, batch: ScheduledBatch) -> GraphKey | None:
        """The graph that serves a batch; None if it has a prompt in it, asks the sampler for more than a draw, or may
        write checkpoints, whose pages come from the host."""
        if batch.checkpoints or batch.folds:
            return None
        if batch.num_requests > self._ladder[-1] or not all(batch.samples) or max(batch.num_known) > 1:
            return None
        if batch.admissions and self._step.drafter is not None:
            return None
        if not all(params.is_plain for params in batch.params):
            return None
        requests = next(size for size in self._ladder if size >= batch.num_requests)
        per_request = -(-batch.num_tokens // requests)
        any_sampled = any(not params.is_greedy for params in batch.params)
        return GraphKey(requests, requests * per_request, any_sampled, batch.propose, any(batch.num_drafts))

    def padded_size(self, key: GraphKey) -> PaddedSize:
        return PaddedSize(key.requests, key.tokens, logit_rows=key.tokens, drafts=self._most_drafts(key))

    def get(self, key: GraphKey) -> CapturedStep:
        if key not in self._captured:
            self._captured[key] = self._capture(key)
        return self._captured[key]

    def capture_ladder(self) -> int:
        """The sizes a server meets, largest first so that their memory is shared. Returns how many."""
        drafts = self._limits.max_drafts
        for requests in reversed(self._ladder):
            self.get(GraphKey(requests, requests, False, 0, False))
            if drafts:
                self.get(GraphKey(requests, requests * (1 + drafts), False, drafts, True))
        return len(self._captured)

    def _most_drafts(self, key: GraphKey) -> int:
        return self._limits.max_drafts if key.has_drafts else 0

    def _capture(self, key: GraphKey) -> CapturedStep:
        shape = empty_shape(key, self._most_drafts(key), self._limits.max_len)
        ints = empty_batch(shape, self._step.state.device)
        torch.cuda.synchronize()
        # Warm-up compiles and allocates; the capture builds everything anew.
        self._step.body(shape, ints, empty_plan(key))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            _, _, result = self._step.body(shape, ints, empty_plan(key))
        self._pool = self._pool or graph.pool()
        return CapturedStep(key, graph, ints, result)


def empty_shape(key: GraphKey, most_drafts: int, max_len: int) -> BatchShape:
    """Extents of a batch whose requests may each have as many tokens as fit."""
    return BatchShape(
        key.requests, key.tokens, key.tokens, most_drafts, key.requests, key.tokens,
        (1 + most_drafts,) * key.requests, (), LengthBound(max_len),
    )  # fmt: skip


def empty_batch(shape: BatchShape, device: torch.device) -> torch.Tensor:
    """A batch of null rows, whose tokens and logit rows are all padding."""
    last = [shape.requests - 1]
    ints = [*[0] * (5 * shape.requests + 1), *last * shape.tokens, *[shape.tokens] * shape.tokens,
            *last * shape.logit_rows, *[shape.most_drafts + 1] * shape.logit_rows, *[0] * shape.logit_rows]
    return torch.tensor(ints, dtype=torch.int64, device=device)


def empty_plan(key: GraphKey) -> StepPlan:
    return StepPlan(StepNeeds(any_sampled=key.any_sampled), StepExtras(), key.any_sampled, key.propose)
