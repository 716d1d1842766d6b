"""Captured steps: a whole step (inputs, forward, finish, draft) as one CUDA graph per key, or its halves as two.

The host copies the batch's integers into the graph's buffer and replays; lengths are read on the device. Some sizes are
captured at start-up, and batches of other sizes run on them at first, padded. Another size gets a graph of its own
while the engine is idle, or once its steps have lost as much time as a capture takes.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import torch

from outrider.core import Limits, StepForm, Uncaptured
from outrider.kernels import ops
from outrider.kernels.packet import empty_packet
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.keys import GraphKey, GraphKeys, SamplerForm
from outrider.runner.graphs.losses import LONG, Losses
from outrider.runner.graphs.sizes import FILLED_ROWS, MOST_LATER
from outrider.runner.step import DeviceResult, DeviceStep

log = logging.getLogger("outrider")
Made = TypeVar("Made")
QUIET, LONG_QUIET = 0.02, 0.5  # seconds without requests before a capture that is short, and before any other
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


class _StandIn(NamedTuple):
    """How a step runs that has no graph of its own."""

    wider: GraphKey | None  # on this one's graph; None: without any
    loss: float  # seconds


class StepGraphs:
    def __init__(self, step: DeviceStep, limits: Limits) -> None:
        self._step = step
        step.cached.prepare_capture(limits)
        self.keys = GraphKeys(limits, step.drafting, takes_prompts=step.recurrent.needs_no_counts,
                              takes_checkpoints=step.recurrent.takes_checkpoints,
                              takes_parameters=step.has_sampler_kernels, whole_len=step.cached.whole_len,
                              takes_shared=step.backend.reads_shared_once and step.pool.layout.has_full_attention,
                              is_sharing_ready=self._is_sharing_ready)
        self._compiles_sharing = True  # perhaps
        self._captured: dict[GraphKey, WholeCapture | SplitCapture] = {}
        self.losses = Losses()
        self._loaded: set[GraphKey] = set()  # keys whose kernels have been launched
        self._refused: set[GraphKey] = set()
        self._num_at_start = 0
        self._goes_ahead = True
        self._usual: list[GraphKey] = []  # captured while the engine is idle, before any batch needs them
        self._stand_ins: dict[GraphKey, _StandIn] = {}  # how keys without a graph run, until the next capture
        self._due: GraphKey | None = None  # to be captured when the step that a wider graph serves is queued
        # Memory is shared by captures of one pool on one stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._reserved: torch.cuda.CUDAGraph | None = None
        self._reserved_bytes = 0
        self._dropped: list[GraphKey] = []  # captured before `drop`

    def serve(self, key: GraphKey) -> WholeCapture | SplitCapture | Uncaptured:
        """The captured step that serves the key, or the reason why the step runs uncaptured.

        A key without a graph runs on the cheapest wider graph, and `capture_due` captures the key once that is due. A
        step with prompts runs uncaptured where launching it costs less than padding it. A decode step that no graph
        covers is captured now, since more steps of its size will follow. Nothing is captured if memory is short or
        MOST_LATER captures have been made."""
        if key in self._captured:
            return self._captured[key]
        if key not in self._stand_ins:
            self._stand_ins[key] = self._find_stand_in(key)
        wider, loss = self._stand_ins[key]
        self.losses.add(key, loss)
        must, may = wider is None and not key.has_prompts, key not in self._refused and not self._is_full
        is_due = may and (must or self.losses.is_due(key))
        if wider is not None:
            self._due = key if is_due else None
            return self._captured[wider]
        if is_due:
            captured = self._try_capture(key, at_once=must)
            if captured is not None:
                return captured
        if key in self._refused:
            return Uncaptured.NO_MEMORY
        return Uncaptured.TOO_MANY_CAPTURES if self._is_full else Uncaptured.NEW_SIZE

    def capture_due(self) -> None:
        """Load or capture what the step that was just queued lacked: the device runs that step meanwhile, and the host
        would wait for it. Whatever fails here, wider graphs go on serving."""
        key, self._due = self._due, None
        if key is None:
            return
        try:
            self._try_capture(key, at_once=False)
        except Exception:
            log.exception("a capture of %s failed; its steps run on wider graphs", key)
            self._refused.add(key)

    @property
    def _is_full(self) -> bool:
        return len(self._captured) - self._num_at_start >= MOST_LATER

    def _find_stand_in(self, key: GraphKey) -> _StandIn:
        wider, launches = self.keys.wider(key, self._captured), self.losses.times.of_launches(key)
        padding = math.inf if wider is None else self.losses.times.of_padding(key, wider)
        if wider is None or (key.has_prompts and launches < padding):
            return _StandIn(None, launches)
        return _StandIn(wider, padding)

    def capture_ahead(self, quiet_seconds: float) -> float | None:
        """Make one capture if the engine has been idle long enough: QUIET seconds before a capture that is expected to
        be short, LONG_QUIET before any other. Returns the seconds after which to call again; None if there is nothing
        to capture before the next step."""
        if self._is_full or not self._goes_ahead or not (self._usual or self.losses.worst(self._refused)):
            return None
        least = QUIET if self.losses.capture_seconds <= LONG else LONG_QUIET
        if quiet_seconds < least:
            return least - quiet_seconds
        key = self._next_ahead()
        if key is not None:
            self._try_capture(key, at_once=True)
        return 0.0

    def stop_ahead(self) -> None:
        self._goes_ahead = False

    def _next_ahead(self) -> GraphKey | None:
        """The next key to capture while the engine is idle: first the key whose steps have lost the most time, then the
        usual keys. None if no key is left."""
        missed = self.losses.worst(self._refused)
        if missed is not None:
            return missed
        while self._usual:
            key = self._usual.pop()
            if key not in self._captured and key not in self._refused:
                self._num_at_start += 1  # memory was planned for it
                return key
        return None

    def run(self, key: GraphKey, ints: torch.Tensor, host_turn: HostTurn) -> DeviceResult:
        """Run the step that the key's graph would be, without a graph."""
        self._loaded.add(key)
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
        self._loaded.add(key)

    def get(self, key: GraphKey) -> WholeCapture | SplitCapture:
        if key not in self._captured:
            if key not in self._loaded:
                self.run_empty(key)
            self._captured[key] = self.capture(key)
            self._stand_ins.clear()
        return self._captured[key]

    @contextmanager
    def borrowed(self, key: GraphKey) -> Iterator[WholeCapture | SplitCapture]:
        """Lend the key's graph for timing. A graph that checks drafts and proposes none serves no batch, so it is
        dropped afterwards."""
        yield self.get(key)
        if key.has_drafts and not key.num_wanted:
            torch.cuda.synchronize()
            del self._captured[key]
            self._stand_ins.clear()

    def reserve(self, num_bytes: int) -> None:
        """Memory that all captures share, whichever comes first: as much as the largest takes. A graph of its own keeps
        it, since memory of a pool without graphs is given back."""
        self._reserved, self._reserved_bytes = torch.cuda.CUDAGraph(), num_bytes
        device = self._step.state.device
        self._record(self._reserved, lambda: torch.empty(num_bytes, dtype=torch.uint8, device=device)[:1].zero_())

    def capture_at_start(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            if key in self._captured:
                continue
            if key not in self._loaded:
                self.run_empty(key)  # it may wait for kernels, which a capture later will not
            start = time.perf_counter()
            self.get(key)
            self.losses.captured(key, time.perf_counter() - start, pauses=False)

    def load_while(self, is_waiting: Callable[[], bool]) -> None:
        """Load what steps that are met later will find loaded, while there is nothing else to do: the filling of a
        drafter's slots, products of steps with prompts, and what captures need."""
        for count in FILLED_ROWS if is_waiting() else ():
            self._step.load_filling(count)
        for key in chain(self.keys.prompts_by_size(), self.keys.likely()):
            if not is_waiting():
                break
            if key not in self._loaded:
                self.run_empty(key)

    def end_start(self) -> int:
        """All is captured that start-up captures. Returns how many."""
        self._num_at_start = len(self._captured)
        self._usual = list(self.keys.usual())
        num_full = sum(key.sampler is not SamplerForm.DRAW for key in self._captured)
        log.info("captured %d steps, %d of them with all sampling parameters; %d more at most when they are met",
                 self._num_at_start, num_full, MOST_LATER)
        return self._num_at_start

    def run_sizes(self) -> None:
        """Run the steps that start-up will capture, others that do more, and steps with prompts, for their kernels.
        Those with all sampling parameters are captured late, but have kernels that take seconds to compile: they come
        behind the first step. Steps with fewer drafts than the most launch no kernel that these do not."""
        first = islice(self.keys.decoding(), 1)
        sampled = self.keys.with_parameters()
        rest = self.keys.at_start()
        others = chain(self.keys.behind_long_contexts(), self.keys.beyond_start(), self.keys.prompts())
        self._run_all(dict.fromkeys(chain(first, sampled, rest, others)))

    def run_sharing(self) -> None:
        """Run steps that read shared pages once, for their kernels. Until these are there, steps read such pages for
        each request, as other pages."""
        self._run_all(self.keys.sharing())

    def _run_all(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            self.run_empty(key)
        self._loaded.clear()  # perhaps nothing was launched

    def _is_sharing_ready(self) -> bool:
        if self._compiles_sharing:
            self._compiles_sharing = ops.has_postponed(self._step.state.device)
        return not self._compiles_sharing

    def _try_capture(self, key: GraphKey, *, at_once: bool) -> WholeCapture | SplitCapture | None:
        """Capture the key's step. Returns None if there is no memory for it; the key is refused from then on.

        at_once: the batch has no other way to run, or no request waits. Otherwise the capture delays requests that a
        stand-in could serve, so the work is spread: the first call only loads the kernels and returns None, a later
        call captures, and after that other captures of this sort pause for a while."""
        start = time.perf_counter()
        for _ in range(2):
            try:
                if key not in self._loaded:
                    self.run_empty(key)
                    if not at_once:
                        return None
                captured = self.get(key)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a capture cannot do that itself
            else:
                seconds = time.perf_counter() - start
                self.losses.captured(key, seconds, pauses=not at_once)
                log.debug("captured %s in %.1f ms", key, seconds * 1e3)
                return captured
        log.warning("no memory to capture steps of %s: they run without, or on wider ones", key)
        self._refused.add(key)
        return None

    def capture(self, key: GraphKey) -> WholeCapture | SplitCapture:
        """Capture the key's step with buffers of its own. `run_empty` must have run the same key before.

        A drafter that fails while it is captured, and may end the capture (it reads the device, say), is switched off
        by that; the step is captured again without it."""
        num_off = self._step.drafting.num_off
        try:
            captured = self._capture(key)
        except Exception:
            if self._step.drafting.num_off == num_off:
                raise
            self._renew_pool()
        else:
            if self._step.drafting.num_off == num_off:
                return captured
        return self._capture(key)

    def drop(self) -> None:
        """Drop all captures, whose addresses are about to change, and free their memory. No step is in flight."""
        self._dropped += self._captured
        self._captured.clear()
        self._stand_ins.clear()
        self._due = self._reserved = None
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture_again(self) -> int:
        """Capture the steps that `drop` dropped, as far as there is memory for them. Returns how many."""
        keys, self._dropped = dict.fromkeys(self._dropped), []
        if self._reserved_bytes:
            self.reserve(self._reserved_bytes)
        return sum(self._try_capture(key, at_once=True) is not None for key in keys)

    def _renew_pool(self) -> None:
        """After a capture that CUDA has ended: torch does not close the memory pool of such a capture, and refuses to
        open it for another one."""
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        if self._reserved is not None:
            self._reserved = None
            self.reserve(self._reserved_bytes)

    def _capture(self, key: GraphKey) -> WholeCapture | SplitCapture:
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
        capture. Collection is off meanwhile, because an object that is collected could be a graph or an event. What
        other threads ask of the device has nothing to do with the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    with suppress(RuntimeError):  # the error that ended the capture is the one to raise
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result
