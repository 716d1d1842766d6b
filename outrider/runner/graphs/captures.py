"""Captured steps: a whole step (inputs, forward, finish, draft) as one CUDA graph per key.

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
from typing import Any

import torch

from outrider.core import Limits
from outrider.layers.base import DecoderLayer
from outrider.models.base import Model
from outrider.runner.graphs.keys import GraphKey, GraphKeys, empty_batch, empty_plan
from outrider.runner.step import DeviceResult, DeviceStep

log = logging.getLogger("outrider")

PATIENCE = 16  # steps that a wider graph serves before one of their own is captured: a capture takes as long
MOST_LATER = 256  # captures after start-up


@dataclass(frozen=True)
class CapturedStep:
    key: GraphKey
    graph: torch.cuda.CUDAGraph
    ints: torch.Tensor
    result: DeviceResult


class StepGraphs:
    def __init__(self, step: DeviceStep, limits: Limits) -> None:
        self._step = step
        step.cached.prepare_capture(limits)
        self.keys = GraphKeys(limits, step.drafter, takes_prompts=step.recurrent.needs_no_counts)
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._missed: Counter[GraphKey] = Counter()
        self._refused: set[GraphKey] = set()
        self._num_at_start = 0
        # Memory is shared by captures of one pool on one stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def serve(self, key: GraphKey) -> CapturedStep | None:
        """The captured step, or a wider one while a key is new. One that is met for the first time is captured now;
        None if there is no memory for it, or have been too many."""
        if key in self._captured:
            return self._captured[key]
        self._missed[key] += 1
        wider = self.keys.wider(key)
        if wider in self._captured and self._missed[key] <= PATIENCE:
            return self._captured[wider]
        if key in self._refused or len(self._captured) - self._num_at_start >= MOST_LATER:
            return None
        return self._try(key)

    def run(self, key: GraphKey, ints: torch.Tensor) -> DeviceResult:
        """The step as it is captured, uncaptured."""
        return self._step.body(self.keys.shape(key), ints, empty_plan(key))[2]

    def run_empty(self, key: GraphKey) -> None:
        """Compiles and loads what a capture must find loaded."""
        with one_layer_each(self._step.model):
            self.run(key, empty_batch(self.keys.shape(key), self._step.state.device))

    def get(self, key: GraphKey) -> CapturedStep:
        if key not in self._captured:
            self.run_empty(key)
            self.capture(key)
        return self._captured[key]

    @contextmanager
    def borrowed(self, key: GraphKey) -> Iterator[CapturedStep]:
        """To be timed. A key that serves no batch, as none has drafts and proposes nothing, is not kept."""
        yield self.get(key)
        if key.has_drafts and not key.propose:
            torch.cuda.synchronize()
            del self._captured[key]

    def capture_ladder(self, *, takes_checkpoints: bool = False) -> int:
        """The largest first, so that all share its memory. Returns how many."""
        if self.keys.largest is not None:
            self.get(self.keys.largest)
        for key in self.keys.decoding(takes_checkpoints=takes_checkpoints):
            self.get(key)
        self._num_at_start = len(self._captured)
        return self._num_at_start

    def run_sizes(self, *, takes_checkpoints: bool = False) -> None:
        """What `capture_ladder` will capture, and steps with prompts, of which only the capture is then left for when
        they are met."""
        for key in (*self.keys.decoding(takes_checkpoints=takes_checkpoints), *self.keys.prompts()):
            self.run_empty(key)

    def _try(self, key: GraphKey) -> CapturedStep | None:
        """If memory does not suffice, such steps stay uncaptured."""
        for _ in range(2):
            try:
                return self.get(key)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a capture cannot do that itself
        log.warning("no memory to capture steps of %s: they run uncaptured", key)
        self._refused.add(key)
        return None

    def capture(self, key: GraphKey) -> None:
        """After `run_empty` of the same key. Builds everything anew."""
        ints = empty_batch(self.keys.shape(key), self._step.state.device)
        graph = torch.cuda.CUDAGraph()
        result = self._record(graph, lambda: self.run(key, ints))
        # The next replay overwrites all of it: what is not copied when a step is queued must not be there.
        assert result.logprobs is None and result.prompt_logprobs is None
        self._captured[key] = CapturedStep(key, graph, ints, result)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], DeviceResult]) -> DeviceResult:
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


class _Passing(DecoderLayer):
    """Stands in for a layer that is like another one."""

    def __init__(self, rotary: int) -> None:
        self.rotary = rotary

    def __call__(self, delta: Any, residual: torch.Tensor, *_: Any) -> tuple[Any, torch.Tensor]:
        return delta, residual


@contextmanager
def one_layer_each(model: Model) -> Iterator[None]:
    """Of layers that are alike only the first does anything: enough to compile and load what all of them launch."""
    layers = model.layers
    if any(isinstance(layer, _Passing) for layer in layers):
        yield
        return
    kinds: set[object] = set()
    short: list[DecoderLayer] = []
    for layer in layers:
        shapes = tuple((name, slot.shape) for name, slot in layer.weights("").items())
        kind = (type(layer), layer.rotary, shapes)
        short.append(_Passing(layer.rotary) if kind in kinds else layer)
        kinds.add(kind)
    model.layers = short
    try:
        yield
    finally:
        model.layers = layers
