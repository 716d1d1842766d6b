"""Captures steps: a whole step (inputs, forward, finish, draft) as one CUDA graph for each key, or each half of a split
step as one graph.

The host copies the batch's integers into the graph's buffer and replays; lengths are read on the device. Which steps
are captured, and when, is decided elsewhere (`runner/graphs/chooser.py`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import torch

from outrider.core import Limits, StepForm
from outrider.kernels import compiling
from outrider.kernels.packet import empty_packet
from outrider.runner.batch import CapturedShape
from outrider.runner.graphs.chooser import CaptureOrder
from outrider.runner.graphs.keys import GraphKey, GraphKeys
from outrider.runner.graphs.sizes import FILLED_ROWS
from outrider.runner.step import DeviceResult, DeviceStep

log = logging.getLogger("outrider")
Made = TypeVar("Made")
HostTurn = Callable[[], None]


@dataclass(frozen=True)
class CapturedStep:
    shape: CapturedShape
    ints: torch.Tensor
    result: DeviceResult
    first: torch.cuda.CUDAGraph  # the whole step, or the forward of a split one
    rest: torch.cuda.CUDAGraph | None  # what follows the forward of a split step

    def replay(self, host_turn: HostTurn) -> None:
        """Queue the captured step. A split step calls `host_turn` between its two graphs, after the forward pass."""
        self.first.replay()
        if self.rest is not None:
            host_turn()
            self.rest.replay()


class StepGraphs:
    def __init__(self, step: DeviceStep, limits: Limits) -> None:
        self._step = step
        step.cached.prepare_capture(limits)
        self.keys = GraphKeys(limits, step.drafting, takes_prompts=step.recurrent.needs_no_counts,
                              takes_checkpoints=step.recurrent.takes_checkpoints,
                              takes_parameters=step.has_sampler_kernels, whole_len=step.cached.whole_len,
                              takes_shared=step.backend.reads_shared_once and step.pool.layout.has_full_attention,
                              is_sharing_ready=self._is_sharing_ready, deltas=step.deltas)
        self._compiles_sharing = True  # perhaps
        self.captured: dict[GraphKey, CapturedStep] = {}
        self.loaded: set[GraphKey] = set()  # keys whose kernels have been launched
        # Memory is shared by captures of one pool on one stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._reserved: torch.cuda.CUDAGraph | None = None
        self._reserved_bytes = 0
        self._dropped: list[GraphKey] = []  # captured before `drop`

    def run(self, key: GraphKey, ints: torch.Tensor, host_turn: HostTurn) -> DeviceResult:
        """Run the step of this key without its graph: the host launches every kernel."""
        self.loaded.add(key)
        plan = self.keys.plan(key)
        half = self._step.forward_half(self.keys.shape(key), ints, plan)
        if key.form is StepForm.SPLIT:
            host_turn()
        return self._step.finish_half(half, plan)

    def load(self, key: GraphKey) -> None:
        """Compile and load the kernels that a capture of the key needs, unless that has been done."""
        if key not in self.loaded:
            shape = self.keys.shape(key)
            with self._step.model.one_layer_each():
                self._step.whole(shape, empty_packet(shape, self._step.state.device), self.keys.plan(key))
            self.loaded.add(key)

    def get(self, key: GraphKey) -> CapturedStep:
        if key not in self.captured:
            self.load(key)
            self.captured[key] = self.capture(key)
        return self.captured[key]

    @contextmanager
    def borrowed(self, key: GraphKey) -> Iterator[CapturedStep]:
        """A context that gives the key's graph for a measurement. A graph that checks drafts and proposes none is
        dropped afterwards, because no batch uses it."""
        yield self.get(key)
        if key.has_drafts and not key.num_wanted:
            torch.cuda.synchronize()
            del self.captured[key]

    def reserve(self, num_bytes: int) -> None:
        """Reserve the memory that all captures share: as much as the largest capture takes, so that captures can come
        in any order. A graph that is kept for this holds the memory, since torch frees the memory of a pool without
        graphs."""
        self._reserved, self._reserved_bytes = torch.cuda.CUDAGraph(), num_bytes
        device = self._step.state.device
        self._record(self._reserved, lambda: torch.empty(num_bytes, dtype=torch.uint8, device=device)[:1].zero_())

    def load_while(self, is_waiting: Callable[[], bool]) -> None:
        """Load, while start-up waits for compilers, the kernels and libraries that later steps need: kernels that fill
        a drafter's cache slots, matrix products of steps with prompts, and what captures need."""
        for count in FILLED_ROWS if is_waiting() else ():
            self._step.load_filling(count)
        for key in chain(self.keys.prompts_by_size(), self.keys.likely()):
            if not is_waiting():
                break
            self.load(key)

    def run_sizes(self) -> None:
        """Run steps whose kernels are to be compiled: those that start-up captures, steps with longer contexts, more
        requests or row deltas, and steps with prompts. The steps with all sampling parameters come second, because
        their kernels take seconds to compile. A step with fewer drafts than the most launches no further kernel."""
        first = islice(self.keys.decoding(), 1)
        sampled = self.keys.with_parameters()
        rest = self.keys.at_start()
        others = chain(self.keys.behind_long_contexts(), self.keys.beyond_start(), self.keys.prompts(),
                       self.keys.with_deltas())
        self._run_all(dict.fromkeys(chain(first, sampled, rest, others)))

    def run_sharing(self) -> None:
        """Run steps whose attention reads a page once for all requests that share it, so that their kernels are
        compiled. Until these kernels are ready, steps read a shared page once for each request, like other pages."""
        self._run_all(self.keys.sharing())

    def _run_all(self, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            self.load(key)
        self.loaded.clear()  # perhaps nothing was launched

    def _is_sharing_ready(self) -> bool:
        if self._compiles_sharing:
            self._compiles_sharing = compiling.has_postponed(self._step.state.device)
        return not self._compiles_sharing

    def carry_out(self, order: CaptureOrder) -> float | None:
        """Carry out the order: capture its step, or only load the step's kernels. Returns the seconds that this took;
        None if there was no memory for it."""
        start = time.perf_counter()
        for _ in range(2):
            try:
                self.load(order.key) if order.only_loads else self.get(order.key)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a capture cannot do that itself
            else:
                seconds = time.perf_counter() - start
                log.debug("%s carried out in %.1f ms", order, seconds * 1e3)
                return seconds
        log.warning("no memory to capture a graph for %s: such steps run on larger graphs or without one", order.key)
        return None

    def capture(self, key: GraphKey) -> CapturedStep:
        """Capture the key's step, with a buffer of its own for the step's integers. `load` must have loaded the same
        key before.

        A drafter that fails during the capture, for example because it reads the device, is switched off; the step is
        then captured again without the drafter."""
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
        """Drop all captures and free their memory, because the addresses that they hold are about to change. No step
        may be in flight."""
        self._dropped += self.captured
        self.captured.clear()
        self._reserved = None
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def take_dropped(self) -> Iterable[GraphKey]:
        """Reserve the captures' memory again after `drop`. Return the keys of the dropped captures, which the caller
        captures again."""
        keys, self._dropped = dict.fromkeys(self._dropped), []
        if self._reserved_bytes:
            self.reserve(self._reserved_bytes)
        return keys

    def _renew_pool(self) -> None:
        """Take a new memory pool after a capture that CUDA ended with an error: torch does not close the pool of such a
        capture, and refuses to open it for another one."""
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        if self._reserved is not None:
            self._reserved = None
            self.reserve(self._reserved_bytes)

    def _capture(self, key: GraphKey) -> CapturedStep:
        step, shape, plan = self._step, self.keys.shape(key), self.keys.plan(key)
        ints, first, rest = empty_packet(shape, step.state.device), torch.cuda.CUDAGraph(), None
        if key.form is StepForm.WHOLE:
            result = self._record(first, lambda: step.whole(shape, ints, plan))
        else:
            rest = torch.cuda.CUDAGraph()
            half = self._record(first, lambda: step.forward_half(shape, ints, plan))
            result = self._record(rest, lambda: step.finish_half(half, plan))
        assert result.prompt_logprobs is None, "the next replay overwrites a result, and these are not copied before"
        return CapturedStep(shape, ints, result, first, rest)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Made]) -> Made:
        """Capture what `run` launches, as `torch.cuda.graph` does, but without its garbage collection, which takes
        longer than a capture. Collection is off meanwhile, because an object that is collected could be a graph or an
        event. What other threads do with the device does not disturb the capture."""
        with self._step.drafting.observers_resting():
            return self._record_alone(graph, run)

    def _record_alone(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Made]) -> Made:
        self._stream.wait_stream(torch.cuda.current_stream())
        was_enabled = gc.isenabled()
        gc.disable()
        _forget_workspaces()
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
            _forget_workspaces()
            if was_enabled:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result


def _forget_workspaces() -> None:
    """Free the scratch memory of cuBLAS, 32 MiB that torch keeps for each stream until the process ends. Called before
    a capture, so that the capture allocates new scratch memory, and after it: scratch memory inside a capture's memory
    would keep all of that memory allocated after the last capture was dropped."""
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a torch without CUDA has none
    if forget is not None:
        forget()
