"""Formats with JSON arguments: Hermes and Qwen, Llama 3, Mistral, DeepSeek V3, Kimi K2, gpt-oss and others.

Arguments are yielded as the model writes them, and checked when they are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    read_json,
    whole_call,
)

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*')
_ANY = re.compile(r"[\s\S]")
_WORD = re.compile(r"[^\s,}\]]*")
_NAME = re.compile(r"[\w.:/-]+")
_BETWEEN = re.compile(r"[\s,;\]]*")
_BEFORE = re.compile(r"[\s\[]*")


class JsonValue:
    """Finds the end of a JSON object, list or string in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escapes = 0, False, False
        self.is_done = False

    def take(self, cursor: Cursor) -> str:
        """Take as much of the value's text as there is."""
        pieces = []
        while not self.is_done and not cursor.is_at_end:
            if not self._escapes:
                pieces.append(cursor.match(_IN_STRING if self._in_string else _OUTSIDE))
            char = cursor.match(_ANY)
            pieces.append(char)
            if self._escapes or (self._in_string and char == "\\"):
                self._escapes = not self._escapes
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += (char in ("{", "[")) - (char in ("}", "]"))
            self.is_done = bool(char) and self._depth <= 0 and not self._in_string
        return "".join(pieces)


def read_value(cursor: Cursor) -> Waiting[Any]:
    """Read one JSON value of any kind."""
    if (yield from cursor.char()) not in ("{", "[", '"'):
        return read_json((yield from cursor.while_matches(_WORD)))
    value, pieces = JsonValue(), []
    while not value.is_done:
        if cursor.is_at_end:
            if cursor.is_last:
                raise ValueError("a JSON value has no end")
            yield None
        pieces.append(value.take(cursor))
    return read_json("".join(pieces))


def read_arguments(cursor: Cursor) -> CallReader:
    """Read an object of arguments, and the end of its call."""
    if (yield from cursor.char()) != "{":
        raise ValueError("the arguments of a call must be a JSON object")
    value, pieces = JsonValue(), []
    while not value.is_done:
        piece = value.take(cursor)
        if piece:
            pieces.append(piece)
            yield CallArguments(piece)
        elif cursor.is_last:
            raise ValueError("the arguments of a call have no end")
        else:
            yield None
    json_text(read_json("".join(pieces)))
    yield CallEnd()


def read_call(cursor: Cursor, needs_arguments: bool) -> CallReader:
    """Read the rest of {"name": .., "arguments": {..}} after its first brace. Some models write "parameters" for
    "arguments", write the arguments as a string, or wrap the call as {"type": "function", "function": {..}}."""
    name: Any = None
    arguments: Any = None if needs_arguments else {}
    while True:
        yield from cursor.skip_space()
        if (yield from cursor.takes("}")):
            break
        if (yield from cursor.char()) != '"':
            raise ValueError("a key of a JSON object is missing")
        key = yield from read_value(cursor)
        yield from cursor.skip_space()
        yield from cursor.needs(":")
        yield from cursor.skip_space()
        if key == "function" and (yield from cursor.takes("{")):
            yield from read_call(cursor, needs_arguments)
            return (yield from _close(cursor))
        if key in ARGUMENTS and name is not None and (yield from cursor.char()) == "{":
            yield CallBegin(name)
            yield from read_arguments(cursor)
            return (yield from _close(cursor))
        value = yield from read_value(cursor)
        if key in NAMES:
            if not isinstance(value, str) or not value:
                raise ValueError("a call must have the name of its function")
            name = value
        elif key in ARGUMENTS:
            arguments = read_json(value) if isinstance(value, str) else value
        elif needs_arguments and name is None and key not in ("type", "id"):
            raise ValueError("this JSON is not a call")
        yield from cursor.skip_space()
        yield from cursor.takes(",")
    yield from whole_call(name, arguments)


def _close(cursor: Cursor) -> CallReader:
    """Read the closing brace of the object around a call's arguments. A model may forget this brace."""
    yield from cursor.skip_space()
    while (yield from cursor.takes(",")):
        yield from cursor.skip_space()
        if (yield from cursor.char()) != '"':
            return
        yield from read_value(cursor)
        yield from cursor.skip_space()
        yield from cursor.takes(":")
        yield from cursor.skip_space()
        yield from read_value(cursor)
        yield from cursor.skip_space()
    yield from cursor.takes("}")


def objects(end: str | None = None, first: str = "{", *, needs_arguments: bool = False) -> ReadCalls:
    """Make a reader of one call, a list of calls, or calls with semicolons between them. `end`: the marker that ends
    the region. `first`: the text that the region's marker has already taken from the first call."""

    def read(cursor: Cursor, schemas: Schemas) -> CallReader:
        if first:
            yield from cursor.while_matches(_BEFORE)
            yield from cursor.needs(first)
        yield from read_call(cursor, needs_arguments)
        while True:
            yield from cursor.while_matches(_BETWEEN)
            if not (yield from cursor.takes("{")):
                break
            yield from read_call(cursor, needs_arguments)
        if end is not None:
            yield from cursor.until(end)

    return read


