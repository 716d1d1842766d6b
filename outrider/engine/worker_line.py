"""WorkerLine: the engine's connection to its worker. It keeps the futures of the steps in flight, sends commands
between steps, and stores the error after which no step can run any more.

The runner may live in this process or in another, because the line uses only its futures."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from outrider.core import ScheduledBatch, StepResult
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import Runner, WorkerDied


class EngineError(RuntimeError):
    """Raised if the engine has failed or was shut down: no request can be served any more. The cause is chained."""


class WorkerLine:
    """The engine's connection to its worker. Single-threaded, like its engine."""

    def __init__(self, runner: Runner) -> None:
        """runner: the `Worker` or `WorkerProcess`. (The attribute `runner` of a Worker is only the part of it that runs
        steps.)"""
        self.runner = runner
        self.on_death: Callable[[], object] = _ignore  # called when the worker has died
        self._in_flight: deque[Future[StepResult]] = deque()
        self._is_step_missing = False  # the last one in flight never reached the worker
        self._last_end: float | None = None  # when the last step ended, if requests were left
        self._error: EngineError | WorkerDied | None = None  # why no step can run any more
        self._process_id = os.getpid()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def takes_steps(self) -> bool:
        """Whether steps may be queued. False after a step failed to reach the worker, until `drain`: later steps would
        build on the missing one."""
        return not self._is_step_missing

    @property
    def has_ended(self) -> bool:
        return self._error is not None or self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process. The worker and all threads have stayed in the parent process."""
        return os.getpid() != self._process_id

    def check(self) -> None:
        """Raise the error that ended the connection to the worker, if there is one."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self.is_forked:
            raise EngineError(f"the engine belongs to process {self._process_id}, from which this one was forked: "
                              "start an engine in this process, or send requests to that process")

    # Steps

    def submit(self, batch: ScheduledBatch) -> None:
        try:
            future = self.runner.submit(batch)
        except Exception as error:  # it has not reached the worker
            future = Future()
            future.set_exception(error)
            self._is_step_missing = True
        self._in_flight.append(future)

    def take_result(self) -> StepResult:
        """Wait for the oldest step in flight and return its result. A step that has failed stays in flight until
        `drain`."""
        try:
            result = self._in_flight[0].result()
        except WorkerDied as error:
            self._end_with(error)
            raise
        self._in_flight.popleft()
        return result

    def drain(self) -> None:
        """Wait for all steps in flight after one has failed. The later ones are cancelled or have no effect."""
        self._last_end = None
        while self._in_flight:
            try:
                self._in_flight.popleft().result()
            except WorkerDied as error:
                self._end_with(error)
                raise
            except Exception:  # cancelled, or failed too: the first failure counts
                continue
        self._is_step_missing = False

    def forget(self) -> None:
        """Forget the steps in flight, after an interrupt that may have left them in any state."""
        self._in_flight, self._last_end, self._is_step_missing = deque(), None, False

    def seconds_since_last(self, *, has_requests: bool) -> float | None:
        """Return the seconds between the ends of the last step and of the step before. None if the engine had no
        requests in between. has_requests: whether it has any now."""
        now, last = time.perf_counter(), self._last_end
        self._last_end = now if has_requests else None
        return None if last is None else now - last

    # Commands

    def order(self, command: Command[Answer]) -> Future[Answer]:
        """Have the worker carry out a command, and return a future of the answer; steps go on meanwhile."""
        self.check()
        return self.runner.command(command)

    def command(self, command: Command[Answer]) -> Answer:
        """Have the worker carry out a command, and wait for its answer."""
        self.check()
        try:
            return self.runner.command(command).result()
        except WorkerDied as error:
            self._end_with(error)
            raise

    # The end

    def end(self, error: EngineError) -> None:
        """Run no more steps. `error` gives the reason; an earlier reason is kept."""
        self._error = self._error or error

    def _end_with(self, death: WorkerDied) -> None:
        self._error = WorkerDied(f"the engine has ended: {death}")
        self.on_death()


def _ignore() -> None: ...
