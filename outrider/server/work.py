"""Responses that run a request: one JSON object at the end, or server-sent events while it runs.

When the client disconnects, or the deadline passes, the work is cancelled. This aborts the request in the engine and
frees its pages. Nothing is sent before the first result, so an error until then has its own HTTP status; a later error
is an event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.async_llm import EngineError, ParamsError, RequestError, WeightsIncomplete
from outrider.server.errors import INTERNAL, ApiError, bad_value

log = logging.getLogger("outrider")
Made = TypeVar("Made")
compact = json.JSONEncoder(separators=(",", ":")).encode
quoted = json.encoder.encode_basestring_ascii  # a text alone, at a third of the time
DONE = b"data: [DONE]\n\n"
# Of the request being served, once its body is read: says when the client leaves. None: nobody does.
CLIENT: ContextVar[Receive | None] = ContextVar("where the client's messages come from", default=None)
LAST_SECONDS = 1.0  # for a client to take the error that ends its stream


class Work(Response):
    """A response whose body is produced while it is sent. Subclasses implement `_produce`, which makes the answer and
    sends it."""

    def __init__(self, timeout: float | None) -> None:
        self.background = None
        self._timeout = timeout
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not gone.done():
                await _cancelled(work)
                await self._fail(send, ApiError(504, f"the request took longer than {self._timeout:g} seconds: "
                                                      "ask for fewer tokens"))
        except asyncio.CancelledError:  # the server ends, and has waited as long as it may
            await _cancelled(work)
            await self._fail(send, ApiError(503, "the server is stopping: send the request again", retry_after=5))
        finally:
            await _cancelled(gone)
            await _cancelled(work)

    async def _produce(self, send: Send) -> None:
        raise NotImplementedError

    async def _fail(self, send: Send, error: ApiError) -> None:
        if not self._has_started:  # else the client has the beginning of an answer, which cannot be taken back
            raise error

    async def _start(self, send: Send, media_type: bytes, *more: tuple[bytes, bytes]) -> None:
        self._has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", media_type), *more]})


class JsonWork(Work):
    """A response of one JSON object. `answer`: the object, or consecutive parts of JSON text."""

    def __init__(self, answer: Awaitable[dict[str, Any] | list[bytes]], timeout: float | None) -> None:
        super().__init__(timeout)
        self._answer = answer

    async def _produce(self, send: Send) -> None:
        try:
            answer = await self._answer
            parts = [compact(answer).encode()] if isinstance(answer, dict) else answer
        except Exception as error:
            raise api_error(error) from error
        await self._start(send, b"application/json", (b"content-length", str(sum(map(len, parts))).encode()))
        for i, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": i < len(parts) - 1})


class EventStream(Work):
    """A stream of events. `frames`: each item holds all events that were ready, as bytes. `error_event` writes an error
    that comes after the first frame."""

    def __init__(self, frames: AsyncGenerator[bytes, None], timeout: float | None, end: bytes = DONE,
                 error_event: Callable[[ApiError], bytes] = lambda error: event(error.body)) -> None:
        super().__init__(timeout)
        self._frames = frames
        self._end = end
        self._error_event = error_event

    async def _produce(self, send: Send) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    if not self._has_started:
                        # No proxy may hold events back.
                        await self._start(send, b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"),
                                          (b"x-accel-buffering", b"no"))
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            await self._fail(send, api_error(error))
            return
        await send({"type": "http.response.body", "body": self._end})

    async def _fail(self, send: Send, error: ApiError) -> None:
        if not self._has_started:
            raise error
        # A client that does not read must not keep a server that ends, or a request whose time is up.
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(LAST_SECONDS):
                await send({"type": "http.response.body", "body": self._error_event(error) + self._end})


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + compact(data).encode() + b"\n\n"


def api_error(error: Exception) -> ApiError:
    """Return the error that a client gets for an exception. Details that the client must not see are only logged."""
    match error:
        case ApiError():
            return error
        case ValueError():
            return bad_value(error)
        case EngineError():
            log.error("a request failed with the engine: %s", error)
            return ApiError(503, "the engine failed while the request ran; send it again", retry_after=5)
        case ParamsError():
            return ApiError(400, error.failure)
        case WeightsIncomplete():
            return ApiError(503, str(error))
        case RequestError():
            log.error("%s", error)
            return ApiError(500, "the request failed while it ran; the server's log says why")
    log.error("a request failed", exc_info=error)
    return ApiError(500, INTERNAL)


async def carried_out(action: Awaitable[Made]) -> Made:
    """Run an administrative action on the engine, and make the response. If the engine refuses, the client gets the
    error."""
    try:
        return await action
    except ValueError as error:
        raise bad_value(error, ("level", "tags", "mode")) from None
    except Exception as error:
        raise api_error(error) from error


async def while_client_waits(work: Awaitable[Made]) -> Made:
    """Await work that may take long before the response begins. If the client disconnects meanwhile, the work is
    cancelled and ApiError 408 is raised."""
    receive = CLIENT.get()
    if receive is None:
        return await work
    own, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({own, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not own.done():
            raise ApiError(408, "the client has disconnected")
        return own.result()
    finally:
        for task in (own, gone):
            task.cancel()
        await asyncio.wait({own, gone})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):  # a server that ends cancels twice, and whatever then fails is logged
            await asyncio.wait({task})
