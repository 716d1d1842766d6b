"""One machine for every format: text is searched for markers, and what lies between two markers is a region.

    content ... <think> reasoning </think> content <tool_call> body </tool_call> ...

A format is a list of regions. Reasoning and content are handed out as they come; a call is handed out when its region
ends, whole. Text that could be the beginning of a marker waits for the rest, so the events do not depend on how the
text was cut. White space around markers is dropped. A body that is no valid call is content, as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    name: str
    arguments: str  # a JSON object

    @classmethod
    def from_values(cls, name: str, arguments: Mapping[str, Any]) -> Call:
        """Raises ValueError where there is no name, or where a value is not JSON: a set, bytes, NaN."""
        if not name:
            raise ValueError("a call names its function")
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except TypeError as error:
            raise ValueError("no JSON") from error
        except UnicodeEncodeError:  # half of a character that is written as two escapes
            text = json.dumps(arguments, allow_nan=False)
        return cls(name, text)


Event = Content | Reasoning | Call
Schemas = Mapping[str, Mapping[str, Any]]  # by function: the JSON schema of its parameters
ParseCalls = Callable[[str, Schemas], list[Call]]  # raises ValueError for a body that is no call


def read_json(text: str) -> Any:
    """As `json.loads`, which takes NaN and Infinity too, though they are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class ReasoningRegion:
    begin: str
    end: str


@dataclass(frozen=True)
class CallRegion:
    begin: str
    end: str | None  # None: the end of the text
    parse: ParseCalls
    only_first: bool = False  # begins only where the text does, or where it does after the reasoning


@dataclass(frozen=True)
class Skipped:
    """A marker that means nothing to a reader."""

    begin: str


Region = ReasoningRegion | CallRegion | Skipped


class OutputParser:
    """Parses one sample. `prompt_end`: the prompt's last characters, which may have opened a region already."""

    def __init__(self, regions: Sequence[Region], schemas: Schemas | None = None, prompt_end: str = "") -> None:
        self._schemas = schemas or {}
        self._first = [r for r in regions if isinstance(r, CallRegion) and r.only_first]
        self._regions = [r for r in regions if r not in self._first]
        self._calls = [r for r in self._regions if isinstance(r, CallRegion)]
        self._open = next((r for r in regions if isinstance(r, ReasoningRegion)
                           and prompt_end.rstrip().endswith(r.begin.rstrip())), None)
        self._call: CallRegion | None = None
        self._is_start = bool(self._first) and self._open is None
        self._text = ""  # not yet understood
        self._space = ""  # white space that belongs to the text if text follows it
        self._skips_space = self._open is not None
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._advance(is_last=False)

    def finish(self) -> list[Event]:
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> list[Event]:
        self._events = []
        while self._step(is_last):
            pass
        if is_last and self._space and not self._skips_space:
            self._events.append(self._of_kind(self._space))
            self._space = ""
        return self._events

    def _step(self, is_last: bool) -> bool:
        """Moves on by one region, or as far as the text goes; False if no more can be said yet."""
        if self._call is not None:
            return self._end_call(self._call, is_last)
        if self._is_start:
            begun = self._begin_first(is_last)
            if begun is None:
                return False
            if begun:
                return True
        regions = self._regions if self._open is None else self._calls
        ends = [] if self._open is None else [self._open.end]
        where, marker = _find(self._text, [r.begin for r in regions] + ends, is_last)
        self._emit(self._text[:where])
        self._text = self._text[where + len(marker or ""):]
        if marker is None:
            return False
        self._enter(None if marker in ends else next(r for r in regions if r.begin == marker))
        return True

    def _begin_first(self, is_last: bool) -> bool | None:
        """Whether the text begins with a call; None while that cannot be said."""
        text = self._text.lstrip()
        if not is_last and (not text or any(r.begin.startswith(text) and r.begin != text for r in self._first)):
            return None
        self._is_start = False
        region = next((r for r in self._first if text.startswith(r.begin)), None)
        if region is None:
            return False
        self._text = text[len(region.begin):]
        self._enter(region)
        return True

    def _enter(self, region: Region | None) -> None:
        """None: the reasoning has ended."""
        match region:
            case CallRegion():
                self._call, self._open = region, None
                return  # white space before the call is kept until the call is known to be one
            case ReasoningRegion():
                self._open = region
            case None:
                self._open, self._is_start = None, bool(self._first)
        self._space, self._skips_space = "", True

    def _end_call(self, region: CallRegion, is_last: bool) -> bool:
        end = -1 if region.end is None else self._text.find(region.end)
        if end < 0 and not is_last:
            return False
        body = self._text if end < 0 else self._text[:end]
        closing = "" if end < 0 else region.end or ""
        self._text, self._call = self._text[len(body) + len(closing):], None
        try:
            calls = region.parse(body, self._schemas)
        except (ValueError, RecursionError):
            self._emit(region.begin + body + closing)
        else:
            self._events += calls
            self._space, self._skips_space = "", True
        return bool(self._text)

    def _emit(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said):]
        if said:
            self._events.append(self._of_kind(said))

    def _of_kind(self, text: str) -> Content | Reasoning:
        return Content(text) if self._open is None else Reasoning(text)


def _find(text: str, markers: Sequence[str], is_last: bool) -> tuple[int, str | None]:
    """(place, marker) of the first marker in the text; without one, the length that cannot be part of one, and None."""
    longest = max(map(len, markers), default=0)
    found = re.search("|".join(map(re.escape, sorted(markers, key=len, reverse=True))), text) if markers else None
    place = found.start() if found else len(text)
    if not is_last:
        for start in range(max(0, len(text) - longest + 1), min(place + 1, len(text))):
            tail = text[start:]
            if any(marker.startswith(tail) and marker != tail for marker in markers):
                return start, None
    return (place, found[0]) if found else (place, None)
