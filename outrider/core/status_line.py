"""A line on a terminal that says what a long wait is for, and vanishes with it. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CLEAR = "\r\x1b[K"  # back to the line's beginning, and forget the line


def is_terminal(stream: Any) -> bool:
    """Whether somebody may watch a stream. A process may have no such stream (it is None then), and one of a program's
    own may not say."""
    answer = getattr(stream, "isatty", None)
    return answer is not None and not getattr(stream, "closed", False) and bool(answer())


@contextmanager
def status_line(text: str, *, is_once: bool = False) -> Iterator[None]:
    """Shows the text on standard error while the block runs, if that is a terminal. Elsewhere nothing, or a plain line
    that stays if `is_once`: a wait that only the first start on a machine has."""
    if not is_terminal(sys.stderr):
        if is_once:
            print(f"outrider: {text}", file=sys.stderr, flush=True)
        yield
        return
    print(f"{CLEAR}outrider: {text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(CLEAR, end="", file=sys.stderr, flush=True)
