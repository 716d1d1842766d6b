"""The guard in front of all routes: it checks host names, API keys, and the size and time of bodies, and gives every
answer an id.

A key is compared with every known key in constant time, so that timing reveals neither a key nor its position in the
list. The key of the request is stored in the ASGI scope. It salts the prefix cache, so that a tenant cannot learn from
prefix hits about other tenants' prompts. An answer has the client's `X-Request-Id` or a new one, and the request's log
line has it too. The guard is plain ASGI without a framework."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from outrider.core.fields import shown
from outrider.server.body_turns import TURN_BYTES, BodyTurns
from outrider.server.errors import ApiError
from outrider.server.fair_threads import CURRENT_TENANT
from outrider.server.held_bodies import HeldBodies, HeldBody
from outrider.server.host_names import HostNames, host_of
from outrider.server.logs import REQUEST_ID
from outrider.server.settings import ServerConfig
from outrider.server.tracing import TRACE_PARENT

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Served without a key: what load balancers ask, and pages that hold no data: the one at / asks for a key itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/", "/docs"})
# Routes whose bodies may have images.
IMAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
                         "/v1/messages/count_tokens", "/tokenize", "/invocations"})
BODILESS_METHODS = ("GET", "HEAD", "OPTIONS", "DELETE")  # their bodies are not read: no route uses them
BODY_SECONDS = 60.0  # for a client to send its body
# What is read of a body that is refused: a client that is still sending when the connection closes gets no answer.
UNREAD_BYTES = 1 << 28
JOINED_IN_LOOP = 1 << 18  # bytes
# Bytes of an answer that are sent at once. The connection copies what its client has not read, so that clients that
# ask for a large answer and do not read it would each hold a copy of all of it.
PIECE_BYTES = 1 << 16
UNREAD_IDLE_SECONDS = 1.0  # without a further piece
IS_READ = "outrider.body_is_read"  # in the scope: nothing of the body is left to be read
TENANT = "outrider.tenant"  # in the scope: a digest of the key that was used, or None
REQUEST_ID_HEADER = "X-Request-Id"
CACHE_SESSION: ContextVar[str | None] = ContextVar("cache session", default=None)  # X-Cache-Session
IGNORED_HEADER = "X-Outrider-Ignored"  # fields of the body that had no effect
EXPOSED_HEADERS = (REQUEST_ID_HEADER, IGNORED_HEADER)  # headers of answers that web pages of other origins may read
REQUEST_ID_FORM = re.compile(rb"[!-~]{1,128}")  # letters, digits and signs: nothing that would break a log line


def guard_options(config: ServerConfig) -> dict[str, Any]:
    """Return the guard's arguments, which are the same for a server of one engine and for the front of several
    replicas."""
    return {"keys": config.api_key, "max_body_bytes": config.max_body_bytes, "hosts": HostNames.from_config(config),
            "image_bytes": config.image_body_bytes}


class Guard:
    def __init__(self, app: App, *, keys: Sequence[str], max_body_bytes: int, hosts: HostNames | None = None,
                 image_bytes: int = 0, takes_images: Callable[[], bool] = lambda: True,
                 on_refused: Callable[[int], None] | None = None, secret: bytes | None = None) -> None:
        """hosts: the host names that the server answers to; None for all names. image_bytes: how much larger bodies
        with images may be, while the server `takes_images`. on_refused: called with the status of every answer that
        refuses a request. secret: names of tenants are derived from it and from keys; by default it is drawn anew."""
        self._app, self._hosts, self._on_refused = app, hosts, on_refused
        self._secret = secret or secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]
        self._max_body_bytes = max_body_bytes
        self._image_bytes, self._takes_images = image_bytes, takes_images
        self._bodies = HeldBodies(max_body_bytes, image_bytes)
        self._turns = BodyTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        TRACE_PARENT.set(_header(scope, b"traceparent").decode("latin-1") or None)
        CACHE_SESSION.set(_header(scope, b"x-cache-session").decode("latin-1") or None)
        given = _header(scope, b"x-request-id")
        is_wrong = bool(given) and not REQUEST_ID_FORM.fullmatch(given)
        request_id = uuid4().hex if is_wrong or not given else given.decode("ascii")
        scope[REQUEST_ID_HEADER] = request_id
        REQUEST_ID.set(request_id)
        asks = scope["method"] not in BODILESS_METHODS and scope["path"] not in OPEN_PATHS
        body = HeldBody(self._bodies)
        if asks:
            receive = self._paced(scope, receive)
        send = _with_header(send, b"x-request-id", request_id.encode("ascii"), self._on_refused if asks else None,
                            body.release)
        try:
            await self._serve(scope, receive, send, is_wrong, body)
        finally:
            body.release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, is_wrong: bool, body: HeldBody) -> None:
        try:
            if is_wrong:
                raise ApiError(400, "X-Request-Id must have from 1 to 128 characters: letters, digits and signs, "
                                    "without spaces")
            self._check_host(scope)
            scope[TENANT] = None if scope["path"] in OPEN_PATHS else self._tenant(scope)
            CURRENT_TENANT.set(scope[TENANT])
            receive = await self._with_body(scope, receive, body)
        except ApiError as error:
            await send_error(send, scope["path"], error, _unread(scope, receive))
            return
        except ConnectionResetError:
            return  # the client left while it sent its body
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Refuse unknown host names. A request without the header is served: browsers always send the header."""
        if self._hosts is None:
            return
        for name, value in scope["headers"]:
            if name == b"host" and value.strip() and not self._hosts.allows(value.decode("latin-1")):
                asked, missing = host_of(value.decode("latin-1")), "" if self._digests else " without an API key"
                raise ApiError(403, f"this server{missing} does not answer to the name {shown(asked)}: use localhost "
                                    "or an IP address, or start the server with --allowed-hosts and this name")

    def _tenant(self, scope: Scope) -> str | None:
        if not self._digests:
            return None
        given = self._digest(_given_key(scope))
        # All of them, always: which one matched must not show in the time.
        if not any([hmac.compare_digest(given, known) for known in self._digests]):
            raise ApiError(401, "a valid API key is needed: send it as Authorization: Bearer KEY")
        return given.hex()[:16]

    def _digest(self, key: bytes) -> bytes:
        """Return the digest of a key. Digests have equal length, as compare_digest needs, and depend on a secret of
        this process, so that a leaked digest reveals nothing about its key."""
        return hmac.digest(self._secret, key, "sha256")

    def _paced(self, scope: Scope, receive: Receive) -> Receive:
        """Wrap the receive function of a request, so that its body takes turns with other bodies of the same tenant.
        All clients without a key count as one tenant."""
        num_bytes = 0  # since the last turn

        async def receive_in_turn() -> Message:
            nonlocal num_bytes
            if num_bytes >= TURN_BYTES:
                num_bytes = 0
                await self._turns.wait(scope.get(TENANT) or "")
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message

        return receive_in_turn

    async def _with_body(self, scope: Scope, receive: Receive, held: HeldBody) -> Receive:
        """Read the whole body, within the limits, before the route sees it. On paths that need no key the route sees
        an empty body, because anyone could fill the memory there."""
        if scope["method"] in BODILESS_METHODS or scope["path"] in OPEN_PATHS:
            return _replay(b"", receive)
        declared, most = _header(scope, b"content-length"), self._most_bytes(scope["path"])
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive, held, scope[TENANT], most)
        except TimeoutError:
            scope[IS_READ] = True  # nothing more comes
            raise ApiError(408, f"the request's body did not arrive within {BODY_SECONDS:g} seconds: send it "
                                "again") from None
        scope[IS_READ] = True
        if body:
            _check_kind(scope)
        return _replay(body, receive)

    async def _read(self, receive: Receive, held: HeldBody, tenant: str | None, most: int) -> bytes:
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            held.add(tenant, len(chunks[-1]))
            if size > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                # Joining the pieces of 16 MB takes 10 ms.
                return b"".join(chunks) if size < JOINED_IN_LOOP else await asyncio.to_thread(b"".join, chunks)

    def _most_bytes(self, path: str) -> int:
        """Return the most bytes that the body of a route may have."""
        return self._max_body_bytes + (self._image_bytes if path in IMAGE_PATHS and self._takes_images() else 0)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Make a receive function that gives the route this body as a whole, and then what `receive` gives."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    del body  # the route alone decides how long it is kept

    async def replay() -> Message:
        return parts.pop() if parts else await receive()

    return replay


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request's body exceeds {most} bytes: send less")


