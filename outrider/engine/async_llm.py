"""AsyncLLM: an asyncio front. A thread of its own owns the engine; coroutines send it commands and get outputs.

A stream is sent what each step added. It keeps one growing output, of which its reader gets a copy whenever it looks,
or the increments that its reader has not seen: a slow reader costs no more memory than its output and slows nobody.
What goes wrong with one request is raised where that request is read; a failed engine, everywhere. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any, Never, cast

from outrider.config import config_for
from outrider.core.fields import Text, check_value
from outrider.core.outputs import OutputIncrement, RequestOutput
from outrider.core.params import SamplingParams, check_params
from outrider.core.pooling import Output, PoolingParams, PoolingRequestOutput, RequestParams, empty_output
from outrider.engine.engine import Engine, EngineError
from outrider.engine.front import Front, refuse_adapter, refuse_misplaced, refuse_sampling_field
from outrider.engine.prompts import EncodedPrompt, Prompt, encode_prompt
from outrider.engine.start import start_engine
from outrider.engine.text import Tokenizer

LONG_TEXT = 20_000  # characters from which tokenizing leaves the event loop


class RequestError(RuntimeError):
    """One request failed while it ran, as its output's `error` says."""


class AsyncLLM(Front):
    """`async for output in llm.generate(prompt, params)`: the growing output of one prompt, after every few runs.

    Leaving the loop, or cancelling the task in it, aborts the request."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = config_for("AsyncLLM", model, settings).for_streams()
        self._start(start_engine(config), config.model)

    @classmethod
    def around(cls, engine: Engine, name: str = "this model") -> AsyncLLM:
        """A front for an engine that is already built; it belongs to the front from now on."""
        self = cls.__new__(cls)
        self._start(engine, name)
        return self

    def _start(self, engine: Engine, name: str) -> None:
        self.engine = engine  # read-only outside its thread
        self._name = name
        self._ids = count()
        self._owner = _Owner(engine)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                       request_id: str | None = None, *, lora_request: None = None, priority: int = 0,
                       **misplaced: Never) -> AsyncGenerator[RequestOutput, None]:
        """Raises ValueError for a request that cannot be served. The last output is finished."""
        refuse_misplaced(self.generate, misplaced)
        refuse_adapter(lora_request)
        params = check_params(SamplingParams() if sampling_params is None else sampling_params)
        async with aclosing(self._grow(prompt, params, request_id, priority)) as outputs:
            async for output in outputs:
                yield cast(RequestOutput, output)

    async def encode(self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None,
                     *, lora_request: None = None, priority: int = 0) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The pooled hidden states of one prompt, in the last output."""
        refuse_adapter(lora_request)
        params = PoolingParams() if pooling_params is None else pooling_params
        async with aclosing(self._grow(prompt, params, request_id, priority)) as outputs:
            async for output in outputs:
                yield cast(PoolingRequestOutput, output)

    async def increments(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *,
                         priority: int = 0) -> AsyncGenerator[list[OutputIncrement], None]:
        """As `generate`, but yields what steps have added since the reader last looked, and copies nothing."""
        stream = _Increments(self._name_request(request_id), asyncio.get_running_loop(), params.n)
        async with self._opened(stream, await self._encode(prompt), check_params(params), priority):
            while not stream.is_done:
                yield await stream.next()

    async def _grow(self, prompt: Prompt, params: RequestParams, request_id: str | None,
                    priority: int) -> AsyncGenerator[Output, None]:
        request_id = self._name_request(request_id)
        encoded = await self._encode(prompt)
        output = empty_output(request_id, encoded.text, encoded.token_ids, params)
        stream = _GrowingOutput(output, asyncio.get_running_loop())
        async with self._opened(stream, encoded, params, priority):
            while not stream.is_done:
                yield await stream.next()

    @asynccontextmanager
    async def _opened(self, stream: _Stream, encoded: EncodedPrompt, params: RequestParams,
                      priority: int) -> AsyncGenerator[None, None]:
        """The stream's request runs until the block is left."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.to_thread(self.engine.checks.check_form, params)  # a new grammar takes a while to compile

        def add() -> None:
            self.engine.add(stream.request_id, encoded.token_ids, params, priority=priority,
                            cache_salt=encoded.cache_salt, bidirectional_spans=encoded.bidirectional_spans)

        self._owner.open(stream, add)
        try:
            yield
        finally:
            self._owner.leave(stream)

    def _name_request(self, request_id: str | None) -> str:
        request_id = f"async-{next(self._ids)}" if request_id is None else request_id
        check_value("request_id", Text, request_id)
        return request_id

    async def chat(self, messages: Sequence[dict[str, Any]], sampling_params: SamplingParams | None = None, *,
                   request_id: str | None = None, priority: int = 0,
                   **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """One conversation through the model's chat template."""
        for name, value in options.items():
            refuse_sampling_field(self.chat, name, value)
        token_ids = await asyncio.to_thread(self.get_tokenizer().encode_chat, messages, **options)
        outputs = self.generate(token_ids, sampling_params, request_id=request_id, priority=priority)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """Ends a request: its reader gets what there is, with finish_reason "abort". An unknown id is no error."""
        check_value("request_id", Text, request_id)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            _tell(loop, _resolve, done)

        self._owner.abort(request_id, tell)
        await done

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an error where it has none."""
        return self.engine.need_tokenizer(self._name)

    @property
    def is_running(self) -> bool:
        """Whether the engine serves requests: it was not shut down and has not failed."""
        return self._owner.error is None

    def fail(self, reason: str) -> None:
        """Ends an engine that can no longer serve, as a failed step of it would: requests raise EngineError."""
        self._owner.fail(reason)

    def shutdown(self) -> None:
        """Ends the engine; requests that still run raise EngineError. Waits for the step in flight."""
        self._owner.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _encode(self, prompt: Prompt) -> EncodedPrompt:
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return await asyncio.to_thread(encode_prompt, prompt, self.get_tokenizer)
        return encode_prompt(prompt, self.get_tokenizer)


class _Stream(ABC):
    """The reader's end of one request. `put` and `fail` run in the reader's event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.is_done = False
        self._error: BaseException | None = None
        self._is_ready = False  # something has come that the reader has not seen
        self._waiter: asyncio.Future[None] | None = None  # the reader's, while it waits

    @abstractmethod
    def put(self, increment: OutputIncrement) -> None: ...

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Returns once something is ready. An event of asyncio costs twice as much."""
        if not self._is_ready:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._is_ready = False
        if self._error is not None:
            self.is_done = True
            raise self._error

    def _raise_if(self, failed: str | None) -> None:
        if failed is not None:  # whatever else the request has running is aborted when its reader leaves
            raise RequestError(f"request {self.request_id}: {failed}")


class _GrowingOutput(_Stream):
    """Keeps the whole output, of which the reader gets a copy."""

    def __init__(self, output: Output, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(output.request_id, loop)
        self._output = output

    def put(self, increment: OutputIncrement) -> None:
        self._output.grow(increment)
        self._wake()

    async def next(self) -> Output:
        await self._wait()
        output = self._output.copy()  # the reader's own: what it has read never changes
        self.is_done = output.finished
        self._raise_if(output.error)
        return output


class _Increments(_Stream):
    """Keeps the increments that the reader has not seen: as much memory as the part of the output that they are."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, num_samples: int) -> None:
        super().__init__(request_id, loop)
        self._unread: list[OutputIncrement] = []
        self._num_left = num_samples  # samples that have not ended
        self._failed: str | None = None

    def put(self, increment: OutputIncrement) -> None:
        self._unread.append(increment)
        if increment.end is not None:
            self._num_left -= 1
            self._failed = self._failed or increment.end.error
        self._wake()

    async def next(self) -> list[OutputIncrement]:
        await self._wait()
        unread, self._unread = self._unread, []
        self.is_done = self._num_left == 0
        self._raise_if(self._failed)
        return unread


