"""CudaRunner: steps on a CUDA stream. The host queues a step and goes on; the result is read when it is asked for.

Steps replay graphs where one serves. Host data goes through pinned memory, so that queueing never waits for the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from outrider.core import Limits, ScheduledBatch, StepForm, StepResult, Uncaptured
from outrider.kernels import ops
from outrider.kernels.buffers import fill, to_device
from outrider.mixers.cached import can_capture
from outrider.runner.batch import CapturedShape, PaddedSize, pack_captured
from outrider.runner.generations import Generations
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.own_sizes import OwnSizes, ReplayTime, measure_times
from outrider.runner.graphs.warm_up import compile_steps
from outrider.runner.interface import StepCancelled, WorkerDied
from outrider.runner.local import Padding
from outrider.runner.memory import StepOutOfMemory
from outrider.runner.results import read_result, with_asked_logprobs
from outrider.runner.step import DeviceResult, DeviceStep
from outrider.sample.sampler import KERNEL_MAX_LOGPROBS

log = logging.getLogger("outrider")
Made = TypeVar("Made")


class PendingStep(Future[StepResult]):
    """A queued step. `result()` waits for its copy to the host and reads it."""

    def __init__(self, batch: ScheduledBatch, result: DeviceResult, uncaptured: Uncaptured | None = None) -> None:
        super().__init__()
        self._batch, self._uncaptured = batch, uncaptured
        self.amend: Callable[[StepResult], StepResult] = _unchanged  # applied by the host to the result that was read
        if result.logprobs is not None and result.logprobs.num_top <= KERNEL_MAX_LOGPROBS:  # else too much to pin
            result = replace(result, logprobs=result.logprobs.map(_to_pinned))
        if result.hidden is not None:
            result = replace(result, hidden=replace(result.hidden, vectors=_to_pinned(result.hidden.vectors)))
        self._device_result = result
        self._counts = _to_pinned(result.counts)
        self._run = _to_pinned(result.run)
        self._written, self._folded = _to_pinned(result.written), _to_pinned(result.folded)
        self._queued = time.perf_counter()
        self._done = torch.cuda.Event()
        self._done.record()

    def result(self, timeout: float | None = None) -> StepResult:
        try:
            self._done.synchronize()
        except Exception as error:
            raise _explained(error) from error
        late = self._device_result
        host = replace(late, counts=self._counts, run=self._run, written=self._written, folded=self._folded)
        return self.amend(read_result(self._batch, host, time.perf_counter() - self._queued, self._uncaptured))


def _unchanged(result: StepResult) -> StepResult:
    return result


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _explained(error: Exception) -> Exception:
    """The error itself, unless the device answers nothing any more: some errors leave it unusable."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return WorkerDied(f"the device is lost: {error}")
    return error


def _failed(error: Exception) -> Future[StepResult]:
    failed: Future[StepResult] = Future()
    failed.set_exception(error)
    return failed


