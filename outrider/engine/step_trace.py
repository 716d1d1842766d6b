"""StepTrace: records the times of a few of an engine's steps, from their scheduling to their result, for a tracer.

StepTrace stands between engine and scheduler and passes batches on. It marks at most `steps_per_second` of them as
traced. An engine without a tracer has UntracedSteps in its place. It does not depend on OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.core import ScheduledBatch, StepResult
from outrider.core.step_messages import StepTimes
from outrider.engine.step_watcher import UntracedSteps
from outrider.sched.scheduler import Scheduler

MAX_PENDING = 16  # traced steps whose results are not there yet; there are fewer steps in flight


@dataclass(frozen=True)
class TracedStep:
    """A step that was traced. Times are seconds since the epoch."""

    batch: ScheduledBatch
    result: StepResult
    began: float  # when the scheduler was asked
    scheduled: float  # when it had answered
    ended: float  # when the result was read
    in_worker: StepTimes  # one part, "device", where the worker tells no others


class StepTrace(UntracedSteps):
    """Chooses the steps to trace and records their times. It is used on the engine's thread, which also calls `take`
    with each traced step."""

    def __init__(self, take: Callable[[TracedStep], None], steps_per_second: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._take = take
        self._interval = 1 / steps_per_second
        self._clock = clock
        self._next = clock()  # no step is traced before this time
        self._pending: dict[int, tuple[ScheduledBatch, float, float]] = {}  # by step, with the times of its schedule

    def schedule(self, scheduler: Scheduler) -> ScheduledBatch | None:
        now = self._clock()
        if now < self._next:
            return scheduler.schedule()
        began = time.time()
        batch = scheduler.schedule()
        if batch is None:
            return None
        self._next = now + self._interval
        batch = replace(batch, mode=batch.mode._replace(is_traced=True))
        if len(self._pending) == MAX_PENDING:
            self._pending.clear()  # steps that failed have no result
        self._pending[batch.step] = batch, began, time.time()
        return batch

    def finish(self, result: StepResult) -> None:
        pending = self._pending.pop(result.step, None) if self._pending else None
        if pending is None:
            return
        batch, began, scheduled = pending
        ended = time.time()
        in_worker = result.times or StepTimes(ended - result.seconds, (("device", result.seconds),))
        self._take(TracedStep(batch, result, began, scheduled, ended, in_worker))
