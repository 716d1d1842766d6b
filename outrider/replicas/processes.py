"""ReplicaProcess: one replica as a process on this machine. It is started, watched, restarted when it dies, and ended
with the front.

The process ends when its parent does, also when the parent is killed. A process that does not answer for too long is
killed, and its requests go to other replicas. If a process fails before it has ever served, the settings are most
likely wrong, so the front ends.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any

from outrider.engine.spawned import spawn_process
from outrider.replicas.adapter_changes import AdapterChanges
from outrider.replicas.all_replicas import ask_whole
from outrider.replicas.policy import PrefixRouter
from outrider.replicas.replica import Replica, ReplicaState
from outrider.replicas.trainer_changes import TrainerChanges
from outrider.server.restarts import Restarts

AT_EXIT = 0  # before multiprocessing waits for its children
WATCH_SECONDS = 0.25  # between two looks at a replica
START_SECONDS = 600.0  # until a process listens, which it does before it loads the model
SIGNAL_SECONDS = 1.0  # in which a signal to all processes reaches the front, before a death counts as a failure
CLOSE_SECONDS = 15.0  # beyond the time that running requests get, until a replica that was told to end is killed
log = logging.getLogger("outrider")


class ReplicaProcess:
    """Runs one replica in a process. The process calls `main` with `arguments`, and serves at the replica's socket
    until SIGTERM. If the replica is given up, `on_failed` is called with the process's exit code."""

    def __init__(self, replica: Replica, router: PrefixRouter, adapters: AdapterChanges, trainer: TrainerChanges,
                 main: Callable[..., None], arguments: Sequence[Any], *, on_failed: Callable[[int], None],
                 max_restarts: int, hang_seconds: float) -> None:
        self.replica = replica
        self._router, self._adapters, self._trainer = router, adapters, trainer
        self._main, self._arguments = main, arguments
        self._on_failed, self._hang_seconds = on_failed, hang_seconds
        self._process: SpawnProcess | None = None
        self._has_served = False
        self._restarts = Restarts(max_restarts)

    async def run(self) -> None:
        """Start the replica and restart it when it ends, until the task is cancelled or the replica is given up."""
        while True:
            self.replica.state = ReplicaState.STARTING
            self._process = await asyncio.to_thread(self._spawn)
            await self._watch(self._process)
            self.replica.state = ReplicaState.GONE
            self._router.forget(self.replica.name)
            code = self._process.exitcode
            await asyncio.sleep(SIGNAL_SECONDS)
            wait = self._restarts.next_wait(time.monotonic()) if self._has_served else None
            if wait is None:
                self._on_failed(1 if code is None else abs(code))
                return
            log.error("replica %s has died (exit code %s) and is started again in %.0f s", self.replica.name, code,
                      wait)
            await asyncio.sleep(wait)
            self.replica.num_restarts += 1

    async def stop(self, seconds: float) -> None:
        """Wait for running requests at most this many seconds, then end the process."""
        process = self._process
        if process is None:
            return
        process.terminate()
        await asyncio.to_thread(process.join, seconds + CLOSE_SECONDS)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)

    def _spawn(self) -> SpawnProcess:
        process = spawn_process(_run_replica, (self._main, *self._arguments),
                                name=f"outrider-replica-{self.replica.name}")
        Finalize(None, process.kill, exitpriority=AT_EXIT)
        return process

    async def _watch(self, process: SpawnProcess) -> None:
        """Wait until the process has ended. Meanwhile ask for the replica's health, and kill the process if it
        hangs."""
        answered, most_seconds = time.monotonic(), START_SECONDS
        while process.is_alive():
            answer = await ask_whole(self.replica, "GET", b"/health", [], seconds=self._hang_seconds)
            now = time.monotonic()
            if answer is not None:
                answered, most_seconds = now, self._hang_seconds
                await self._note(is_healthy=answer[0] == 200)
            elif self.replica.state is not ReplicaState.STARTING:
                self.replica.state = ReplicaState.NOT_HEALTHY
            if answer is None and now - answered > most_seconds:
                log.error("replica %s has not answered for %.0f s and is killed", self.replica.name, most_seconds)
                process.kill()
            await asyncio.to_thread(process.join, WATCH_SECONDS)

    async def _note(self, *, is_healthy: bool) -> None:
        """Update the replica's state after a health check. A replica that becomes healthy after a start first gets the
        changes of adapters, weights and pauses that the others have."""
        self._has_served |= is_healthy
        if is_healthy:
            if self.replica.state is ReplicaState.STARTING:
                await self._adapters.bring(self.replica)
                await self._trainer.bring(self.replica)
            self.replica.state = self._trainer.state_of(self.replica)
        elif self.replica.state is not ReplicaState.STARTING:
            self.replica.state = ReplicaState.NOT_HEALTHY


class ReplicaGroup:
    """All replicas of a front. It starts, watches and ends them."""

    def __init__(self, processes: Sequence[ReplicaProcess], *, stop_seconds: float) -> None:
        self._processes = processes
        self._stop_seconds = stop_seconds
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(process.run()) for process in self._processes]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(process.stop(self._stop_seconds) for process in self._processes))


# In the child


def _end_with_parent() -> None:
    """End this process when its parent ends, even in the middle of work. Otherwise it could hold device memory for
    minutes while it loads a model."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_replica(main: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, name="outrider-parent-watch", daemon=True).start()
    main(*arguments)
