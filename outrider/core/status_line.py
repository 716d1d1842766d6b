"""A line on a terminal that says what a long wait is for, and vanishes with it. Nothing elsewhere. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLEAR = "\r\x1b[K"  # back to the line's beginning, and forget the line


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Shows the text on standard error while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{CLEAR}outrider: {text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(CLEAR, end="", file=sys.stderr, flush=True)
