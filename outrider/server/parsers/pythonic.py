"""Calls written as a Python list: `[f(a=1), g(b="x")]`. An argument is yielded when it is whole."""

from __future__ import annotations

import ast
import re
from typing import Any

from outrider.server.parsers.cursor import Cursor, Waiting
from outrider.server.parsers.machine import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallReader,
    CallRegion,
    ReadCalls,
    Schemas,
    json_text,
)

_NAME = re.compile(r"[\w.-]+")
_PLAIN = re.compile(r"""[^"'()\[\]{},]+""")
_ANY = re.compile(r"[\s\S]")
_JSON_WORDS = {"true": True, "false": False, "null": None}


def calls(end: str = "", *, is_list: bool = True, first: str = "[") -> ReadCalls:
    """Make a reader of calls. It reads up to the list's closing bracket, or up to the marker `end` if each line is one
    call."""

    def read(cursor: Cursor, schemas: Schemas) -> CallReader:
        yield from cursor.skip_space()
        if first:
            yield from cursor.needs(first)
        while True:
            yield from cursor.skip_space()
            yield from _read_call(cursor)
            yield from cursor.skip_space()
            yield from cursor.takes(",")
            yield from cursor.skip_space()
            if (yield from cursor.takes("]" if is_list else end)):
                break
        if end and is_list:
            yield from cursor.skip_space()
            yield from cursor.takes(end)

    return read


def _read_call(cursor: Cursor) -> CallReader:
    name = yield from cursor.while_matches(_NAME)
    yield from cursor.needs("(")
    if not name or name[0].isdigit():
        raise ValueError("the text is not a tool call")
    before = "{"
    yield from cursor.skip_space()
    is_closed = yield from cursor.takes(")")
    yield CallBegin(name)
    while not is_closed:
        key = yield from cursor.while_matches(_NAME)
        yield from cursor.skip_space()
        yield from cursor.needs("=")
        if not key:
            raise ValueError("an argument has no name")
        text, end = yield from _expression(cursor)
        yield CallArguments(f"{before}{json_text(key)}: {json_text(_value(text))}")
        before = ", "
        yield from cursor.skip_space()
        is_closed = end == ")" or (yield from cursor.takes(")"))
    yield CallArguments("{}" if before == "{" else "}")
    yield CallEnd()


def _expression(cursor: Cursor) -> Waiting[tuple[str, str]]:
    """Read the text of an expression, and the comma or bracket that follows."""
    pieces: list[str] = []
    depth = 0
    while True:
        pieces.append((yield from cursor.while_matches(_PLAIN)))
        char = yield from cursor.char()
        if not char:
            raise ValueError("an expression has no end")
        cursor.match(_ANY)
        if depth == 0 and char in ",)":
            return "".join(pieces), char
        pieces.append(char)
        if char in "\"'":
            pieces.append((yield from _string(cursor, char)))
        depth += (char in "([{") - (char in ")]}")


def _string(cursor: Cursor, quote: str) -> Waiting[str]:
    """Read the rest of a string after its opening quote."""
    pieces = []
    while True:
        text, marker = yield from cursor.until(quote, "\\")
        if marker is None:
            raise ValueError("a string has no end")
        pieces += [text, marker]
        if marker == quote:
            return "".join(pieces)
        pieces.append((yield from cursor.char()))
        cursor.match(_ANY)


def _value(text: str) -> Any:
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError("the text is not a value") from error


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    return ast.literal_eval(node)


PYTHONIC = (CallRegion("<|python_start|>", calls("<|python_end|>"), only_first=True),
            CallRegion("[", calls(first=""), only_first=True))
LFM2 = (CallRegion("<|tool_call_start|>", calls("<|tool_call_end|>")),)
OLMO3 = (CallRegion("<function_calls>", calls("</function_calls>", is_list=False, first="")),)
