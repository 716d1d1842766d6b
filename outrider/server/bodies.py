"""Reads and checks large JSON bodies in a thread and in pieces, so that no stream waits for them.

A body with too many values is refused before it is parsed. The largest bodies of one tenant are read one after another:
Python runs one thread at a time, so further threads would only delay the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from itertools import islice
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from outrider.server.body_errors import MAX_PROBLEMS
from outrider.server.body_json import numeric_lists, parse_parts
from outrider.server.body_values import COMMA, count_byte, count_values
from outrider.server.errors import ApiError
from outrider.server.guard import BODILESS_METHODS
from outrider.server.work import CLIENT

LARGE = 1 << 14  # bytes of a body that is read in a thread
HUGE = 1 << 18  # bytes of a body that takes turns with others of its tenant
READERS = "large_body_readers"  # in the application's state: the threads for these
MAX_VALUES = 100_000  # lists, objects and their items in a body, beside long lists of token ids
MAX_NUMBERS = 1 << 21  # in long lists of token ids, all together
MOST_READ = 100  # items of a list or an object, of a body with more mistakes than are looked at
IS_LARGE: ContextVar[bool] = ContextVar("whether the body of the request being served is large", default=False)
Made = TypeVar("Made")
Checked = TypeVar("Checked", bound=BaseModel)


async def beside_loop(work: Callable[[], Made]) -> Made:
    """Call `work`, whose time grows with the size of the request's body. For a large body it runs in a thread, so that
    the event loop is not blocked."""
    return await asyncio.to_thread(work) if IS_LARGE.get() else work()


class BodyRequest(Request):
    """A request whose body, if it is large, is read and checked without blocking the event loop."""

    async def read_large(self, kind: Any) -> None:
        """Read a large body. kind: the type of the whole body."""
        body = await self.body()
        CLIENT.set(self.receive)
        if len(body) >= LARGE:
            IS_LARGE.set(True)
            readers = getattr(self.app.state, READERS) if len(body) >= HUGE else None
            self._json = await asyncio.get_running_loop().run_in_executor(
                readers, copy_context().run, _read, body, kind)


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
    """Parse the body, and check it as the type that its route takes."""
    try:
        parsed = parse_bounded(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON") from None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return parsed
    return validated(kind, parsed)


def validated(kind: type[Checked], parsed: Any) -> Checked:
    """Return a parsed body as a `kind`, or raise the error that FastAPI reports. Pydantic lists all errors at once,
    which takes half a second for a hundred thousand errors. If there are more than MAX_PROBLEMS, only errors in the
    first items of lists and objects are listed."""
    try:
        try:
            return kind.model_validate(parsed)
        except ValidationError as error:
            if (count := error.error_count()) <= MAX_PROBLEMS:
                raise
        kind.model_validate(_beginning(parsed))
        raise ApiError(400, f"the body has {count} mistakes, all of them beyond the first {MOST_READ} items of its "
                            "lists: send shorter lists to see which")
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
    """Parse JSON like `json.loads`. Raises ApiError for a body whose number of values would delay other requests."""
    num_numbers, end, others = 0, 0, list[bytes]()
    lists = numeric_lists(body)
    for first, last in lists:
        num_numbers += count_byte(body, COMMA, first, last)
        others.append(body[end:first])
        end = last
    if num_numbers > MAX_NUMBERS:
        raise ApiError(413, f"the body has more than {MAX_NUMBERS} token ids: send fewer")
    if count_values(b"".join([*others, body[end:]]), MAX_VALUES) > MAX_VALUES:
        raise ApiError(413, f"the body has more than {MAX_VALUES} values: objects, lists and their items, beside lists "
                            "of token ids: send fewer")
    return parse_parts(body, lists)
