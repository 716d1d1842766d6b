"""EngineThread: the thread that runs an engine for asyncio callers. Coroutines send it commands and get outputs.

An error of one request goes to that request's stream. If the engine ends, every stream gets the error.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import OutputIncrement
from outrider.engine.engine import Engine
from outrider.engine.quiet import wait_for
from outrider.engine.reader_streams import Stream
from outrider.engine.worker_line import EngineError
from outrider.runner.interface import WorkerDied

Made = TypeVar("Made")


class EngineThread:
    """The thread that runs the engine. Other threads use the engine only through this thread's queue of commands."""

    def __init__(self, engine: Engine) -> None:
        self.error: BaseException | None = None  # why it no longer runs
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # streams by request; only this thread uses them
        self._stops = False
        self._lock = threading.Lock()  # a command is accepted before the end, or refused after it
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    # From any thread

    def open(self, stream: Stream, request: CheckedRequest) -> None:
        self._send(lambda: self._add(stream, request))

    def leave(self, stream: Stream) -> None:
        """Note that a stream's reader has left. If its request still runs, the request is aborted."""
        if not stream.is_done and self.error is None:
            self._commands.put(lambda: self._drop(stream))

    def abort(self, request_id: str, then: Callable[[], object]) -> None:
        def command() -> None:
            try:
                self._engine.abort(request_id)
            finally:
                then()

        self._send(command)

    def call(self, action: Callable[[], Made]) -> Future[Made]:
        """Call `action` between two steps of the engine, and return a future of its result."""
        done: Future[Made] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self.error is not None:  # it has ended while the command waited
                    raise _copy(self.error)
                done.set_result(action())
            except WorkerDied as error:  # the end of the engine, of which every stream hears
                done.set_exception(error)
                raise
            except BaseException as error:  # a command may raise anything, also SystemExit
                done.set_exception(error)

        self._send(command)
        return done

    def fail(self, reason: str) -> None:
        def command() -> None:
            raise EngineError(reason)

        self._commands.put(command)

    def shutdown(self) -> None:
        if self._engine.is_forked:
            return
        self._commands.put(self._stop)
        self._thread.join()

    def _send(self, command: Callable[[], None]) -> None:
        if self._engine.is_forked:
            self._engine.check_running()
        with self._lock:
            if self.error is not None:
                raise _copy(self.error)
            self._commands.put(command)

    # In the thread

    def _run(self) -> None:
        try:
            while not self._stops:
                self._take_commands(wait=not self._engine.has_work)
                if self._engine.has_work:
                    self._deliver(self._engine.step())
        except BaseException as cause:
            self._engine.close_watchers()
            self._end(f"the engine failed: {type(cause).__name__}: {cause}", cause)
            self._engine.keepers.close()
            self._engine.runner.close()
            return
        self._end("the engine was shut down", None)
        self._engine.close()

    def _take_commands(self, wait: bool) -> None:
        if wait:
            wait_for(self._next_command, self._engine.idle)()
        while not self._stops:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _next_command(self, seconds: float | None) -> Callable[[], None] | None:
        try:
            return self._commands.get(timeout=seconds)
        except queue.Empty:
            return None

    def _stop(self) -> None:
        self._stops = True

    def _add(self, stream: Stream, request: CheckedRequest) -> None:
        if self.error is not None:  # it has ended while the command waited
            tell(stream.loop, stream.fail, _copy(self.error))
            return
        try:
            self._free_id(stream.request_id)
        except BaseException as error:  # the end of the engine, of which this stream would not hear otherwise
            tell(stream.loop, stream.fail, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise
        try:
            self._engine.add({stream.request_id: request})
        except Exception as error:  # refused, with nothing changed
            tell(stream.loop, stream.fail, error)
            return
        self._streams[stream.request_id] = stream

    def _free_id(self, request_id: str) -> None:
        """Run steps until a new request's id is free. A request whose reader has left keeps its id until it ends,
        within the next steps."""
        while request_id not in self._streams and self._engine.is_live(request_id):
            self._deliver(self._engine.step())

    def _drop(self, stream: Stream) -> None:
        # Another stream may have the id by now, or this one was refused because of it.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.request_id)

    def _deliver(self, increments: list[OutputIncrement]) -> None:
        """Deliver the increments to each event loop with one `call_soon_threadsafe`."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, OutputIncrement]]] = {}
        for increment in increments:
            stream = self._streams.get(increment.sample.request_id)
            if stream is not None:  # else its reader has left
                by_loop.setdefault(stream.loop, []).append((stream, increment))
        for loop, parts in by_loop.items():
            for stream, _ in parts:
                if not self._engine.is_live(stream.request_id):  # forgotten before its reader hears of the end
                    self._streams.pop(stream.request_id, None)
            if not tell(loop, _put_all, parts):
                for stream, _ in parts:
                    self._drop(stream)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        with self._lock:
            self.error = EngineError(reason)
            self.error.__cause__ = cause
            while not self._commands.empty():  # opened streams must hear of it too
                command = self._commands.get_nowait()
                if command != self._stop:
                    self._try(command)
        for stream in self._streams.values():
            tell(stream.loop, stream.fail, _copy(self.error))

    def _try(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # the engine has failed, and streams hear of the first failure alone
            return


def _copy(error: BaseException) -> EngineError:
    """Copy the error for one reader, because raising an error adds to its traceback."""
    copied = EngineError(str(error))
    copied.__cause__ = error.__cause__
    return copied


def _put_all(parts: list[tuple[Stream, OutputIncrement]]) -> None:
    for stream, increment in parts:
        stream.put(increment)


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> bool:
    """Schedule a call in an event loop. Returns False if the loop is closed; then its readers are gone too."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True
