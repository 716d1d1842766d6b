"""Parses the JSON of a large body in short steps, so that other threads can run meanwhile.

`json.loads` is one call into C, which lets no other thread run until it is done: a third of a second for 15 MB. Here
every such call gets a bounded number of bytes. Long lists of numbers and long strings are read in slices, and the body
gets random marks in their places. If the remaining body is still long, the standard decoder's Python code parses it."""

from __future__ import annotations

import json
import secrets
from json import scanner
from typing import Any

from outrider.server.body_values import are_in_texts, long_texts
from outrider.server.protocol import NaturalNumbers

SLICE = 1 << 15  # bytes that are read at once: half a millisecond or so
LONG = 1 << 17  # bytes that one call of the parser may take, two milliseconds or so
IN_NUMBERS = b"0123456789, \t\r\n"  # what a list of natural numbers is written with, beside its brackets
BYTE_ORDER_MARK = "\ufeff"
ESCAPE_BYTES = 12  # of the longest escape, which writes one character as two halves


class YieldingDecoder(json.JSONDecoder):
    """A JSON decoder in Python, which uses C code only for texts and numbers. So other threads can run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_object = json.decoder.JSONObject  # type: ignore[attr-defined]
        self.parse_array = json.decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parse_large(body: bytes) -> Any:
    """Parse JSON like `json.loads`. Long lists of natural numbers become NaturalNumbers."""
    return parse_parts(body, numeric_lists(body))


def parse_parts(body: bytes, lists: list[tuple[int, int]]) -> Any:
    """Parse a body as `parse_large` does. lists: the first and last byte positions of its long lists of numbers
    (`numeric_lists`)."""
    pieces: list[bytes] = []
    read: dict[str, list[int] | str] = {}
    end = 0  # end of the part of the body that is in `pieces`
    texts = set(long_texts(body, LONG)) if len(body) > LONG else set()
    for first, last in sorted([*lists, *texts]):
        mark = secrets.token_hex(16)  # random: no body contains it already
        is_text = (first, last) in texts
        read[mark] = _parse_text(body, first, last) if is_text else _parse_numbers(body, first, last)
        pieces += [body[end:first], mark.encode() if is_text else b'"%s"' % mark.encode()]
        end = last
    rest = b"".join([*pieces, body[end:]]) if pieces else body
    parsed = YieldingDecoder().decode(_decoded(rest).removeprefix(BYTE_ORDER_MARK)) if len(rest) > LONG else (
        json.loads(rest))
    return _restored(parsed, read) if read else parsed


def _decoded(body: bytes) -> str:
    return body.decode("utf-8", "surrogatepass")  # as json.loads does


def numeric_lists(body: bytes) -> list[tuple[int, int]]:
    """Find the long lists in a body that contain only natural numbers. Lists of numbers inside strings are left out."""
    runs = [(first, last) for first, last in _numeric_runs(body)
            if body[first - 1 : first] == b"[" and body[last : last + 1] == b"]"]
    in_texts = are_in_texts(body, [first for first, _ in runs])
    return [run for run, is_in_text in zip(runs, in_texts, strict=True) if not is_in_text]


def _numeric_runs(body: bytes) -> list[tuple[int, int]]:
    """Find stretches of a body that consist only of bytes of number lists (IN_NUMBERS) and are longer than a few
    slices."""
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


def _parse_numbers(body: bytes, first: int, last: int) -> list[int]:
    numbers = NaturalNumbers()
    start = first
    while start < last:
        end = last if start + SLICE >= last else body.rfind(b",", start, start + SLICE)
        if end < 0:
            raise ValueError("a number has thousands of digits")
        piece = json.loads(b"[" + body[start:end] + b"]")
        if not piece:
            raise ValueError("a comma has no number before or after it")
        numbers += piece
        start = end + 1
        if start == last:
            raise ValueError("a comma has no number after it")
    return numbers


def _parse_text(body: bytes, first: int, last: int) -> str:
    pieces: list[str] = []
    while first < last:
        piece = body[first : min(last, first + LONG)]
        if first + len(piece) < last:
            piece = piece[: _whole_characters(piece)]
        pieces.append(json.loads(f'"{_decoded(piece)}"'))
        first += len(piece)
    return "".join(pieces)


def _whole_characters(piece: bytes) -> int:
    """Count the bytes at the start of a piece of a JSON string that form whole characters, so that the string can be
    decoded piece by piece. A character that is escaped as two surrogates is whole if both escapes are in the piece."""
    end = len(piece)
    while end > 1 and piece[end - 1] & 0xC0 == 0x80:  # the last character of several bytes is left out, perhaps whole
        end -= 1
    end -= piece[end - 1] >= 0xC0
    for _ in range(2):  # escapes, of which the second may be the half that the first one needs
        escape = piece.rfind(b"\\", max(0, end - ESCAPE_BYTES), end)
        if escape < 0:
            return end
        num_backslashes = escape + 1 - len(piece[: escape + 1].rstrip(b"\\"))
        if num_backslashes % 2 == 0:  # pairs, which are whole characters
            return end
        length = 6 if piece[escape + 1 : escape + 2] == b"u" else 2
        is_first_half = piece[escape + 2 : escape + 4].lower() in (b"d8", b"d9", b"da", b"db") and length == 6
        if escape + length <= end and not (is_first_half and escape + length == end):
            return end
        end = escape
    return end


def _restored(parsed: Any, read: dict[str, list[int] | str]) -> Any:
    """Replace the marks in `parsed` by the values that they represent."""
    match parsed:
        case [str() as mark] if isinstance(read.get(mark), list):
            return read[mark]
        case str():
            return read.get(parsed, parsed)
        case list():
            return [_restored(part, read) for part in parsed]
        case dict():
            return {read.get(name, name): _restored(part, read) for name, part in parsed.items()}
    return parsed
