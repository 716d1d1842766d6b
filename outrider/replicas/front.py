"""ReplicaFront: the HTTP application that passes requests on to replicas. Each replica is a complete server at a unix
socket.

Bytes are passed through unchanged, so the replicas implement all routes and streams. A request goes to the replica that
the router chooses. If the replica dies, refuses the request because its queue is full, or has no engine just then, and
nothing has been sent to the client yet, the request goes to another replica. A stream that had begun ends with an error
event. Plain ASGI, no framework.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from outrider.replicas.adapter_changes import AdapterChanges
from outrider.replicas.all_replicas import ask_all, find_response, joined_page
from outrider.replicas.policy import PrefixRouter
from outrider.replicas.prompt_blocks import NO_NAMES, PromptNames, read_names
from outrider.replicas.replica import Replica, ReplicaState
from outrider.replicas.trainer_changes import TrainerChanges
from outrider.replicas.upstream import Answer, Headers, ReplicaLost, ask
from outrider.server.admin import LOAD_ADAPTER, UNLOAD_ADAPTER
from outrider.server.admin import PATHS as ADMIN_PATHS
from outrider.server.errors import ApiError
from outrider.server.fair_threads import FairThreads
from outrider.server.guard import BODILESS_METHODS, REQUEST_ID_HEADER, Message, Receive, Scope, Send, send_error
from outrider.server.trainer_routes import TRAINER_PATHS
from outrider.server.work import DONE, LAST_SECONDS, event

RETRIED = (429, 503)  # answers that another replica may better: its queue is full, or it has no engine just then
MOST_DEATHS = 1  # a request during which more replicas died is not tried again: it may be what killed them
SESSIONS = "/v1/cache_sessions/"  # any replica may have pages of a session
LONG_BODY = 1 << 14  # bytes; longer bodies are read for the router in a thread
WRITTEN_HERE = (b"x-request-id", b"date")
log = logging.getLogger("outrider")


class ReplicaFront:
    """The ASGI application. `start` is awaited before the first request, `stop` after the last."""

    def __init__(self, replicas: Sequence[Replica], router: PrefixRouter, adapters: AdapterChanges,
                 trainer: TrainerChanges, *, start: Callable[[], Awaitable[None]],
                 stop: Callable[[], Awaitable[None]]) -> None:
        self.replicas = replicas
        self._router, self._adapters, self._trainer = router, adapters, trainer
        self._start, self._stop = start, stop
        self._readers = FairThreads(1)  # long bodies of one tenant are read one after another

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"the server answers HTTP only, not {scope['type']}")
        exchange = _Exchange(scope, send)
        if exchange.method not in BODILESS_METHODS:
            exchange.body = await _body(receive)
        work = asyncio.ensure_future(self._serve(exchange))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except asyncio.CancelledError:  # the server ends, and has waited as long as it may
            await _cancelled(work)
            await exchange.fail(ApiError(503, "the server is stopping: send the request again", retry_after=5))
        finally:
            await _cancelled(gone)
            await _cancelled(work)

    async def _live(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await self._start()
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, exchange: _Exchange) -> None:
        try:
            match exchange.method, exchange.path:
                case ("GET" | "HEAD", "/health" | "/ping") | ("POST", "/ping"):
                    await exchange.answer_json(self._health())
                case "GET", "/metrics":
                    await exchange.answer_text(await joined_page(self.replicas, exchange.headers))
                case "GET", "/load":
                    await exchange.answer_json({"server_load": sum(each.num_live for each in self.replicas)})
                case "POST", path if path in (LOAD_ADAPTER, UNLOAD_ADAPTER):
                    await exchange.answer_whole(*await self._adapters.make(self.replicas, path, exchange.headers,
                                                                          exchange.body))
                case method, path if path in TRAINER_PATHS:
                    await exchange.answer_whole(*await self._trainer.make(self.replicas, method, path, exchange.target,
                                                                          exchange.headers, exchange.body))
                case _, path if path in ADMIN_PATHS:
                    await exchange.answer_whole(*await ask_all(self.replicas, exchange.method, exchange.target,
                                                               exchange.headers, exchange.body))
                case "DELETE", path if path.startswith(SESSIONS):
                    await exchange.answer_whole(*await ask_all(self.replicas, exchange.method, exchange.target,
                                                               exchange.headers, exchange.body))
                case _:
                    await self._pass_on(exchange)
        except ApiError as error:
            await exchange.fail(error)

    def _health(self) -> dict[str, object]:
        """Answer that the server is healthy if at least one replica serves. The body has the state of each."""
        states = {each.name: each.state.value for each in self.replicas}
        if not self._serving():
            raise ApiError(503, f"no replica serves: {_listed(states)}. Try again later", retry_after=5)
        is_whole = all(each.state is ReplicaState.SERVING for each in self.replicas)
        return {"status": "healthy" if is_whole else "degraded", "replicas": states}

    def _serving(self, without: Iterable[str] = ()) -> list[Replica]:
        return [each for each in self.replicas if each.state is ReplicaState.SERVING and each.name not in without]

    async def _pass_on(self, exchange: _Exchange) -> None:
        blocks, previous = await self._names(exchange)
        holder = await find_response(self.replicas, exchange.path, previous, exchange.headers)
        tried: set[str] = set()
        num_deaths = 0
        while candidates := ([holder] if holder is not None and not tried else self._serving(tried)):
            chosen = self._router.choose(blocks, {each.name: each.num_live for each in candidates})
            replica = next(each for each in candidates if each.name == chosen)
            tried.add(chosen)
            replica.num_live += 1
            try:
                answer = await ask(replica.socket_path, exchange.method, exchange.target, exchange.headers,
                                   exchange.body)
                try:
                    if answer.status in RETRIED and holder is None and self._serving(tried):
                        continue
                    self._router.remember(blocks, chosen)
                    await exchange.relay(answer)
                finally:
                    answer.close()
                return
            except ReplicaLost as error:
                num_deaths += 1
                log.error("replica %s was lost while it served a request: %s", chosen, error)
                if exchange.has_started or num_deaths > MOST_DEATHS:
                    raise ApiError(503, "the replica that served this request has died; send the request again",
                                   retry_after=5) from None
            finally:
                replica.num_live -= 1
        self._health()  # raises, and tells the state of each replica, if none serves
        raise ApiError(503, "no replica can serve the request now; send it again", retry_after=5)

    async def _names(self, exchange: _Exchange) -> PromptNames:
        """Read from the body what decides which replica gets the request."""
        body, tenant = exchange.body, exchange.tenant
        if not body or exchange.method != "POST":
            return NO_NAMES
        if len(body) <= LONG_BODY:
            return read_names(body, tenant)
        return await asyncio.get_running_loop().run_in_executor(self._readers, read_names, body, tenant)


class _Exchange:
    """One client's request that passes through the front. It records which part of the answer has been sent, because
    only an unanswered request can go to another replica."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.method, self.path = scope["method"], scope["path"]
        query = scope.get("query_string", b"")
        self.target: bytes = scope["raw_path"].split(b"?")[0] + (b"?" + query if query else b"")
        self.headers: Headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        self.headers.append((b"x-request-id", scope[REQUEST_ID_HEADER].encode("ascii")))
        self.body = b""  # until the answer begins: the guard counts it as held so long
        self.has_started = False
        self._is_stream = False
        self._send = send

    @property
    def tenant(self) -> bytes:
        found = dict(self.headers)
        return found.get(b"authorization", b"") + found.get(b"x-api-key", b"")

    async def relay(self, answer: Answer) -> None:
        """Send a replica's answer to the client. Nothing is sent before the first piece of the body has come."""
        self._is_stream = answer.content_type.startswith(b"text/event-stream")
        async for piece in answer.pieces():
            await self._begin(answer.status, answer.headers)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._begin(answer.status, answer.headers)
        await self._send({"type": "http.response.body", "body": b""})

    async def answer_whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def answer_json(self, content: dict[str, object]) -> None:
        await self.answer_whole(200, [(b"content-type", b"application/json")], json.dumps(content).encode())

    async def answer_text(self, text: str) -> None:
        await self.answer_whole(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], text.encode())

    async def fail(self, error: ApiError) -> None:
        if not self.has_started:
            self.has_started = True
            await send_error(self._send, self.path, error)
        elif self._is_stream:
            with suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(LAST_SECONDS):
                    await self._send({"type": "http.response.body", "body": _error_event(self.path, error)})
        else:  # without its end the client sees that the answer was cut off
            raise error

    async def _begin(self, status: int, headers: Headers) -> None:
        if self.has_started:
            return
        self.has_started, self.body = True, b""
        kept = [pair for pair in headers if pair[0] not in WRITTEN_HERE]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})


def _error_event(path: str, error: ApiError) -> bytes:
    if path.startswith("/v1/messages"):
        return b"event: error\n" + event(error.body_for(path))
    return event(error.body) + DONE


async def _body(receive: Receive) -> bytes:
    """Return the body of a request. The guard before this application has already read the body within its limits, and
    delivers it in one piece, which is empty on paths that need no key."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return b"".join(parts)


async def _disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})


def _listed(states: dict[str, str]) -> str:
    return ", ".join(f"replica {name} is {state}" for name, state in states.items())
