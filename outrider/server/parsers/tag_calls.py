"""Formats with tags around each parameter: Qwen3-Coder, GLM-4.5, DeepSeek V3.2, MiniMax M2 and others.

Values are text, unless the tool's schema gives them another type. Text is yielded as it arrives, other values when they
are complete.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass, replace

from outrider.server.parsers.cursor import Cursor
from outrider.server.parsers.machine import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallEvent,
    CallReader,
    CallRegion,
    Schemas,
    json_text,
)
from outrider.server.parsers.schema_types import parameters, schema_types, typed

_NAME = re.compile(r"[\w.:/-]+")
WRAPPERS = ("arguments", "input")


@dataclass(frozen=True)
class Tags:
    """The markers of a format, in the order in which the text has them."""

    call: str  # empty: the region is one call, and begins with its name
    name_end: str
    parameter: str
    key_end: str
    value: str  # empty: the value follows the end of the key
    value_end: str
    call_end: str
    end: str = ""  # of the region; empty: it ends with its call
    strips_newline: bool = False  # one after the opening tag of a value and one before its closing tag are not of it

    def read(self, cursor: Cursor, schemas: Schemas) -> CallReader:
        """Read all calls of a region."""
        num_calls = 0
        while (yield from cursor.until(self.call, self.end))[1] == self.call:
            yield from self.read_one(cursor, schemas)
            num_calls += 1
        if not num_calls:
            raise ValueError("the text is not a tool call")

    def read_one(self, cursor: Cursor, schemas: Schemas) -> CallReader:
        """Read the rest of one call after its first marker."""
        yield from cursor.skip_space()
        name = yield from cursor.while_matches(_NAME)
        if not name:
            raise ValueError("a call must have the name of its function")
        yield from cursor.needs(self.name_end)
        yield CallBegin(name)
        before = "{"
        stops = [marker for marker in (self.parameter, self.call_end, self.end) if marker]
        while True:
            _, marker = yield from cursor.until(*stops)
            if marker != self.parameter:
                break
            head = yield from cursor.until_needed(self.key_end)
            key = head.partition('"')[0].strip()
            if self.value:
                yield from cursor.until_needed(self.value)
            known = parameters(schemas.get(name))
            if before == "{" and key in WRAPPERS and known and key not in known:
                before = yield from self._read_wrapped(cursor, key, set(known))
                continue
            yield CallArguments(f"{before}{json_text(key)}: ")
            before = ", "
            types = schema_types(known[key]) if key in known else {"other"} if 'string="false"' in head else {"string"}
            yield from self._read_value(cursor, types)
        if marker is not None and marker == self.end:
            cursor.step_back(marker)
        yield CallArguments("{}" if before == "{" else "}")
        yield CallEnd()

    def _read_wrapped(self, cursor: Cursor, key: str, known: set[str]) -> Generator[CallEvent | None, None, str]:
        """Read all arguments from one parameter; some models write them so. Return the text before the next
        parameter."""
        text, marker = yield from cursor.until(*self._value_ends)
        self._end_value(cursor, marker)
        value = typed(text, {"object"})
        if not isinstance(value, dict) or not value.keys() <= known:
            value = {key: typed(text, {"string"})}
        yield CallArguments(json_text(value)[:-1])
        return ", " if value else "{"

    @property
    def _value_ends(self) -> tuple[str, ...]:
        return self.value_end, self.parameter, self.call_end

    def _end_value(self, cursor: Cursor, marker: str | None) -> None:
        """Read to the end of a value. A model may forget the closing tag."""
        if marker is None:
            raise ValueError("a value has no end")
        if marker != self.value_end:
            cursor.step_back(marker)

    def _read_value(self, cursor: Cursor, types: set[str]) -> CallReader:
        if types == {"string"}:
            marker = yield from self._stream_text(cursor)
        else:
            text, marker = yield from cursor.until(*self._value_ends)
            if self.strips_newline:
                text = text.removeprefix("\n").removesuffix("\n")
            yield CallArguments(json_text(typed(text, types)))
        self._end_value(cursor, marker)

    def _stream_text(self, cursor: Cursor) -> Generator[CallEvent | None, None, str | None]:
        yield CallArguments('"')
        newline = "\n" if self.strips_newline else ""
        yield from cursor.takes(newline)
        held = ""
        while True:
            text, marker = cursor.piece(*self._value_ends)
            text = held + text
            said = text.removesuffix(newline)
            held = text[len(said):]
            if said:
                yield CallArguments(json_text(said)[1:-1])
            if marker is not None or cursor.is_last:
                break
            yield None
        yield CallArguments('"')
        return marker


_QWEN = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>",
             strips_newline=True)
QWEN3_CODER = (CallRegion("<tool_call>", replace(_QWEN, end="</tool_call>").read),
               CallRegion("<function=", _QWEN.read_one))
SEED_OSS = (CallRegion("<seed:tool_call>", replace(_QWEN, end="</seed:tool_call>").read),)
GLM = (CallRegion("<tool_call>", Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                                      "</tool_call>").read_one),)
_DSML = Tags('<｜DSML｜invoke name="', '">', '<｜DSML｜parameter name="', ">", "", "</｜DSML｜parameter>",
             "</｜DSML｜invoke>")
DSML = (CallRegion("<｜DSML｜function_calls>", replace(_DSML, end="</｜DSML｜function_calls>").read),
        CallRegion("<｜DSML｜tool_calls>", replace(_DSML, end="</｜DSML｜tool_calls>").read))
MINIMAX_M2 = (CallRegion("<minimax:tool_call>", Tags(
    '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>", "</minimax:tool_call>").read),)
STEP3 = (CallRegion("<｜tool_calls_begin｜>", Tags(
    '<steptml:invoke name="', '">', '<steptml:parameter name="', '">', "", "</steptml:parameter>", "</steptml:invoke>",
    "<｜tool_calls_end｜>").read),)
HY_V3 = (CallRegion("<tool_calls>", Tags(
    "<tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>",
    "</tool_calls>").read),)
