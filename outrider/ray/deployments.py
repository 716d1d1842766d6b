"""The deployments: EngineReplica runs an engine with all routes of the server; Ingress takes HTTP requests from Ray's
proxies and passes each to a replica.

The ingress reads the prompt's beginning for the router. If a replica dies before the first byte of its answer, the
request goes to another; a stream that had begun ends with an error event. If a client disconnects, its request ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.commands.serve_engine import make_host
from outrider.commands.serve_files import chat_template
from outrider.config import EngineConfig
from outrider.ray.preflight import check_node
from outrider.replicas.all_replicas import joined_answer
from outrider.replicas.joined_metrics import joined_metrics
from outrider.replicas.prompt_blocks import body_blocks
from outrider.replicas.upstream import Headers
from outrider.server.admin import LOAD_ADAPTER, UNLOAD_ADAPTER
from outrider.server.admin import PATHS as ADMIN_PATHS
from outrider.server.app import build_app
from outrider.server.engine_host import Failed, Loading
from outrider.server.errors import ApiError
from outrider.server.guard import Message
from outrider.server.service import Service
from outrider.server.settings import ServerConfig
from outrider.server.tenant_secret import kept_secret
from outrider.server.trainer_routes import FINISH_UPDATE, INIT_TRANSFER, START_UPDATE, UPDATE
from outrider.server.work import DONE, event

MOST_DEATHS = 1  # a request during which more replicas died is not tried again: it may be what killed them
LONG_BODY = 1 << 14  # bytes; longer bodies are read for the router in a thread
LOOK_SECONDS = 0.1  # between two looks whether the engine has loaded
DIED = "the replica that served this request has died; send the request again"
ADAPTERS_AT_START = ("on Ray adapters are given at start, by lora_modules: replicas that Ray starts later would lack "
                     "one that is loaded over HTTP")
WEIGHTS_AT_START = ("on Ray weights are those of the model's files: replicas that Ray starts later would lack an "
                    "update. Serve with --replicas and without --ray to update weights over HTTP")
REFUSED = (dict.fromkeys((LOAD_ADAPTER, UNLOAD_ADAPTER), ADAPTERS_AT_START)
           | dict.fromkeys((INIT_TRANSFER, START_UPDATE, UPDATE, FINISH_UPDATE), WEIGHTS_AT_START))
log = logging.getLogger("outrider")


class EngineReplica:
    """An actor, started by Ray Serve, that runs one engine with its server. `environment`: variables that are set
    before torch is imported."""

    async def __init__(self, engine: EngineConfig, config: ServerConfig, names: Sequence[str],  # type: ignore[misc]
                       versions: Mapping[str, str], environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        given = len(ray.get_gpu_ids()) if engine.device != "cpu" else None
        await asyncio.to_thread(check_node, engine, config, versions, given)
        self._host = make_host(engine, config, None, lambda: None)
        service = Service(self._host, config, names, chat_template(config.chat_template))
        self._app = build_app(service, kept_secret(engine))
        self._life = asyncio.create_task(self._host.run())
        while isinstance(self._host.state, Loading):  # until then Ray sends no requests
            await asyncio.sleep(LOOK_SECONDS)
        if isinstance(self._host.state, Failed):
            raise self._host.state.error

    async def handle(self, blocks: list[int], method: str, path: str, query: bytes, headers: Headers,
                     body: bytes) -> AsyncGenerator[Any, None]:
        """Run a request. Yields the status with the headers, then pieces of the body. `blocks`: hashes of the prompt,
        which only the router reads."""
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
                 "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "", "headers": headers}
        async with aclosing(_answer(self._app, scope, body)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]

    async def answer_whole(self, *request: Any) -> tuple[str, int, bytes]:
        """Run a request, given as for `handle`. Returns this replica's name, the status and the whole body."""
        async with aclosing(self.handle([], *request)) as parts:
            status, _ = await anext(parts)
            body = b"".join([piece async for piece in parts])
        return serve.get_replica_context().replica_id.unique_id, status, body

    async def check_health(self) -> None:
        """Raise an error if the engine has failed permanently, or makes no progress. Ray then starts another
        replica."""
        problem = self._host.problem
        if problem is not None and not isinstance(self._host.state, Loading):
            raise RuntimeError(problem)

    def __del__(self) -> None:
        if hasattr(self, "_life"):
            self._life.cancel()  # it would start the engine again
            self._host.close()


async def _answer(app: Any, scope: Message, body: bytes) -> AsyncGenerator[Message, None]:
    """Run an application on one request, and yield its answer. If the reader stops reading, the request ends."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()  # a client that leaves cancels the request
        return parts.pop()

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            with suppress(asyncio.CancelledError):
                await messages.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        task.cancel()
        while not task.done():
            while not messages.empty():  # what the application still sends is not read
                messages.get_nowait()
            await asyncio.wait({task}, timeout=LOOK_SECONDS)


class Ingress:
    """Takes requests from Ray's HTTP proxies. `engines`: the handle of the deployment of replicas."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines.options(stream=True)
        self._numbers: dict[str, int] = {}  # of replicas, in metrics

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        headers: Headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        found = dict(headers)
        tenant = found.get(b"authorization", b"") + found.get(b"x-api-key", b"")
        blocks = await asyncio.to_thread(body_blocks, body, tenant) if len(body) > LONG_BODY else \
            body_blocks(body, tenant)
        path = request.scope["path"]
        asked = request.method, path, request.scope["query_string"], headers, body
        if (reason := REFUSED.get(path)) is not None:
            return Response(json.dumps(ApiError(400, reason).body_for(path)), 400, media_type="application/json")
        if path == "/metrics" or path in ADMIN_PATHS:
            return await self._ask_all(path, asked)
        for _ in range(1 + MOST_DEATHS):
            answer = self._engines.handle.remote(blocks, *asked)
            try:
                status, kept = await anext(answer)
            except RayError as error:
                log.error("a replica was lost while it served a request, which is sent to another one: %s", error)
                continue
            except BaseException:
                answer.cancel()
                raise
            response = StreamingResponse(_pieces(answer, path, kept), status)
            response.raw_headers = kept
            return response
        died = ApiError(503, DIED, retry_after=5)
        return Response(json.dumps(died.body_for(path)), 503, died.headers, "application/json")

    async def _ask_all(self, path: str, asked: tuple[Any, ...]) -> Response:
        """Send a request to every replica, for routes that concern all of them."""
        answers = await asyncio.to_thread(self._engines.broadcast("answer_whole", *asked).results)
        if path != "/metrics" or any(status != 200 for _, status, _ in answers):
            status, _, body = joined_answer([(status, body) for _, status, body in answers])
            return Response(body, status, media_type="application/json")
        pages = {self._numbers.setdefault(name, len(self._numbers)): body.decode() for name, _, body in answers}
        return Response(joined_metrics(pages, {}), media_type="text/plain; version=0.0.4")


async def _pieces(answer: Any, path: str, headers: Headers) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in answer:
            yield piece
    except RayError as error:
        log.error("a replica was lost while it streamed an answer: %s", error)
        if not dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        told = ApiError(503, DIED)
        yield b"event: error\n" + event(told.body_for(path)) if path.startswith("/v1/messages") else \
            event(told.body) + DONE
    finally:
        answer.cancel()