class CudaRunner:
    def __init__(self, step: DeviceStep, limits: Limits, *, use_graphs: bool = True,
                 padding: Padding | None = None) -> None:
        self.device_step = step
        self._limits = limits
        # With one step in flight, no other is queued before its result is read: grammars may look at the rows then.
        self._reads_before_next = limits.steps_in_flight == 1
        step.grammars.guesses_early = not self._reads_before_next
        self._padding = padding or Padding()
        self._generations = Generations(step)
        is_capturable = can_capture(step.pool.layout, step.backend)
        self._eager_reason = Uncaptured.NO_GRAPHS if is_capturable else Uncaptured.NO_CAPTURED_KERNELS
        if step.planner.processors is not None:
            self._eager_reason = Uncaptured.LOGITS_PROCESSORS
        can_replay = use_graphs and is_capturable and step.planner.processors is None
        self.graphs = StepGraphs(step, limits) if can_replay else None
        self._own_sizes = OwnSizes()
        self.num_replays = 0
        self.num_uncaptured = 0  # steps that the host launched, of a batch's own size or of a graph's
        self.num_padded_steps = 0

    @torch.inference_mode()
    def begin_compiling(self) -> None:
        """Begins to compile the kernels of all steps. Measuring the memory of steps begins this too."""
        compile_steps(self.device_step, self._limits, self.graphs)

    @torch.inference_mode()
    def capture_decoding(self, *, reserved_bytes: int = 0) -> None:
        """Captures the usual steps without prompts, while other kernels are compiled. reserved_bytes: what the largest
        step takes, for captures of steps with prompts."""
        torch.cuda.empty_cache()  # captures cannot use what other steps have left
        if self.graphs is not None:
            if reserved_bytes and self.graphs.keys.largest_with_prompts() is not None:
                self.graphs.reserve(reserved_bytes)
            self.graphs.capture_at_start(self.graphs.keys.decoding_at_start())

    @torch.inference_mode()
    def capture_fewer_drafts(self) -> None:
        """Captures decode steps with every number of drafts: the scheduler will choose it anew for each step."""
        if self.graphs is not None:
            self.graphs.capture_at_start(self.graphs.keys.fewer_drafts())

    @torch.inference_mode()
    def capture_prompts(self) -> int:
        """Captures some steps with prompts too, and waits for all kernels. Returns how many steps are captured."""
        num_captured, device = 0, self.device_step.state.device
        if self.graphs is not None:
            self.graphs.load_while(lambda: ops.is_compiling(device))
            largest = self.graphs.keys.largest()
            self.graphs.capture_at_start([largest])
            replay = ReplayTime(self.graphs, largest)
            self.graphs.capture_at_start(self.graphs.keys.prompts_at_start())
            num_captured = self.graphs.end_start()
            self._measure(self.graphs, largest, replay.seconds())
        ops.finish_compiling(device)
        return num_captured

    def _measure(self, graphs: StepGraphs, largest: GraphKey, device_seconds: float) -> None:
        times = graphs.losses.times = measure_times(self.device_step, graphs, largest, device_seconds)
        log.info("a step of %d tokens takes %.1f ms, launches %.1f ms, a capture %.1f ms", largest.tokens,
                 times.token_seconds * largest.tokens * 1e3, times.launch_seconds * 1e3,
                 graphs.losses.capture_seconds * 1e3)
        if largest.has_prompts:
            self._own_sizes = OwnSizes.from_times(times)
            log.info("from %.0f tokens on steps are not padded", self._own_sizes.least_tokens)

    @torch.inference_mode()
    def idle(self, quiet_seconds: float) -> float | None:
        """Nothing is in flight, and nothing came for so many seconds: a step may be captured that has no graph yet.
        Returns after how many seconds to come again; None: not before there were steps again."""
        if self.graphs is None:
            return None
        try:
            return self.graphs.capture_ahead(quiet_seconds)
        except Exception:  # whatever it is, no request has waited for it
            log.exception("a capture failed while no request waited; steps run on the graphs there are")
            self.graphs.stop_ahead()
            return None

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        """Queue a step. An error on the way ends that step, in its turn, and not the engine."""
        try:
            with self._generations.running(batch):
                return self._queue(batch)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # the step's memory may lie in pieces too small for anybody
            return _failed(StepOutOfMemory(error))
        except StepCancelled as error:
            return _failed(error)
        except Exception as error:
            return _failed(_explained(error))

    def in_order(self, work: Callable[[], Made]) -> Future[Made]:
        """Run `work` now. What it queues on the device comes after the steps submitted before it; work that looks at
        the device, or frees memory, waits for them itself."""
        done: Future[Made] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(_explained(error))
        return done

    @torch.inference_mode()
    def _queue(self, batch: ScheduledBatch) -> Future[StepResult]:
        self.device_step.apply_host_writes(batch)
        pending = self._run(batch)
        self.device_step.drafting.check_rows()
        if batch.form is StepForm.SPLIT:
            grammars = self.device_step.grammars
            amend = grammars.settle if self._reads_before_next else grammars.explain
            pending.amend = torch.inference_mode()(partial(amend, batch))
        return pending

    def _run(self, batch: ScheduledBatch) -> PendingStep:
        if self.graphs is None:
            return self._run_eagerly(batch, self._eager_reason)
        key = self.graphs.keys.key_for(batch, self.device_step.state)
        if isinstance(key, Uncaptured):
            return self._run_eagerly(batch, key)
        own = self._own_sizes.key_for(key, batch.num_tokens)
        if own is not None:
            return self._run_uncaptured(batch, own, self.graphs, Uncaptured.OWN_SIZE)
        return self._run_captured(batch, key, self.graphs)

    def _run_eagerly(self, batch: ScheduledBatch, reason: Uncaptured) -> PendingStep:
        """A step of exactly this batch, which no graph could serve."""
        self.num_uncaptured += 1
        size = self._padding.size_for(batch)
        self._count_padding(batch, size)
        return PendingStep(batch, self.device_step.run(batch, self.device_step.pack(batch, size)), reason)

    def _run_uncaptured(self, batch: ScheduledBatch, key: GraphKey, graphs: StepGraphs,
                        reason: Uncaptured) -> PendingStep:
        """The step that the key's graph would be, launched by the host."""
        self.num_uncaptured += 1
        shape = graphs.keys.shape(key)
        self._count_padding(batch, shape)
        ints = to_device(pack_captured(batch, shape), torch.int64, self.device_step.state.device)
        result = graphs.run(key, ints, partial(self.device_step.host_turn, batch))
        return PendingStep(batch, self._reported(batch, result), reason)

    def _run_captured(self, batch: ScheduledBatch, key: GraphKey, graphs: StepGraphs) -> PendingStep:
        captured = graphs.serve(key)
        if isinstance(captured, Uncaptured):
            return self._run_uncaptured(batch, key, graphs, captured)
        self.num_replays += 1
        self._count_padding(batch, captured.shape)
        fill(captured.ints, pack_captured(batch, captured.shape))
        captured.replay(partial(self.device_step.host_turn, batch))
        pending = PendingStep(batch, self._reported(batch, captured.result))
        graphs.capture_due()
        return pending

    def _reported(self, batch: ScheduledBatch, result: DeviceResult) -> DeviceResult:
        return result if result.logprobs is None else with_asked_logprobs(result, batch, self.device_step.state.params)

    def _count_padding(self, batch: ScheduledBatch, size: PaddedSize | CapturedShape) -> None:
        self.num_padded_steps += size.requests > batch.num_requests or size.tokens > batch.num_tokens

    def close(self) -> None:
        torch.cuda.synchronize()
