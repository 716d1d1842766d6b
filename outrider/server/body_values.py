"""Counts the values in a JSON body before any of them is built.

A value takes a byte or two in the body, but up to a thousand bytes and a microsecond as a Python object. Counting
builds no objects and lets other threads run, because numpy scans slices of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

SLICE = 1 << 18  # bytes
QUOTE, BACKSLASH, COMMA, LIST, OBJECT = b'"\\,[{'


def count_values(body: bytes, most: int) -> int:
    """Estimate the number of values in a body from its commas and opening brackets outside strings. Each list or object
    counts as one value, and so does each of its items after the first. Counting stops soon after `most`."""
    total, in_text = 0, False
    for _, part, quotes in _slices(body):
        marks = np.flatnonzero((part == COMMA) | (part == LIST) | (part == OBJECT))
        total += int(np.count_nonzero(np.searchsorted(quotes, marks) % 2 == in_text))
        in_text ^= len(quotes) % 2 == 1
        if total > most:
            break
    return total


def count_byte(body: bytes, byte: int, first: int, last: int) -> int:
    """Count a byte in a part of the body. `bytes.count` would let no other thread run for as long as it takes."""
    total = 0
    for start in range(first, last, SLICE):
        total += int(np.count_nonzero(np.frombuffer(body, np.uint8, min(SLICE, last - start), start) == byte))
    return total


def long_texts(body: bytes, least: int) -> list[tuple[int, int]]:
    """Find the strings of more than `least` bytes. Returns for each string the position after its opening quote and the
    position of its closing quote."""
    found: list[tuple[int, int]] = []
    before, num_before = -1, 0  # the place of the last quote, and the number of quotes
    for start, _, quotes in _slices(body):
        places = np.concatenate(([before], start + quotes))
        for index in np.flatnonzero(np.diff(places) > least + 1):
            if (num_before + index) % 2 == 1:  # it is behind a quote that begins a text
                found.append((int(places[index]) + 1, int(places[index + 1])))
        before, num_before = int(places[-1]), num_before + len(quotes)
    return found


def are_in_texts(body: bytes, places: Sequence[int]) -> list[bool]:
    """Return for each byte position whether it is inside a JSON string. The positions must be in ascending order."""
    found: list[bool] = []
    num_before = 0  # quotes that begin and end texts
    for start, part, quotes in _slices(body) if places else ():
        while len(found) < len(places) and places[len(found)] < start + len(part):
            found.append((num_before + int(np.searchsorted(quotes, places[len(found)] - start))) % 2 == 1)
        num_before += len(quotes)
    return found


def _slices(body: bytes) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (position, bytes, positions of quotes) for each slice of the body. Only quotes that begin or end a string
    are included, not escaped ones."""
    num_backslashes = 0  # at the end of the slice before
    for start in range(0, len(body), SLICE):
        part = np.frombuffer(body, np.uint8, min(SLICE, len(body) - start), start)
        quotes = np.flatnonzero(part == QUOTE)
        is_backslash = part == BACKSLASH
        if num_backslashes or is_backslash.any():
            before = _backslashes_before(is_backslash, num_backslashes)
            quotes = quotes[before[quotes] % 2 == 0]
            num_backslashes = int(before[-1]) + 1 if is_backslash[-1] else 0
        yield start, part, quotes


def _backslashes_before(is_backslash: np.ndarray, num_before: int) -> np.ndarray:
    """Return the number of backslashes directly before each byte. num_before: the number of backslashes before the
    first byte."""
    places = np.arange(len(is_backslash))
    last_other = np.maximum.accumulate(np.where(is_backslash, -1 - num_before, places))
    before = np.empty(len(is_backslash), np.int64)
    before[0] = num_before
    before[1:] = places[:-1] - last_other[:-1]
    return before