class RootPath:
    """Serves all routes also under a proxy's prefix, whether the proxy removes the prefix or not."""

    def __init__(self, app: App, *, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith(f"{self._prefix}/"):
            scope["path"] = scope["path"].removeprefix(self._prefix)
        await self._app(scope, receive, send)


def _with_header(send: Send, name: bytes, value: bytes, on_refused: Callable[[int], None] | None,
                 on_start: Callable[[], None]) -> Send:
    def send_with(message: Message) -> Awaitable[None]:  # no coroutine of its own: it is called for every event
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (name, value)]
            on_start()
            if on_refused is not None and (400 <= message["status"] < 500 or message["status"] == 503):
                on_refused(message["status"])
        elif len(message.get("body", b"")) > PIECE_BYTES:
            return _send_pieces(send, message)
        return send(message)

    return send_with


async def _send_pieces(send: Send, message: Message) -> None:
    """Send a part of a body in pieces, each when the connection has room for it."""
    body = message["body"]
    for start in range(0, len(body), PIECE_BYTES):
        more_body = start + PIECE_BYTES < len(body) or message.get("more_body", False)
        await send({**message, "body": body[start : start + PIECE_BYTES], "more_body": more_body})


async def send_error(send: Send, path: str, error: ApiError, unread: Awaitable[None] | None = None) -> None:
    """Send an error. unread: reads the rest of the request's body, which must happen before the connection closes."""
    body = json.dumps(error.body_for(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               *((name.lower().encode(), value.encode()) for name, value in error.headers.items())]
    if error.status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body was not read
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": unread is not None})
    if unread is not None:
        await unread
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unread(scope: Scope, receive: Receive) -> None:
    """Read the rest of a body and drop it. If its declared length exceeds the limit, it is not read."""
    declared, left = _header(scope, b"content-length"), UNREAD_BYTES
    if scope["method"] in BODILESS_METHODS or scope.get(IS_READ) or (declared.isdigit() and int(declared) > left):
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_SECONDS):
            while left > 0:
                async with asyncio.timeout(UNREAD_IDLE_SECONDS):
                    message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _check_kind(scope: Scope) -> None:
    """Refuse bodies that are not plain JSON. The framework would not parse bodies of other content types as JSON."""
    kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
    if not kind.endswith((b"/json", b"+json")):
        raise ApiError(400, "send the body as JSON, with the header Content-Type: application/json")
    if _header(scope, b"content-encoding").strip().lower() not in (b"", b"identity"):
        raise ApiError(400, "compressed bodies are not read: send the body without Content-Encoding")


def _given_key(scope: Scope) -> bytes:
    """Return the key of a request, from `Authorization: Bearer` or from `x-api-key`, which Anthropic's clients send."""
    scheme, _, key = _header(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else _header(scope, b"x-api-key")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
