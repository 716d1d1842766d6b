"""Captured steps: a whole step (inputs, forward, finish, draft) as one CUDA graph per key, or its halves as two.

The host copies the batch's integers into the graph's buffer and replays; lengths are read on the device. Sizes for
decoding are captured at start-up; others, steps with prompts in them above all, when they are met.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from outrider.core import Limits, StepForm, Uncaptured
from outrider.kernels.packet import empty_packet
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.keys import GraphKey, GraphKeys, SamplerForm
from outrider.runner.graphs.sizes import MOST_LATER, PATIENCE, PAUSE
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
        self.keys = GraphKeys(limits, step.drafter, takes_prompts=step.recurrent.needs_no_counts,
                              takes_parameters=step.has_sampler_kernels)
        self._captured: dict[GraphKey, WholeCapture | SplitCapture] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self._num_at_start = 0
        self._stand_ins: dict[GraphKey, GraphKey | None] = {}  # wider keys of missed ones, until the next capture
        self._next_capture = 0.0  # time before which no graph is captured if a wider one serves
        # Memory is shared by captures of one pool on one stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def serve(self, key: GraphKey) -> WholeCapture | SplitCapture | Uncaptured:
        """The captured step, or a wider one while a key is new: then its own is captured when it has been met often,
        with pauses between such captures, so that nobody waits long. A key that no other serves is captured now: that
        takes as long as an uncaptured step. None is captured if there is no memory for it, or have been too many."""
        if key in self._captured:
            return self._captured[key]
        self._missed[key] += 1
        if key not in self._stand_ins:
            self._stand_ins[key] = self.keys.wider(key, self._captured)
        wider = self._stand_ins[key]
        is_full = len(self._captured) - self._num_at_start >= MOST_LATER
        if wider is not None:
            is_due = self._missed[key] > PATIENCE and time.perf_counter() >= self._next_capture
            if is_full or key in self._refused or not is_due:
                return self._captured[wider]
        if key in self._refused:
            return Uncaptured.NO_MEMORY
        return Uncaptured.TOO_MANY_CAPTURES if is_full else self._try(key, pauses=wider is not None)

    def run(self, key: GraphKey, ints: torch.Tensor, host_turn: HostTurn) -> DeviceResult:
        """The step as it is captured, uncaptured."""
        plan = self.keys.plan(key)
        half = self._step.forward_half(self.keys.shape(key), ints, plan)
        if key.form is StepForm.SPLIT:
            host_turn()
        return self._step.finish_half(half, plan)

    def run_empty(self, key: GraphKey) -> None:
        """Compiles and loads what a capture must find loaded."""
        shape = self.keys.shape(key)
        with self._step.model.one_layer_each():
            self._step.whole(shape, empty_packet(shape, self._step.state.device), self.keys.plan(key))

    def get(self, key: GraphKey) -> WholeCapture | SplitCapture:
        if key not in self._captured:
            self.run_empty(key)
            self._captured[key] = self.capture(key)
            self._stand_ins.clear()
        return self._captured[key]

    @contextmanager
    def borrowed(self, key: GraphKey) -> Iterator[WholeCapture | SplitCapture]:
        """To be timed. A key that serves no batch, as none has drafts and proposes nothing, is not kept."""
        yield self.get(key)
        if key.has_drafts and not key.propose:
            torch.cuda.synchronize()
            del self._captured[key]
            self._stand_ins.clear()

    def capture_ladder(self, *, takes_checkpoints: bool = False) -> int:
        """The largest first, so that all share its memory. Returns how many."""
        for key in self.keys.at_start(takes_checkpoints=takes_checkpoints):
            self.get(key)
        self._num_at_start = len(self._captured)
        num_full = sum(key.sampler is not SamplerForm.DRAW for key in self._captured)
        log.info("captured %d steps, %d of them with all sampling parameters; %d more at most when they are met",
                 self._num_at_start, num_full, MOST_LATER)
        return self._num_at_start

    def run_sizes(self, *, takes_checkpoints: bool = False) -> None:
        """Run every step that `capture_ladder` will capture, and steps with prompts, so that a step with prompts has
        only to be captured when it is first met."""
        own = takes_checkpoints
        for key in (*self.keys.with_parameters(takes_checkpoints=own), *self.keys.decoding(takes_checkpoints=own),
                    *self.keys.prompts()):
            self.run_empty(key)

    def _try(self, key: GraphKey, *, pauses: bool) -> WholeCapture | SplitCapture | Uncaptured:
        """If memory does not suffice, such steps stay uncaptured. `pauses`: a wider graph could have served, so that
        others like it may wait for theirs."""
        start = time.perf_counter()
        for _ in range(2):
            try:
                captured = self.get(key)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a capture cannot do that itself
            else:
                now = time.perf_counter()
                if pauses:
                    self._next_capture = now + PAUSE * (now - start)
                log.debug("captured %s in %.1f ms", key, (now - start) * 1e3)
                return captured
        log.warning("no memory to capture steps of %s: they run uncaptured", key)
        self._refused.add(key)
        return Uncaptured.NO_MEMORY

    def capture(self, key: GraphKey) -> WholeCapture | SplitCapture:
        """After `run_empty` of the same key. Builds everything anew."""
        step, shape, plan = self._step, self.keys.shape(key), self.keys.plan(key)
        ints, graph = empty_packet(shape, step.state.device), torch.cuda.CUDAGraph()
        if key.form is StepForm.WHOLE:
            result = self._record(graph, lambda: step.whole(shape, ints, plan))
            captured: WholeCapture | SplitCapture = WholeCapture(shape, ints, result, graph)
        else:
            finish = torch.cuda.CUDAGraph()
            half = self._record(graph, lambda: step.forward_half(shape, ints, plan))
            result = self._record(finish, lambda: step.finish_half(half, plan))
            captured = SplitCapture(shape, ints, result, graph, finish)
        assert result.prompt_logprobs is None, "the next replay overwrites a result, and these are not copied before"
        return captured

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Made]) -> Made:
        """Capture a run, as `torch.cuda.graph` does, but without its garbage collection, which takes longer than a
        capture. Collection is off meanwhile, because an object that is collected could be a graph or an event."""
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
