"""Runners that an engine must not be able to tell from a local one: late, through pickle, in another process."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from outrider.core import ScheduledBatch, StepResult
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import Runner


class DelayedRunner:
    """Computes a step only when `delay` later ones have been submitted, or when its result is asked for: whoever
    schedules those cannot know anything of it."""

    def __init__(self, inner: Runner, delay: int) -> None:
        self._inner = inner
        self._delay = delay
        self._queue: deque[tuple[ScheduledBatch, _Late]] = deque()
        self.lags: list[int] = []  # steps submitted after each, when it was computed

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        future = _Late(self)
        self._queue.append((batch, future))
        while len(self._queue) > self._delay:
            self.compute_next()
        return future

    def compute_next(self) -> None:
        batch, future = self._queue.popleft()
        self.lags.append(len(self._queue))
        future.set_result(self._inner.submit(batch).result())

    def command(self, command: Command[Answer]) -> Future[Answer]:
        while self._queue:
            self.compute_next()
        return self._inner.command(command)

    def idle(self, quiet_seconds: float) -> float | None:
        return self._inner.idle(quiet_seconds)

    def close(self) -> None:
        self._inner.close()


class _Late(Future[StepResult]):
    def __init__(self, runner: DelayedRunner) -> None:
        super().__init__()
        self._runner = runner

    def result(self, timeout: float | None = None) -> StepResult:
        while not self.done():
            self._runner.compute_next()
        return super().result(timeout)


class PicklingRunner:
    """Hands on copies: nothing may depend on the identity of what is passed, nor on anything beside it."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        copied: Future[StepResult] = Future()
        inner = self._inner.submit(pickle.loads(pickle.dumps(batch)))
        inner.add_done_callback(lambda done: copied.set_result(pickle.loads(pickle.dumps(done.result()))))
        return copied

    def command(self, command: Command[Answer]) -> Future[Answer]:
        return self._inner.command(pickle.loads(pickle.dumps(command)))

    def idle(self, quiet_seconds: float) -> float | None:
        return self._inner.idle(quiet_seconds)

    def close(self) -> None:
        self._inner.close()


class ProcessRunner:
    """The runner of an equal engine in a process of its own."""

    def __init__(self, family: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, family, settings), daemon=True)
        self._process.start()
        self._waiting: deque[Future[StepResult]] = deque()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._waiting.append(future)
        self._pipe.send(batch)
        return future

    def _read(self) -> None:
        while True:
            try:
                result = self._pipe.recv()
            except EOFError:
                return
            self._waiting.popleft().set_result(result)

    def idle(self, quiet_seconds: float) -> float | None:
        return None

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(timeout=300)
        assert self._process.exitcode == 0


def _serve(pipe: Connection, family: str, settings: dict[str, Any]) -> None:
    import torch

    from tests.engine.harness import Rig, tiny_model

    torch.set_num_threads(1)
    with Rig(tiny_model(family), poison=False, **settings) as rig:
        while (batch := pipe.recv()) is not None:
            pipe.send(rig.runner.submit(batch).result())
