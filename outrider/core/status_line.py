"""Lines on standard error: permanent lines, and a status line on a terminal, which names the reason of a long wait and
is erased after it. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from outrider.core.foreign_text import printable

CLEAR = "\r\x1b[K"  # back to the line's beginning, and forget the line


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. The stream may be None, and a program's own stream object may have no
    `isatty`."""
    answer = getattr(stream, "isatty", None)
    return answer is not None and not getattr(stream, "closed", False) and bool(answer())


@contextmanager
def status_line(text: str, *, is_once: bool = False) -> Iterator[None]:
    """Show the text on standard error while the block runs, if standard error is a terminal. Otherwise print nothing
    or, with `is_once`, a permanent line: for a wait that occurs only in the first start on a machine."""
    if not is_terminal(sys.stderr):
        if is_once:
            say(f"outrider: {text}")
        yield
        return
    write_stderr(f"{CLEAR}outrider: {printable(text)} ...")
    try:
        yield
    finally:
        write_stderr(CLEAR)


def say(text: str) -> None:
    """Write a line on standard error. It replaces the status line if one is shown."""
    write_stderr(f"{CLEAR if is_terminal(sys.stderr) else ''}{printable(text)}\n")


def write_stderr(text: str) -> None:
    """Write on standard error. If that is not possible (the disk is full, the reader has ended, the stream is closed),
    the text is lost and the program goes on."""
    with suppress(OSError, ValueError):  # the second: it is closed
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
