"""The parser of every format: text is searched for markers, and the text between two markers is a region.

    content ... <think> reasoning </think> content <tool_call> body </tool_call> ...

A format is a list of regions. Reasoning, content and the arguments of calls are yielded as they come. Text that could
be the beginning of a marker waits for the rest, so events do not depend on how the text is cut into pieces. White space
around markers is dropped, unless content follows a call. Text that is not a valid call is content, exactly as written.
A stream cannot take back the part of a malformed call that it has sent; `settled` does this for answers that are sent
whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from outrider.server.parsers.cursor import Cursor


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    name: str
    call_id: str | None = None  # where the model itself names its calls


class CallArguments(NamedTuple):
    text: str  # all of a call's together: a JSON object


class CallEnd(NamedTuple):
    malformed: str | None = None  # all text of the call, if it turned out to be none


CallEvent = CallBegin | CallArguments | CallEnd
Event = Content | Reasoning | CallEvent
Schemas = Mapping[str, Mapping[str, Any]]  # by function: the JSON schema of its parameters
CallReader = Generator[CallEvent | None, None, None]  # None: more text is needed; ValueError: the text is no call
ReadCalls = Callable[[Cursor, Schemas], CallReader]


def whole_call(name: object, arguments: object, call_id: str | None = None) -> CallReader:
    """Make the events of a call whose name and arguments are already parsed. Raise ValueError if there is no name, or
    if a value is not JSON (a set, bytes, NaN)."""
    if not isinstance(name, str) or not name:
        raise ValueError("a call must have the name of its function")
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")
    text = json_text(arguments)
    yield CallBegin(name, call_id)
    yield CallArguments(text)
    yield CallEnd()


def json_text(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except TypeError as error:
        raise ValueError("the text is not JSON") from error
    except UnicodeEncodeError:  # half of a character that is written as two escapes
        return json.dumps(value, allow_nan=False)


def read_json(text: str) -> Any:
    """Parse JSON like `json.loads`, but refuse NaN and Infinity, which are not JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring events with arguments into one."""
    result: list[Event] = []
    for kind, run in groupby(events, type):
        if kind is CallArguments:
            result.append(CallArguments("".join(event.text for event in run if isinstance(event, CallArguments))))
        else:
            result += run
    return result


def settled(events: Iterable[Event]) -> list[Event]:
    """Return the events of a complete text, with malformed calls turned back into content."""
    result: list[Event] = []
    begin = 0
    for event in events:
        if isinstance(event, CallBegin):
            begin = len(result)
        if isinstance(event, CallEnd) and event.malformed is not None:
            result[begin:] = [Content(event.malformed)]
        else:
            result.append(event)
    return result


class StrayEnd(Enum):
    """The treatment of an end marker of reasoning that occurs while no reasoning is open."""

    TEXT = "a part of the content, as any other text"
    DROPPED_AT_START = "dropped before all content, and part of it later"
    DROPPED = "dropped everywhere: no text has this marker"


@dataclass(frozen=True)
class ReasoningRegion:
    begin: str
    end: str
    answer: str = ""  # markers that begin the answer
    gap: str = ""  # markers between the reasoning and those
    stray_end: StrayEnd = StrayEnd.TEXT


@dataclass(frozen=True)
class CallRegion:
    begin: str
    read: ReadCalls  # from behind the marker to the end of the region
    only_first: bool = False  # begins only where the text does, or where it does after the reasoning
    ends_reasoning: bool = True


@dataclass(frozen=True)
class Skipped:
    """A marker that is dropped from the output."""

    begin: str


Region = ReasoningRegion | CallRegion | Skipped


class OutputParser:
    """Parses the text of one sample into events. `prompt_end`: the last characters of the prompt, which may already
    contain the begin marker of a region, for example `<think>`."""

    def __init__(self, regions: Sequence[Region], schemas: Schemas | None = None, prompt_end: str = "") -> None:
        self._schemas = schemas or {}
        self._first = [r for r in regions if isinstance(r, CallRegion) and r.only_first]
        self._regions = {r.begin: r for r in reversed(regions) if r not in self._first}
        self._in_reasoning = {begin: r for begin, r in self._regions.items()
                              if isinstance(r, CallRegion) and r.ends_reasoning}
        self._open = next((r for r in regions if isinstance(r, ReasoningRegion)
                           and prompt_end.rstrip().endswith(r.begin.rstrip())), None)
        self._stray_ends = {r.end: r.stray_end for r in regions
                            if isinstance(r, ReasoningRegion) and r.stray_end is not StrayEnd.TEXT}
        self._reader: CallReader | None = None
        self._has_begun = False  # a call, whose name was handed out
        self._is_start = bool(self._first) and self._open is None
        self._cursor = Cursor()
        self._space = ""  # white space that belongs to the text if text follows it
        self._outer_space = ""  # of the content before the reasoning
        self._skips_space = self._open is not None
        self._has_content, self._ends_with_call = False, False
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._cursor.feed(text)
        self._events = []
        while self._step():
            pass
        return _merged(self._events)

    def finish(self) -> list[Event]:
        self._cursor.is_last = True
        events = self.feed("")
        if self._space and not self._skips_space and not self._ends_with_call:
            events.append(self._of_kind(self._space))
            self._space = ""
        return events

    def _step(self) -> bool:
        """Parse the text up to the end of the next marker or call, and emit the events. Returns False if more text must
        arrive first."""
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._is_start:
            self._reader = self._read_first()
            return True
        regions = self._regions if self._open is None else self._in_reasoning
        ends = list(self._stray_ends) if self._open is None else [self._open.end]
        again = [] if self._open is None or not self._skips_space else [self._open.begin]
        text, marker = self._cursor.piece(*regions, *ends, *again)
        self._emit(text)
        if marker in again:  # a model may open the reasoning that its prompt has opened
            self._emit("" if self._skips_space else marker)
            return True
        if marker is None:
            self._cursor.mark()
            return False
        self._cursor.mark(len(marker))
        if self._open is None and self._has_content and marker in ends:
            self._emit("" if self._stray_ends[marker] is StrayEnd.DROPPED else marker)
            return True
        self._enter(None if marker in ends else regions[marker])
        return True

    def _read_first(self) -> CallReader:
        """Read a call at the beginning of the text, if there is one."""
        space = yield from self._cursor.skip_space()
        self._space += "" if self._skips_space else space
        self._cursor.mark()
        for region in self._first:
            if (yield from self._cursor.takes(region.begin)):
                self._is_start = False
                yield from region.read(self._cursor, self._schemas)
                return
        self._is_start = False

    def _enter(self, region: Region | None) -> None:
        """Begin the region whose begin marker was just read; None means that the reasoning has just ended."""
        match region:
            case CallRegion():
                self._open = None
                self._reader = region.read(self._cursor, self._schemas)
                return  # white space before the call is kept until the call is known to be one
            case ReasoningRegion():
                self._open, self._outer_space = region, self._space
                self._space, self._skips_space = "", True
            case None:
                self._open, self._is_start = None, bool(self._first)
                self._space, self._skips_space = self._outer_space, not self._has_content
            case Skipped():
                self._is_start = bool(self._first) and not self._has_content
                self._space, self._skips_space = "", True

    def _read_call(self, reader: CallReader) -> bool:
        try:
            for event in reader:
                if event is None:
                    return False
                self._events.append(event)
                self._has_begun = not isinstance(event, CallEnd)
                if not self._has_begun:
                    self._cursor.mark()
                    self._ends_with_call = True
                    if not self._has_content:
                        self._space, self._skips_space = "", True
        except (ValueError, RecursionError):
            written = self._cursor.since_mark()
            if self._has_begun:
                self._events.append(CallEnd(self._space + written))
                self._space, self._skips_space, self._has_begun, self._ends_with_call = "", False, False, False
            else:
                self._emit(written)
        self._reader = None
        return True

    def _emit(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said):]
        if said:
            self._events.append(self._of_kind(said))
            self._has_content |= self._open is None
            self._ends_with_call = False

    def _of_kind(self, text: str) -> Content | Reasoning:
        return Content(text) if self._open is None else Reasoning(text)
