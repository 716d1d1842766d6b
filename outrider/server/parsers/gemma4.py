"""The call format of Gemma 4: `<|tool_call>call:F{k:<|"|>text<|"|>,n:42,a:[1,2],o:{x:true}}<tool_call|>`.

FunctionGemma uses the same format with other markers. Values are converted to JSON while they are read.
"""

from __future__ import annotations

import re

from outrider.server.parsers.cursor import Cursor
from outrider.server.parsers.machine import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallReader,
    CallRegion,
    ReadCalls,
    ReasoningRegion,
    Schemas,
    StrayEnd,
    json_text,
    read_json,
)

MAX_DEPTH = 64
_NAME = re.compile(r"[\w.:-]+")
_WORD = re.compile(r"[^,:{}\[\]<]+")


def calls(quote: str, end: str) -> ReadCalls:
    def read(cursor: Cursor, schemas: Schemas) -> CallReader:
        yield from cursor.skip_space()
        yield from cursor.needs("call:")
        name = yield from cursor.while_matches(_NAME)
        yield from cursor.skip_space()
        if not name or (yield from cursor.char()) != "{":
            raise ValueError("the text is not a tool call")
        yield CallBegin(name)
        yield from _value(cursor, quote, 0)
        yield CallEnd()
        yield from cursor.until(end)

    return read


def _value(cursor: Cursor, quote: str, depth: int) -> CallReader:
    if depth > MAX_DEPTH:
        raise ValueError("the arguments are nested too deep")
    yield from cursor.skip_space()
    if (yield from cursor.takes(quote)):
        yield from stream_text(cursor, quote)
    elif (yield from cursor.takes("{")):
        yield from _items(cursor, quote, "{", "}", depth)
    elif (yield from cursor.takes("[")):
        yield from _items(cursor, quote, "[", "]", depth)
    else:
        yield CallArguments(_word_value((yield from cursor.while_matches(_WORD)).strip()))


def _items(cursor: Cursor, quote: str, begin: str, end: str, depth: int) -> CallReader:
    yield CallArguments(begin)
    yield from cursor.skip_space()
    is_closed = yield from cursor.takes(end)
    while not is_closed:
        if end == "}":
            yield from cursor.skip_space()
            if (yield from cursor.takes(quote)):
                key = yield from cursor.until_needed(quote)
            else:
                key = (yield from cursor.while_matches(_WORD)).strip()
            yield from cursor.skip_space()
            yield from cursor.needs(":" if key else "a key")
            yield CallArguments(f"{json_text(key)}: ")
        yield from _value(cursor, quote, depth + 1)
        yield from cursor.skip_space()
        is_closed = yield from cursor.takes(end)
        if not is_closed:
            yield from cursor.needs(",")
            yield CallArguments(", ")
    yield CallArguments(end)


def _word_value(word: str) -> str:
    if not word:
        raise ValueError("the text is not a value")
    try:
        return json_text(read_json(word))
    except ValueError:
        return json_text(word)


def stream_text(cursor: Cursor, end: str) -> CallReader:
    """Read text up to a marker that must come, and write it as a JSON string."""
    yield CallArguments('"')
    while True:
        text, marker = cursor.piece(end)
        if text:
            yield CallArguments(json_text(text)[1:-1])
        if marker is not None:
            break
        if cursor.is_last:
            raise ValueError("a string has no end")
        yield None
    yield CallArguments('"')


GEMMA4_CALLS = (CallRegion("<|tool_call>", calls('<|"|>', "<tool_call|>")),)
FUNCTION_GEMMA = (CallRegion("<start_function_call>", calls("<escape>", "<end_function_call>")),)
GEMMA4_THOUGHTS = (ReasoningRegion("<|channel>thought\n", "<channel|>", stray_end=StrayEnd.DROPPED),
                   ReasoningRegion("<|channel>", "<channel|>", stray_end=StrayEnd.DROPPED))
