"""Wraps text on a terminal between words, also while it streams in. The terminal itself breaks lines within words."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from typing import Any

from outrider.core.status_line import is_terminal

TAB = 8  # columns between the stops of a terminal


def wrapped(text: str, stream: Any) -> str:
    """Return the text with its lines broken between words if the stream is a terminal."""
    if not is_terminal(stream):
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
                     for line in text.split("\n"))


class WordWrap:
    """Turns pieces of a text into the characters to send to a terminal. A word that reaches the right edge is erased
    there and written on the next line. A word longer than a line is left to the terminal. Control characters are
    dropped: a model may write any, and some change the terminal's behaviour permanently."""

    def __init__(self, columns: int | None = None) -> None:
        self._columns = columns or shutil.get_terminal_size().columns
        self._column = 0
        self._word = ""  # the word that the text ends with, as far as it has come

    def write(self, text: str) -> str:
        return "".join(map(self._place, text))

    def _place(self, character: str) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        if character == "\t":
            return "".join(map(self._place, " " * (TAB - self._column % TAB)))
        if unicodedata.category(character) == "Cc":
            return ""
        width = _width(character)
        if self._column + width <= self._columns:
            self._column += width
            self._word = "" if character.isspace() else self._word + character
            return character
        if character.isspace():  # in place of it the line ends
            self._column, self._word = 0, ""
            return "\n"
        word_width = sum(map(_width, self._word))
        if word_width + width > self._columns or word_width >= self._column:
            self._column, self._word = width, self._word + character
            return character
        word, begin = self._word, self._column - word_width
        self._column, self._word = word_width + width, word + character
        return (f"\x1b[{begin + 1}G\x1b[K" if word else "") + "\n" + word + character


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
