"""Large bodies: read as JSON and checked in a thread and in pieces, so that no stream waits for them.

The JSON parser holds the interpreter until it is done, in any thread, and a list of a million token ids takes it a
tenth of a second or more. So long lists are cut into slices, between which other threads run. A body with too many
other values is refused before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from outrider.server.body_errors import MAX_PROBLEMS
from outrider.server.body_values import are_in_texts, count_values
from outrider.server.errors import ApiError
from outrider.server.guard import BODILESS_METHODS
from outrider.server.protocol import NaturalNumbers
from outrider.server.work import CLIENT

LARGE = 1 << 14  # bytes of a body that is read in a thread
SLICE = 1 << 15  # bytes that are read at once: half a millisecond or so
IN_NUMBERS = b"0123456789, \t\r\n"  # what a list of natural numbers is written with, beside its brackets
MAX_VALUES = 100_000  # lists, objects and their items in a body, beside long lists of token ids
MAX_NUMBERS = 1 << 21  # in long lists of token ids, all together
MOST_READ = 100  # items of a list or an object, of a body with more mistakes than are looked at
IS_LARGE: ContextVar[bool] = ContextVar("whether the body of the request being served is large", default=False)
Made = TypeVar("Made")
Checked = TypeVar("Checked", bound=BaseModel)


async def beside_loop(work: Callable[[], Made]) -> Made:
    """Do work that takes longer the larger the body is. Large bodies are worked on in a thread."""
    return await asyncio.to_thread(work) if IS_LARGE.get() else work()


class BodyRequest(Request):
    """A request whose large body does not hold up the event loop while it is read and checked."""

    async def read_large(self, kind: Any) -> None:
        """Read a large body. kind: the type of the whole body."""
        body = await self.body()
        CLIENT.set(self.receive)
        if len(body) >= LARGE:
            IS_LARGE.set(True)
            self._json = await asyncio.to_thread(lambda: _read(body, kind))


class BodyRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation

        async def with_body(request: Request) -> Response:
            own = BodyRequest(request.scope, request.receive)
            if own.method not in BODILESS_METHODS:
                await own.read_large(kind)
            return await handle(own)

        return with_body


def _read(body: bytes, kind: Any) -> Any:
    """Read the body and check it as the type that its route takes."""
    try:
        parsed = parse_bounded(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return parsed
    return validated(kind, parsed)


def validated(kind: type[Checked], parsed: Any) -> Checked:
    """Return the body as its type, or raise the error that FastAPI reports. Pydantic lists all mistakes at once, which
    takes half a second for a hundred thousand of them. If there are so many, only the beginnings of lists and
    objects are checked."""
    try:
        try:
            return kind.model_validate(parsed)
        except ValidationError as error:
            if (count := error.error_count()) <= MAX_PROBLEMS:
                raise
        kind.model_validate(_beginning(parsed))
        raise ApiError(400, f"the body has {count} mistakes, none of them in the first {MOST_READ} items of a list")
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(problems, body=parsed) from None


def _beginning(parsed: Any) -> Any:
    """Return `parsed` with only the first items of every list and object."""
    match parsed:
        case list():
            return [_beginning(part) for part in parsed[:MOST_READ]]
        case dict():
            return {name: _beginning(part) for name, part in islice(parsed.items(), MOST_READ)}
    return parsed


def parse_bounded(body: bytes) -> Any:
    """See `json.loads`. Raise ApiError for a body with so many values that it would hold up other requests."""
    num_numbers, end, others = 0, 0, list[bytes]()
    for first, last in _numeric_lists(body):
        num_numbers += body.count(b",", first, last)
        others.append(body[end:first])
        end = last
    if num_numbers > MAX_NUMBERS:
        raise ApiError(413, f"the body has more than {MAX_NUMBERS} token ids")
    if count_values(b"".join([*others, body[end:]]), MAX_VALUES) > MAX_VALUES:
        raise ApiError(413, f"the body has more than {MAX_VALUES} values: objects, lists and their items, beside lists "
                            "of token ids")
    return parse_large(body)


def parse_large(body: bytes) -> Any:
    """See `json.loads`. Long lists of natural numbers are read separately, and a mark stands in their place
    meanwhile."""
    pieces: list[bytes] = []
    lists: dict[str, list[int]] = {}
    end = 0  # end of the part of the body that is in `pieces`
    for first, last in _numeric_lists(body):
        mark = secrets.token_hex(16)  # random: no body contains it already
        lists[mark] = _parse_numbers(body[first:last])
        pieces += [body[end:first], json.dumps(mark).encode()]
        end = last
    return _with_lists(json.loads(b"".join([*pieces, body[end:]])), lists)


def _numeric_lists(body: bytes) -> list[tuple[int, int]]:
    """Find the runs of numbers that are whole lists, between brackets and outside texts."""
    runs = [(first, last) for first, last in _numeric_runs(body)
            if body[first - 1 : first] == b"[" and body[last : last + 1] == b"]"]
    in_texts = are_in_texts(body, [first for first, _ in runs])
    return [run for run, is_in_text in zip(runs, in_texts, strict=True) if not is_in_text]


def _numeric_runs(body: bytes) -> list[tuple[int, int]]:
    """Find the runs of IN_NUMBERS that are longer than a few slices."""
    runs: list[tuple[int, int]] = []
    for start in range(0, len(body), SLICE):
        if body[start : start + SLICE].translate(None, IN_NUMBERS):
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + SLICE)
        else:
            runs.append((start, start + SLICE))
    widened = []
    for first, last in runs:  # to the brackets, which are less than a slice away
        before, after = body[max(0, first - SLICE) : first], body[last : last + SLICE]
        first -= len(before) - len(before.rstrip(IN_NUMBERS))
        last = min(last, len(body)) + len(after) - len(after.lstrip(IN_NUMBERS))
        widened.append((first, last))
    return widened


def _parse_numbers(text: bytes) -> list[int]:
    numbers = NaturalNumbers()
    start = 0
    while start < len(text):
        end = len(text) if start + SLICE >= len(text) else text.rfind(b",", start, start + SLICE)
        if end < 0:
            raise ValueError("a number of thousands of digits")
        piece = json.loads(b"[" + text[start:end] + b"]")
        if not piece:
            raise ValueError("a comma with no number before or behind it")
        numbers += piece
        start = end + 1
        if start == len(text):
            raise ValueError("a comma with no number behind it")
    return numbers


def _with_lists(parsed: Any, lists: dict[str, list[int]]) -> Any:
    """Replace the marks in `parsed` by their lists."""
    match parsed:
        case [str() as mark] if mark in lists:
            return lists[mark]
        case list():
            return [_with_lists(part, lists) for part in parsed]
        case dict():
            return {name: _with_lists(part, lists) for name, part in parsed.items()}
    return parsed
