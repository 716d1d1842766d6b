"""CudaRunner: runs steps on a CUDA stream. The host queues a step and goes on; the result is read when it is asked for.

A step replays a captured graph if one fits. Host data goes through pinned memory, so that queueing never waits for the
device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from outrider.core import Limits, ScheduledBatch, StepForm, StepResult, Uncaptured
from outrider.core.ranks import RankLost
from outrider.kernels import compiling
from outrider.kernels.buffers import fill, to_device
from outrider.mixers.cached import can_capture
from outrider.runner.batch import CapturedShape, PaddedSize, pack_captured
from outrider.runner.generations import Generations
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.chooser import CaptureChooser, CaptureOrder, Launch, RunEagerly, StepChoice
from outrider.runner.graphs.costs import begin_replay, measure_times
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.warm_up import compile_steps
from outrider.runner.interface import StepCancelled, WorkerDied
from outrider.runner.local import Padding
from outrider.runner.memory import step_out_of_memory
from outrider.runner.results import read_result, with_asked_logprobs
from outrider.runner.step import DeviceResult, DeviceStep
from outrider.sample.logprobs import KERNEL_MAX_LOGPROBS

log = logging.getLogger("outrider")
Made = TypeVar("Made")


class PendingStep(Future[StepResult]):
    """A queued step. `result()` waits until the step's result has been copied to the host, and reads it."""

    def __init__(self, batch: ScheduledBatch, result: DeviceResult, uncaptured: Uncaptured | None = None) -> None:
        super().__init__()
        self._batch, self._uncaptured = batch, uncaptured
        self.amend: Callable[[StepResult], StepResult] = _unchanged  # applied by the host to the result that was read
        self.check: Callable[[], None] = _nothing  # raises if the result is of no use
        logprobs, hidden = result.logprobs, result.hidden
        if logprobs is not None and logprobs.num_top <= KERNEL_MAX_LOGPROBS:  # else too much to pin
            logprobs = logprobs.map(_to_pinned)
        if hidden is not None:
            hidden = replace(hidden, vectors=_to_pinned(hidden.vectors))
        self._host_result = replace(
            result, logprobs=logprobs, hidden=hidden, counts=_to_pinned(result.counts), run=_to_pinned(result.run),
            written=_to_pinned(result.written), folded=_to_pinned(result.folded))
        self._queued = time.perf_counter()
        self._done = torch.cuda.Event()
        self._done.record()

    def result(self, timeout: float | None = None) -> StepResult:
        try:
            self._done.synchronize()
        except Exception as error:
            raise _explained(error) from error
        self.check()
        seconds = time.perf_counter() - self._queued
        return self.amend(read_result(self._batch, self._host_result, seconds, self._uncaptured))


def _unchanged(result: StepResult) -> StepResult:
    return result