class _Owner:
    """The thread that owns the engine. Everything else reaches it through its queue of commands."""

    def __init__(self, engine: Engine) -> None:
        self.error: BaseException | None = None  # why it no longer runs
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # of this thread
        self._stops = False
        self._lock = threading.Lock()  # a command is accepted before the end, or refused after it
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    # From any thread

    def open(self, stream: _Stream, add: Callable[[], None]) -> None:
        self._send(lambda: self._add(stream, add))

    def leave(self, stream: _Stream) -> None:
        """The reader is gone; a request that still runs is aborted."""
        if not stream.is_done and self.error is None:
            self._commands.put(lambda: self._drop(stream))

    def abort(self, request_id: str, then: Callable[[], None]) -> None:
        def command() -> None:
            try:
                self._engine.abort(request_id)
            finally:
                then()

        self._send(command)

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
            self._end(f"the engine failed: {type(cause).__name__}: {cause}", cause)
            self._engine.runner.close()
            return
        self._end("the engine was shut down", None)
        self._engine.close()

    def _take_commands(self, wait: bool) -> None:
        if wait:
            self._commands.get()()
        while not self._stops:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _stop(self) -> None:
        self._stops = True

    def _add(self, stream: _Stream, add: Callable[[], None]) -> None:
        if self.error is not None:  # it has ended while the command waited
            _tell(stream.loop, stream.fail, _copy(self.error))
            return
        try:
            self._free_id(stream.request_id)
        except BaseException as error:  # the end of the engine, of which this stream would not hear otherwise
            _tell(stream.loop, stream.fail, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise
        try:
            add()
        except Exception as error:  # refused, with nothing changed
            _tell(stream.loop, stream.fail, error)
            return
        self._streams[stream.request_id] = stream

    def _free_id(self, request_id: str) -> None:
        """A request whose reader has left ends within the next steps, and keeps its id until then."""
        while request_id not in self._streams and self._engine.is_live(request_id):
            self._deliver(self._engine.step())

    def _drop(self, stream: _Stream) -> None:
        # Another stream may have the id by now, or this one was refused because of it.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._engine.abort(stream.request_id)

    def _deliver(self, increments: list[OutputIncrement]) -> None:
        """To every event loop its increments in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, OutputIncrement]]] = {}
        for increment in increments:
            stream = self._streams.get(increment.sample.request_id)
            if stream is not None:  # else its reader has left
                by_loop.setdefault(stream.loop, []).append((stream, increment))
        for loop, parts in by_loop.items():
            for stream, _ in parts:
                if not self._engine.is_live(stream.request_id):  # forgotten before its reader hears of the end
                    self._streams.pop(stream.request_id, None)
            if not _tell(loop, _put_all, parts):
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
            _tell(stream.loop, stream.fail, _copy(self.error))

    def _try(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # of an engine that has failed; the streams hear of the first failure
            return


def _copy(error: BaseException) -> EngineError:
    """An error of its own for each reader: raising one adds to its traceback."""
    copied = EngineError(str(error))
    copied.__cause__ = error.__cause__
    return copied


def _put_all(parts: list[tuple[_Stream, OutputIncrement]]) -> None:
    for stream, increment in parts:
        stream.put(increment)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> bool:
    """False if the loop is closed, and with it whoever waited there."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        return False
    return True
