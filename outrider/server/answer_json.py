"""Writes large answers as JSON in a thread. Each call of the JSON encoder gets a small slice of the answer.

No other thread runs during a call of the encoder, and the log-probabilities of a few thousand tokens take it a second.
Parts that several choices of an answer share, such as log-probabilities of their prompt, are written and kept once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from outrider.server.work import compact, quoted

LONG_ANSWER = 2000  # token ids and log-probabilities of an answer that is written in a thread
SLICE = 64  # items of a list that one call of the encoder writes
DEPTH = 4  # levels of objects and lists whose values are written one by one
BLOCK = 1 << 16  # bytes that are sent at once


class Written(list[bytes]):
    """JSON text of a value, in pieces of bytes. It is inserted wherever an answer repeats the value, so that the value
    is encoded once."""

    @classmethod
    def from_value(cls, value: Any) -> Written:
        return cls(_blocks(_parts(value, DEPTH)))

    def extended(self, more: list[Any]) -> Written:
        """Return the JSON of a longer list: the items of this list, then the items of `more`."""
        parts = _parts(more, DEPTH)
        if self == [b"[]"]:
            return Written(parts)
        if not more:
            return self
        return Written([*self[:-1], self[-1][:-1] + b",", parts[0][1:], *parts[1:]])


async def write_answer(make: Callable[[], dict[str, Any]], num_values: int) -> list[bytes]:
    """Call `make` for the answer, and write the answer as JSON. Runs in a thread if `num_values`, the number of token
    ids and log-probabilities in the answer, is large."""
    def work() -> list[bytes]:
        return _blocks(_parts(make(), DEPTH))

    return await asyncio.to_thread(work) if num_values > LONG_ANSWER else work()


def _parts(value: Any, depth: int) -> list[bytes]:
    match value:
        case Written():
            return value
        case dict() if value and depth:
            parts: list[bytes] = []
            for name, each in value.items():
                parts += [b"," if parts else b"{", quoted(name).encode(), b":", *_parts(each, depth - 1)]
            return [*parts, b"}"]
        case [dict() | list(), *_] if depth:
            parts = []
            for each in value:
                parts += [b"," if parts else b"[", *_parts(each, depth - 1)]
            return [*parts, b"]"]
        case list() if value:
            slices = (value[start : start + SLICE] for start in range(0, len(value), SLICE))
            return [b"[", b",".join(compact(each)[1:-1].encode() for each in slices), b"]"]
    return [compact(value).encode()]


def _blocks(parts: Iterable[bytes]) -> list[bytes]:
    """Join short pieces of JSON into blocks, because each block is sent separately. Long pieces are not copied."""
    blocks: list[bytes] = []
    short: list[bytes] = []
    size = 0
    for part in parts:
        if len(part) < BLOCK:
            short.append(part)
            size += len(part)
        if len(part) >= BLOCK or size >= BLOCK:
            blocks.append(b"".join(short))
            short, size = [], 0
        if len(part) >= BLOCK:
            blocks.append(part)
    blocks.append(b"".join(short))
    return [block for block in blocks if block]
