"""Makes text from outside safe for logs and terminals: names of files and models, messages of exceptions, headers.
Characters that would control a terminal, or begin a line that looks like another record, are escaped. No torch."""

from __future__ import annotations

import re

# Control characters but tab and line feed, marks that turn the direction of text, and other ends of lines.
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
BREAK = re.compile(r"\s*\n\s*")


def printable(text: str) -> str:
    """Return the text with its control characters escaped. Tabs and line feeds stay."""
    return UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def on_one_line(text: str) -> str:
    """Return the text on one line: line feeds become spaces, control characters escapes."""
    return printable(BREAK.sub(" ", text))


def log_lines(text: str) -> str:
    """Return the text of a log record: further lines are indented, so that none looks like a separate record."""
    return printable(text).replace("\n", "\n  ")
