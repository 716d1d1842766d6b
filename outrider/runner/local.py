"""LocalRunner: a DeviceStep behind `submit(batch) -> future`, so that the host can schedule while the device works.

On the CPU a second thread takes the place of the device. The runner works with rows, not with requests."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from outrider.core import ScheduledBatch, StepResult, Uncaptured
from outrider.runner.batch import PackedBatch, PaddedSize
from outrider.runner.clock import NO_CLOCK, StepClock
from outrider.runner.generations import Generations
from outrider.runner.memory import naming_lack_of_memory
from outrider.runner.results import read_result
from outrider.runner.step import DeviceStep

Made = TypeVar("Made")


class Padding:
    """The sizes that batches are padded up to. If empty, batches run at their own size."""

    def __init__(self, requests: tuple[int, ...] = (), tokens: tuple[int, ...] = ()) -> None:
        self._requests, self._tokens = sorted(requests), sorted(tokens)

    def size_for(self, batch: ScheduledBatch) -> PaddedSize:
        return PaddedSize(_next(self._requests, batch.num_requests), _next(self._tokens, batch.num_tokens))


def _next(sizes: list[int], at_least: int) -> int:
    index = bisect_left(sizes, at_least)
    return sizes[index] if index < len(sizes) else at_least


class LocalRunner:
    def __init__(self, step: DeviceStep, padding: Padding | None = None) -> None:
        self.device_step = step
        self._padding = padding or Padding()
        self._before_step: Callable[[ScheduledBatch], None] | None = None  # tests: poison free pages
        self._generations = Generations(step)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-runner")
        self._thread.submit(int)  # the one thread starts now: an interrupt of a later submit cannot start a second
        self.num_padded_steps = 0

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        """Queue a step. The caller's thread packs the batch while earlier steps run."""
        size = self._padding.size_for(batch)
        self.num_padded_steps += size.requests > batch.num_requests or size.tokens > batch.num_tokens
        return self._thread.submit(self._run, batch, self.device_step.pack(batch, size))

    def in_order(self, work: Callable[[], Made]) -> Future[Made]:
        """Run `work` on the thread of steps, after those submitted before it."""
        return self._thread.submit(work)

    def on_thread(self, work: Callable[[], Made]) -> Made:
        """Run `work` on the thread of steps, and return its result. Measurements use it: each thread that computes
        matrix products has its own pool of helper threads, and products run at another speed if there are several
        pools."""
        return self.in_order(work).result()

    def idle(self, quiet_seconds: float) -> float | None:
        return None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    @torch.inference_mode()
    def _run(self, batch: ScheduledBatch, packed: PackedBatch) -> StepResult:
        start = time.perf_counter()
        clock = self.device_step.clock = StepClock() if batch.mode.is_traced else NO_CLOCK
        with naming_lack_of_memory(), self._generations.running(batch):
            if self._before_step is not None:
                self._before_step(batch)
            self.device_step.apply_host_writes(batch)
            clock.lap("admit")
            result = self.device_step.run(batch, packed)
            self.device_step.drafting.check_rows()
            done = read_result(batch, result, time.perf_counter() - start, Uncaptured.NO_GRAPHS)
            done = self.device_step.turns.amend(batch, done)
            if batch.mode.is_traced:
                clock.lap("read")
                done = replace(done, times=clock.times)
            return done
