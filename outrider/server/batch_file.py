"""Batches of requests in OpenAI's file format: each line is a request, answered by the server's own routes.

Answers are in the order of the lines, and every line gets one, even an invalid line. Only as many lines are in memory
as may run at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import IO, Any, Literal, NamedTuple

from pydantic import ValidationError
from starlette.types import ASGIApp, Message

from outrider.core.fields import did_you_mean, shown
from outrider.server.body_errors import bad_body
from outrider.server.errors import INTERNAL, ApiError
from outrider.server.protocol import Body
from outrider.server.service import new_id
from outrider.server.work import compact

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/score", "/v1/score_tokens",
        "/v1/rerank", "/rerank", "/v2/rerank", "/v1/responses")
log = logging.getLogger("outrider")


class BatchLine(Body):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class LineAnswer(NamedTuple):
    is_error: bool
    json: bytes


def read_lines(file: IO[bytes], max_bytes: int) -> Iterator[bytes | None]:
    """Read the lines that are not empty. A line longer than `max_bytes` is not kept and yields None."""
    while line := file.readline(max_bytes + 1):
        is_long = len(line) > max_bytes
        while is_long and line and not line.endswith(b"\n"):
            line = file.readline(max_bytes + 1)
        if is_long or line.strip():
            yield None if is_long else line


async def answer_lines(app: ASGIApp, lines: Iterable[bytes | None],
                       max_at_once: int) -> AsyncGenerator[LineAnswer, None]:
    running: deque[asyncio.Task[LineAnswer]] = deque()
    try:
        for line in lines:
            running.append(asyncio.create_task(_answer(app, line)))
            while running and (len(running) >= max_at_once or running[0].done()):
                yield await running[0]
                running.popleft()
            await asyncio.sleep(0)  # the line's task begins
        while running:
            yield await running[0]
            running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(app: ASGIApp, line: bytes | None) -> LineAnswer:
    custom_id, request_id = None, new_id("batch_req")
    try:
        given = _parsed(line)
        custom_id = given.get("custom_id")
        read = _read(given)
        status, answer = await _call(app, read.url, json.dumps(read.body).encode(), request_id)
    except ApiError as error:
        status, answer = error.status, compact(error.body).encode()
    head = {"id": request_id, "custom_id": custom_id if isinstance(custom_id, str) else None}
    response = compact({"status_code": status, "request_id": request_id})[:-1].encode() + b',"body":' + answer + b"}"
    problem = b"null" if status == 200 else compact(json.loads(answer)["error"]).encode()
    return LineAnswer(status != 200, compact(head)[:-1].encode() + b',"response":' + response + b',"error":' + problem
                      + b"}\n")


def _parsed(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise ApiError(413, "the line is too long: shorten it, or raise --max-body-bytes")
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise ApiError(400, "the line is not valid JSON: write one JSON object a line") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the line is not a JSON object: write one a line")
    return given


def _read(given: dict[str, Any]) -> BatchLine:
    try:
        line = BatchLine.model_validate(given)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise bad_body(problems, given) from None
    if line.url not in URLS:
        raise ApiError(400, f"there is no url {shown(line.url)} in a batch{did_you_mean(line.url, URLS)}", param="url")
    if line.body.get("stream"):
        raise ApiError(400, "answers of a batch cannot be streamed: leave out stream", param="stream")
    return line


async def _call(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """Call the application with one request, and return the status and body of its answer."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, []

    async def receive() -> Message:
        if not unread:
            await asyncio.get_running_loop().create_future()  # until it is cancelled: this client stays
        return unread.pop()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
             "client": None, "server": None}
    try:
        await app(scope, receive, send)
    except Exception as error:  # the application has answered, if it could, and raises it again for its server
        log.error("a line of the batch failed: %s", error)
    return status, b"".join(parts) or compact(ApiError(500, INTERNAL).body).encode()
