"""EngineHost: manages the engine behind the server. It loads the engine in a thread, watches it, and restarts it when
it fails.

    Loading -> Serving -> (the engine failed) -> Loading -> ... -> Failed

Only `_move` changes `state`. While the model loads, the server answers that it is loading. When steps have stopped, its
health check fails. This file contains no HTTP except the error for requests that cannot be served now."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.async_llm import AsyncLLM
from outrider.engine.engine_thread import tell
from outrider.server.errors import ApiError
from outrider.server.restarts import Restarts

log = logging.getLogger("outrider")


@dataclass(frozen=True)
class Loading:
    reason: str = "the model is loading"
    wait: float = 0.0  # seconds before it begins


@dataclass(frozen=True)
class Serving:
    llm: AsyncLLM


@dataclass(frozen=True)
class Failed:
    reason: str
    error: BaseException


State = Loading | Serving | Failed


class EngineHost:
    """Loads and watches the engine for one event loop. `start` builds an engine in a thread and may take minutes."""

    def __init__(self, start: Callable[[], AsyncLLM], *, stall_timeout: float = 120.0, max_restarts: int = 3,
                 on_failed: Callable[[], None] = lambda: None, on_serving: Callable[[], None] = lambda: None,
                 end_stalled: Callable[[AsyncLLM], None] = lambda llm: None,
                 has_worker: Callable[[AsyncLLM], bool] = lambda llm: True) -> None:
        """`end_stalled`: a function that makes the engine fail, called if it has been stalled for twice the timeout.
        `has_worker`: whether the engine's worker is alive; an idle engine does not notice the death of its worker."""
        self.state: State = Loading()
        self.num_restarts = 0
        self.on_failed = on_failed
        self._on_serving = on_serving
        self._start = start
        self._end_stalled = end_stalled
        self._has_worker = has_worker
        self._stall_timeout = stall_timeout
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._progress = (-1, 0.0)  # steps so far, and since when
        self._stalled = False

    @property
    def llm(self) -> AsyncLLM:
        """Return the running engine, or raise the error for requests if there is none."""
        match self.state:
            case Serving(llm) if llm.is_running:
                return llm
            case Loading(reason, wait):
                raise ApiError(503, reason, retry_after=5 + int(wait))
            case Failed():
                raise ApiError(503, "the engine has failed too often and is not started again: restart the "
                                    "server", retry_after=30)
        raise ApiError(503, "the engine has failed and is being started again: send the request again", retry_after=5)

    @property
    def problem(self) -> str | None:
        """Return the reason why the server is not healthy; None if it is."""
        match self.state:
            case Serving(llm):
                if not llm.is_running or not self._has_worker(llm):
                    return "the engine has failed"
                return "no step has ended for too long" if self._stalled else None
            case Loading(reason) | Failed(reason):
                return reason

    @property
    def pause(self) -> str:
        """Return why requests wait although the engine is healthy, for example because it sleeps. Empty if they do not
        wait."""
        return self.state.llm.engine.pause.why_requests_wait if isinstance(self.state, Serving) else ""

    async def run(self) -> None:
        """Load and watch the engine until the task is cancelled or the engine has failed permanently."""
        interval = min(1.0, self._stall_timeout / 4)
        while not isinstance(self.state, Failed):
            match self.state:
                case Loading(wait=seconds):
                    await asyncio.sleep(seconds)
                    await self._load()
                case Serving(llm):
                    await asyncio.sleep(interval)
                    self._watch(llm)

    def close(self) -> None:
        """End the engine after the step in flight."""
        if isinstance(self.state, Serving):
            self.state.llm.shutdown()

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[AsyncLLM] = loop.create_future()

        def work() -> None:
            try:
                llm = self._start()
            except BaseException as error:
                _tell(loop, done, None, error)
            else:
                if not _tell(loop, done, llm, None):
                    llm.shutdown()  # the server is closing and no longer waits for the engine

        # A daemon: a server that is told to stop while it loads need not wait for the load.
        threading.Thread(target=work, name="outrider-load", daemon=True).start()
        try:
            llm = await done
        except Exception as error:
            if self.num_restarts == 0:  # most likely settings that cannot work: the command reports them
                self._move(Failed("the engine did not start", error))
            else:  # it has served before: the memory of its predecessor may not be free yet
                log.error("the engine did not start: %s", error)
                self._restart(time.monotonic())
            return
        self._progress = (-1, time.monotonic())
        self._move(Serving(llm))

    def _watch(self, llm: AsyncLLM) -> None:
        now = time.monotonic()
        if not llm.is_running:
            if llm.weights_version or llm.has_weight_update:  # the files have older ones
                self._fail("the engine failed, and with it the weights that a trainer gave: start the server again, "
                           "and update its weights")
            else:
                self._restart(now)
            return
        if not self._has_worker(llm):
            llm.fail("its worker process has died")
            return
        steps = llm.engine.stats.num_steps
        is_paused = llm.engine.pause.is_on  # it sleeps, say: requests wait for an administrator
        if steps != self._progress[0] or not llm.engine.num_requests or is_paused:
            self._progress = (steps, now)
        waited = now - self._progress[1]
        stalled = waited > self._stall_timeout
        if stalled and not self._stalled:
            log.error("no step has ended for %.0f s although requests wait: /health now fails", self._stall_timeout)
        self._stalled = stalled
        if waited > 2 * self._stall_timeout:
            log.error("the engine has stalled for too long and is stopped; it is started again if restarts are left")
            self._progress = (steps, now)
            self._end_stalled(llm)

    def _restart(self, now: float) -> None:
        self._stalled = False
        wait = self._restarts.next_wait(now)
        if wait is None:
            self._fail(f"the engine failed and was started again {self._max_restarts} times already")
            return
        self.num_restarts += 1
        log.error("the engine failed and is started again in %.0f s", wait)
        self._move(Loading("the engine failed and is starting again", wait))

    def _fail(self, message: str) -> None:
        self._move(Failed(message, RuntimeError(message)))

    def _move(self, state: State) -> None:
        self.state = state
        match state:
            case Failed():
                self.on_failed()
            case Serving():
                self._on_serving()


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[AsyncLLM], llm: AsyncLLM | None,
          error: BaseException | None) -> bool:
    """Pass the loaded engine, or the error of loading it, to the event loop. Returns False if the loop is closed."""
    def resolve() -> None:
        if done.done():  # cancelled
            if llm is not None:
                threading.Thread(target=llm.shutdown, daemon=True).start()
        elif error is not None:
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            assert llm is not None
            done.set_result(llm)

    return tell(loop, resolve)