def _nothing() -> None:
    """Do nothing. Replaces a step's check for failed ranks if no check is needed."""


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _explained(error: Exception) -> Exception:
    """Return the error to report for a failed step: WorkerDied if the device no longer answers, otherwise the error
    itself."""
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
        step.turns.runs_ahead = limits.steps_in_flight > 1
        self._padding = padding or Padding()
        self._link = step.ranks.link  # rank 0 chooses what is captured and replayed, since steps are sums of all ranks
        self._generations = Generations(step)
        is_capturable = can_capture(step.pool.layout, step.backend)
        self._eager_reason = Uncaptured.NO_GRAPHS if is_capturable else Uncaptured.NO_CAPTURED_KERNELS
        if step.model.reads_device:
            self._eager_reason, is_capturable = Uncaptured.MODEL_READS, False
        if step.planner.editing is not None:
            self._eager_reason = Uncaptured.EDITED_LOGITS
        can_replay = use_graphs and is_capturable and step.planner.editing is None
        self.graphs = StepGraphs(step, limits) if can_replay else None
        if self.graphs is not None:
            self.chooser = CaptureChooser(self.graphs.keys, self.graphs.captured, self.graphs.loaded)
        self.num_replays = 0
        self.num_uncaptured = 0  # steps that the host launched, of a batch's own size or of a graph's
        self.num_padded_steps = 0

    @torch.inference_mode()
    def begin_compiling(self) -> None:
        """Begin to compile the kernels of all steps. Not needed if the largest step was measured, since the measurement
        begins this already."""
        compile_steps(self.device_step, self._limits, self.graphs)

    @torch.inference_mode()
    def capture_decoding(self, *, reserved_bytes: int = 0) -> None:
        """Capture the usual decode steps, while other kernels are still being compiled. reserved_bytes: the memory of
        the largest step, which is reserved for later captures of steps with prompts."""
        torch.cuda.empty_cache()  # captures cannot use what other steps have left
        if self.graphs is not None:
            if reserved_bytes and self.graphs.keys.largest_with_prompts() is not None:
                self.graphs.reserve(reserved_bytes)
            self._capture_at_start(self.graphs, self.graphs.keys.decoding_at_start())

    @torch.inference_mode()
    def capture_fewer_drafts(self) -> None:
        """Capture decode steps with every number of drafts, because the scheduler will choose a number for each
        step."""
        if self.graphs is not None:
            self._capture_at_start(self.graphs, self.graphs.keys.fewer_drafts())

    @torch.inference_mode()
    def capture_prompts(self) -> None:
        """Capture some steps with prompts too, and wait until all kernels are compiled."""
        device = self.device_step.state.device
        if self.graphs is not None:
            self.graphs.load_while(lambda: self._link.decide(lambda: compiling.is_compiling(device)))
            largest = self.graphs.keys.largest()
            self._capture_at_start(self.graphs, [largest])
            seconds_of_replay = begin_replay(self.graphs.get(largest))
            self._capture_at_start(self.graphs, self.graphs.keys.prompts_at_start())
            self.chooser.end_start()
            self.chooser.losses.times = measure_times(self.device_step, self.graphs, largest, seconds_of_replay())
        compiling.finish_compiling(device)

    def _capture_at_start(self, graphs: StepGraphs, keys: Iterable[GraphKey]) -> None:
        for key in keys:
            if key not in graphs.captured:
                graphs.load(key)  # it may wait for kernels, which a capture later will not
                start = time.perf_counter()
                graphs.get(key)
                self.chooser.learn(CaptureOrder(key), time.perf_counter() - start)

    @torch.inference_mode()
    def idle(self, quiet_seconds: float) -> float | None:
        """Capture one step that has no graph yet, if that is due. Called when no step is in flight and no message has
        come for `quiet_seconds`. Returns the seconds after which to call again; None: only after further steps."""
        if self.graphs is None:
            return None
        order = self._link.decide(lambda: self.chooser.choose_idle(quiet_seconds))
        if not isinstance(order, CaptureOrder):
            return order
        try:
            self._capture(self.graphs, order)
        except Exception:  # whatever it is, no request has waited for it
            log.exception("capturing a graph failed while the engine was idle; steps run on the existing graphs")
            self.chooser.stop_ahead()
            return None
        return 0.0

    @torch.inference_mode()
    def capture_again(self) -> int:
        """Capture the dropped steps again, as far as there is memory for them. Returns the number of captured steps."""
        if self.graphs is None:
            return 0
        dropped = list(self.graphs.take_dropped())
        for key in self._link.decide(lambda: dropped):
            self._capture(self.graphs, CaptureOrder(key))
        return len(self.graphs.captured)

    def _capture(self, graphs: StepGraphs, order: CaptureOrder) -> None:
        self.chooser.learn(order, graphs.carry_out(order))

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        """Queue a step, and return a future of its result. If queueing fails, the future raises the error, and the
        engine goes on."""
        try:
            with self._generations.running(batch):
                return self._queue(batch)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # the step's memory may lie in pieces too small for anybody
            return _failed(self._on_ranks(step_out_of_memory(error)))
        except StepCancelled as error:
            return _failed(error)
        except Exception as error:
            return _failed(self._on_ranks(_explained(error)))

    def _on_ranks(self, error: Exception) -> Exception:
        """Return the error to report when only a part of a step was queued. With several ranks it is RankLost: a rank
        may have queued more sums than the others, and its sums would pair with those of later steps."""
        return error if self._link.count == 1 else RankLost(f"a step was not queued whole: {error}")

    def in_order(self, work: Callable[[], Made]) -> Future[Made]:
        """Run `work` now. What it queues on the device comes after the steps submitted before it. Work that reads the
        device, or frees memory, must wait for those steps itself."""
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
        pending.check = self.device_step.ranks.check
        self.device_step.drafting.check_rows()
        if batch.mode.form is StepForm.SPLIT or batch.cache.pages.moves:
            pending.amend = torch.inference_mode()(partial(self.device_step.turns.amend, batch))
        return pending

    def _run(self, batch: ScheduledBatch) -> PendingStep:
        if self.graphs is None:
            return self._run_eagerly(batch, self._eager_reason)
        choice = self._link.decide(lambda: self.chooser.choose(batch, self.device_step.state))
        return self._carry_out(batch, choice, self.graphs)

    def _carry_out(self, batch: ScheduledBatch, choice: StepChoice, graphs: StepGraphs) -> PendingStep:
        if isinstance(choice, RunEagerly):
            return self._run_eagerly(batch, choice.reason)
        if isinstance(choice, Launch):
            return self._launch(batch, choice, graphs)
        if choice.before is not None:
            self._capture(graphs, choice.before)
        captured = graphs.captured.get(choice.key)
        if captured is None:
            return self._launch(batch, Launch(choice.key, Uncaptured.NO_MEMORY), graphs)
        self.num_replays += 1
        self._count_padding(batch, captured.shape)
        fill(captured.ints, pack_captured(batch, captured.shape))
        captured.replay(partial(self.device_step.host_turn, batch))
        pending = PendingStep(batch, self._reported(batch, captured.result))
        if choice.behind is not None:
            self._capture_behind(graphs, choice.behind)
        return pending

    def _capture_behind(self, graphs: StepGraphs, order: CaptureOrder) -> None:
        """Load or capture the missing graph of the step that was just queued. This uses the time in which the device
        runs that step and the host would only wait. If it fails, wider graphs still serve the size."""
        try:
            self._capture(graphs, order)
        except Exception:
            log.exception("capturing a graph for %s failed; such steps run on larger graphs", order.key)
            self.chooser.learn(order, None)

    def _run_eagerly(self, batch: ScheduledBatch, reason: Uncaptured) -> PendingStep:
        """Run a step of exactly this batch, which no graph could serve."""
        self.num_uncaptured += 1
        size = self._padding.size_for(batch)
        self._count_padding(batch, size)
        return PendingStep(batch, self.device_step.run(batch, self.device_step.pack(batch, size)), reason)

    def _launch(self, batch: ScheduledBatch, choice: Launch, graphs: StepGraphs) -> PendingStep:
        """Run the step of the choice's key without a graph: the host launches every kernel."""
        self.num_uncaptured += 1
        shape = graphs.keys.shape(choice.key)
        self._count_padding(batch, shape)
        ints = to_device(pack_captured(batch, shape), torch.int64, self.device_step.state.device)
        result = graphs.run(choice.key, ints, partial(self.device_step.host_turn, batch))
        return PendingStep(batch, self._reported(batch, result), choice.reason)

    def _reported(self, batch: ScheduledBatch, result: DeviceResult) -> DeviceResult:
        return result if result.logprobs is None else with_asked_logprobs(result, batch, self.device_step.state.params)

    def _count_padding(self, batch: ScheduledBatch, size: PaddedSize | CapturedShape) -> None:
        self.num_padded_steps += size.requests > batch.num_requests or size.tokens > batch.num_tokens

    def close(self) -> None:
        torch.cuda.synchronize()
