"""Captured steps: a whole step (inputs, forward, finish, draft) as one CUDA graph per key, or its halves as two.

The host copies the batch's integers into the graph's buffer and replays; lengths are read on the device. Sizes for
decoding are captured at start-up; others, steps with prompts in them above all, when they are met.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from outrider.core import Limits, StepForm, Uncaptured
from outrider.kernels.packet import empty_packet
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.keys import GraphKey, GraphKeys
from outrider.runner.graphs.sizes import MOST_LATER, PATIENCE
from outrider.runner.step import DeviceResult, DeviceStep

log = logging.getLogger("outrider")
Made = TypeVar("Made")
HostTurn = Callable[[], None]


@dataclass(frozen=True)
class WholeCapture:
    """A step in one graph: the host has no turn in it."""

    shape: CapturedShape
    ints: torch.Tensor
    result: DeviceResult
    graph: torch.cuda.CUDAGraph

    def replay(self, host_turn: HostTurn) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class SplitCapture:
    """A step in two graphs, forward and the rest: the host has its turn when the first is queued."""

    shape: CapturedShape
    ints: torch.Tensor
    result: DeviceResult
    forward: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph

    def replay(self, host_turn: HostTurn) -> None:
        self.forward.replay()
        host_turn()
        self.finish.replay()


class StepGraphs:
    def __init__(self, step: DeviceStep, limits: Limits) -> None:
        self._step = step
        step.cached.prepare_capture(limits)
        self.keys = GraphKeys(limits, step.drafter, takes_prompts=step.recurrent.needs_no_counts)
        self._captured: dict[GraphKey, WholeCapture | SplitCapture] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self._num_at_start = 0
        # Memory is shared by captures of one pool on one stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def serve(self, key: GraphKey) -> WholeCapture | SplitCapture | Uncaptured:
        """The captured step, or a wider one while a key is new. One that is met for the first time is captured now,
        unless there is no memory for it, or have been too many."""
        if key in self._captured:
            return self._captured[key]
        self._missed[key] += 1
        wider = self.keys.wider(key)
        if wider in self._captured and self._missed[key] <= PATIENCE:
            return self._captured[wider]
        if key in self._refused:
            return Uncaptured.NO_MEMORY
        if len(self._captured) - self._num_at_start >= MOST_LATER:
            return Uncaptured.TOO_MANY_CAPTURES
        return self._try(key)

    def run(self, key: GraphKey, ints: torch.Tensor, host_turn: HostTurn) -> DeviceResult:
        """The step as it is captured, uncaptured."""
        plan = key.plan
        half = self._step.forward_half(self.keys.shape(key), ints, plan)
        if key.form is StepForm.SPLIT:
            host_turn()
        return self._step.finish_half(half, plan)

    def run_empty(self, key: GraphKey) -> None:
        """Compiles and loads what a capture must find loaded."""
        shape = self.keys.shape(key)
        with self._step.model.one_layer_each():
            self._step.whole(shape, empty_packet(shape, self._step.state.device), key.plan)

    def get(self, key: GraphKey) -> WholeCapture | SplitCapture:
        if key not in self._captured:
            self.run_empty(key)
            self._captured[key] = self.capture(key)
        return self._captured[key]

    @contextmanager
    def borrowed(self, key: GraphKey) -> Iterator[WholeCapture | SplitCapture]:
        """To be timed. A key that serves no batch, as none has drafts and proposes nothing, is not kept."""
        yield self.get(key)
        if key.has_drafts and not key.propose:
            torch.cuda.synchronize()
            del self._captured[key]

    def capture_ladder(self, *, takes_checkpoints: bool = False) -> int:
        """The largest first, so that all share its memory. Returns how many."""
        for key in self.keys.at_start(takes_checkpoints=takes_checkpoints):
            self.get(key)
        self._num_at_start = len(self._captured)
        return self._num_at_start

    def run_sizes(self, *, takes_checkpoints: bool = False) -> None:
        """What `capture_ladder` will capture, and steps with prompts, of which only the capture is then left for when
        they are met."""
        for key in (*self.keys.decoding(takes_checkpoints=takes_checkpoints), *self.keys.prompts()):
            self.run_empty(key)

    def _try(self, key: GraphKey) -> WholeCapture | SplitCapture | Uncaptured:
        """If memory does not suffice, such steps stay uncaptured."""
        for _ in range(2):
            try:
                return self.get(key)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a capture cannot do that itself
        log.warning("no memory to capture steps of %s: they run uncaptured", key)
        self._refused.add(key)
        return Uncaptured.NO_MEMORY

    def capture(self, key: GraphKey) -> WholeCapture | SplitCapture:
        """After `run_empty` of the same key. Builds everything anew."""
        step, shape, plan = self._step, self.keys.shape(key), key.plan
        ints, graph = empty_packet(shape, step.state.device), torch.cuda.CUDAGraph()
        if key.form is StepForm.WHOLE:
            result = self._record(graph, lambda: step.whole(shape, ints, plan))
            captured: WholeCapture | SplitCapture = WholeCapture(shape, ints, result, graph)
        else:
            finish = torch.cuda.CUDAGraph()
            half = self._record(graph, lambda: step.forward_half(shape, ints, plan))
            result = self._record(finish, lambda: step.finish_half(half, plan))
            captured = SplitCapture(shape, ints, result, graph, finish)
        # The next replay overwrites all of it: what is not copied when a step is queued must not be there.
        assert result.logprobs is None and result.prompt_logprobs is None
        return captured

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Made]) -> Made:
        """What `torch.cuda.graph` does, without its collection of garbage, which takes longer than a capture. None may
        be collected on the way either: what dies could be a graph or an event."""
        self._stream.wait_stream(torch.cuda.current_stream())
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    result = run()
                except BaseException:
                    with suppress(RuntimeError):  # what ended the capture is the error that matters
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result