def read_mistral(cursor: Cursor, schemas: Schemas) -> CallReader:
    """Read Mistral's calls: until version 10 a list of objects, later `F[ARGS]{..}` with the marker before each."""
    yield from cursor.skip_space()
    if (yield from cursor.char()) in ("[", "{"):
        return (yield from objects()(cursor, schemas))
    name = yield from cursor.while_matches(_NAME)
    yield from cursor.skip_space()
    if (yield from cursor.takes("[CALL_ID]")):
        yield from cursor.until_needed("[ARGS]")
    else:
        yield from cursor.takes("[ARGS]")
    yield from cursor.skip_space()
    yield from _named_call(name, cursor)


def _named_call(name: str, cursor: Cursor, call_id: str | None = None) -> CallReader:
    if not name or (yield from cursor.char()) != "{":
        raise ValueError("the text is not a tool call")
    yield CallBegin(name, call_id)
    yield from read_arguments(cursor)


def sections(call_begin: str, call_end: str, end: str,
             read_one: Callable[[Cursor], CallReader]) -> ReadCalls:
    """Make a reader of a list of calls. Each call is enclosed by the markers `call_begin` and `call_end`, and the list
    ends with the marker `end`."""

    def read(cursor: Cursor, schemas: Schemas) -> CallReader:
        num_calls = 0
        while (yield from cursor.until(call_begin, end))[1] == call_begin:
            yield from read_one(cursor)
            num_calls += 1
            if (yield from cursor.until(call_end, end))[1] != call_end:
                break
        if not num_calls:
            raise ValueError("the text is not a tool call")

    return read


def _read_deepseek(cursor: Cursor) -> CallReader:
    """Read V3's `function<sep>F` with a fenced object, or V3.1's `F<sep>{..}`."""
    name = yield from cursor.until_needed("<｜tool▁sep｜>")
    yield from cursor.skip_space()
    if (yield from cursor.char()) != "{":
        name = yield from cursor.until_needed("```json")
        yield from cursor.skip_space()
    yield from _named_call(name.strip(), cursor)


def _read_kimi(cursor: Cursor) -> CallReader:
    """Read `functions.F:0<begin>{..}`. The text before the marker is the call's id."""
    call_id = (yield from cursor.until_needed("<|tool_call_argument_begin|>")).strip()
    yield from cursor.skip_space()
    name = re.sub(r":\d+$", "", call_id).split(".")[-1]
    yield from _named_call(name, cursor, call_id)


def read_harmony(cursor: Cursor, schemas: Schemas) -> CallReader:
    """Read `F<|channel|>commentary <|constrain|>json<|message|>{..}<|call|>`. The last token may be missing, because it
    also ends the answer."""
    name = yield from cursor.while_matches(_NAME)
    yield from cursor.until_needed("<|message|>")
    yield from cursor.skip_space()
    if (yield from cursor.char()) == "{":
        yield from _named_call(name, cursor)
    else:
        yield from whole_call(name, {})
    yield from cursor.skip_space()
    yield from cursor.takes("<|call|>")


def read_apertus(cursor: Cursor, schemas: Schemas) -> CallReader:
    """Read `[{"F": {..}}, ..]`."""
    yield from cursor.while_matches(_BEFORE)
    yield from cursor.needs("{")
    while True:
        yield from cursor.skip_space()
        if (yield from cursor.char()) != '"':
            raise ValueError("the name of the function is missing")
        name = yield from read_value(cursor)
        yield from cursor.skip_space()
        yield from cursor.needs(":")
        yield from cursor.skip_space()
        yield from _named_call(name, cursor)
        yield from _close(cursor)
        yield from cursor.while_matches(_BETWEEN)
        if not (yield from cursor.takes("{")):
            break
    yield from cursor.takes("<|tools_suffix|>")


def _between(begin: str, end: str) -> CallRegion:
    return CallRegion(begin, objects(end))


HERMES = (_between("<tool_call>", "</tool_call>"),)
LONGCAT = (_between("<longcat_tool_call>", "</longcat_tool_call>"),)
INTERNLM = (_between("<|action_start|><|plugin|>", "<|action_end|>"),)
TOOL_CALLS_LIST = (_between("<tool_calls>", "</tool_calls>"),)
COHERE = (_between("<|START_ACTION|>", "<|END_ACTION|>"),)
GRANITE = (CallRegion("<|tool_call|>", objects()), CallRegion("<tool_call>", objects()))
GRANITE_20B = (CallRegion("<function_call>", objects()),)
PHI4_MINI = (CallRegion("functools", objects()),)
GIGACHAT3 = (CallRegion("<|function_call|>", objects()), CallRegion("<|message_sep|>\n\nfunction call<|role_sep|>\n",
                                                                   objects()))
XLAM = (CallRegion("[TOOL_CALLS]", objects()), *HERMES, _between("```json", "```"), _between("```", "```"),
        CallRegion("[", objects(), only_first=True))
APERTUS = (CallRegion("<|tools_prefix|>", read_apertus),)
LLAMA3 = (CallRegion("<|python_tag|>", objects()),
          CallRegion("{", objects(first="", needs_arguments=True), ends_reasoning=False))
MISTRAL = (CallRegion("[TOOL_CALLS]", read_mistral),)
DEEPSEEK = (CallRegion("<｜tool▁calls▁begin｜>", sections(
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", _read_deepseek)),)
KIMI_K2 = (CallRegion("<|tool_calls_section_begin|>", sections(
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", _read_kimi)),)
HARMONY_CALLS = (CallRegion("<|channel|>commentary to=functions.", read_harmony),
                 CallRegion("<|start|>assistant to=functions.", read_harmony))
FORCED_LIST = (CallRegion("[", objects(), only_first=True),)
