"""Large bodies: read as JSON in a thread and in pieces, so that no stream waits for them.

The JSON parser keeps the interpreter to itself until it is done, in whatever thread it runs, and a list of a million
token ids takes it a tenth of a second and more. A long list is cut into slices, between which other threads run.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

LARGE = 1 << 17  # bytes of a body that is read in a thread
SLICE = 1 << 15  # bytes that are read at once: half a millisecond or so
IN_NUMBERS = b"0123456789, \t\r\n"  # what a list of natural numbers is written with, beside its brackets


class BodyRequest(Request):
    """A request whose large body does not hold up the event loop while it is read."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json = json.loads(body) if len(body) < LARGE else await asyncio.to_thread(parse_large, body)
        return self._json


class BodyRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def with_body(request: Request) -> Response:
            return await handle(BodyRequest(request.scope, request.receive))

        return with_body


def parse_large(body: bytes) -> Any:
    """As `json.loads`. Long lists of natural numbers are read apart, with a mark in their place meanwhile."""
    pieces: list[bytes] = []
    lists: dict[str, list[int]] = {}
    end = 0  # end of the part of the body that is in `pieces`
    for first, last in _numeric_runs(body):
        numbers = body[first:last]
        if first > end and body[first - 1 : first] == b"[" and body[last : last + 1] == b"]":
            mark = secrets.token_hex(16)  # random: no body contains it already
            try:
                lists[mark] = _parse_numbers(numbers)
            except ValueError:
                return json.loads(body)  # which says what is wrong, and where
            pieces += [body[end:first], json.dumps(mark).encode()]
            end = last
    try:
        parsed = json.loads(b"".join([*pieces, body[end:]]))
    except ValueError:  # no JSON, or the numbers are part of a text, which the quotes of a mark end
        return json.loads(body)
    return _with_lists(parsed, lists)


def _numeric_runs(body: bytes) -> list[tuple[int, int]]:
    """Places of the runs of IN_NUMBERS that are longer than a few slices."""
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
    numbers: list[int] = []
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
    """`parsed` with the lists in the places of their marks."""
    match parsed:
        case [str() as mark] if mark in lists:
            return lists[mark]
        case list():
            return [_with_lists(part, lists) for part in parsed]
        case dict():
            return {name: _with_lists(part, lists) for name, part in parsed.items()}
    return parsed
