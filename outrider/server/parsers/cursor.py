"""Cursor: a read position in text that arrives in pieces.

Readers of calls are generators, so they can be written as if the whole text was available. They yield events, and yield
None where they need more text. Methods of Cursor that may need more text are generators of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
_SPACE = re.compile(r"\s*")


class Cursor:
    def __init__(self) -> None:
        self.is_last = False  # no more text will come
        self._text, self._place = "", 0
        self._mark, self._past = 0, [""]  # text since the mark: pieces before `_text`, and a part of it

    def feed(self, text: str) -> None:
        self._past.append(self._text[self._mark:self._place])
        self._text, self._place, self._mark = self._text[self._place:] + text, 0, 0

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._text)

    def mark(self, num_back: int = 0) -> None:
        """Set the mark `num_back` characters before the current place. These characters must have been taken since the
        last feed."""
        self._past.clear()
        self._mark = self._place - num_back

    def since_mark(self) -> str:
        return "".join(self._past) + self._text[self._mark:self._place]

    def step_back(self, text: str) -> None:
        """Move back over a text that was just taken."""
        self._place -= len(text)

    def piece(self, *markers: str) -> tuple[str, str | None]:
        """Take the text before the first marker, and the marker. Without a marker, take the text that cannot be the
        beginning of one."""
        found = _pattern(markers).search(self._text, self._place) if markers else None
        end = found.start() if found else len(self._text)
        marker = found[0] if found else None
        if not self.is_last:
            longest = max(map(len, markers), default=0)
            for start in range(max(self._place, len(self._text) - longest + 1), min(end + 1, len(self._text))):
                tail = self._text[start:]
                if any(other.startswith(tail) and other != tail for other in markers):
                    end, marker = start, None
                    break
        text, self._place = self._text[self._place:end], end + len(marker or "")
        return text, marker

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take the text that the pattern matches at the current place. Only text that has already arrived is
        searched."""
        found = pattern.match(self._text, self._place)
        if found is None:
            return ""
        self._place = found.end()
        return found[0]

    def char(self) -> Waiting[str]:
        """Look at the next character without taking it. At the end it is an empty text."""
        while self.is_at_end and not self.is_last:
            yield None
        return self._text[self._place:self._place + 1]

    def while_matches(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Take text as long as it matches the pattern, which matches single characters."""
        pieces = [self.match(pattern)]
        while self.is_at_end and not self.is_last:
            yield None
            pieces.append(self.match(pattern))
        return "".join(pieces)

    def skip_space(self) -> Waiting[str]:
        return self.while_matches(_SPACE)

    def takes(self, token: str) -> Waiting[bool]:
        """Take the token if the text continues with it. Returns whether it did."""
        while True:
            rest = self._text[self._place:self._place + len(token)]
            if rest == token:
                self._place += len(token)
                return True
            if self.is_last or not token.startswith(rest):
                return False
            yield None

    def needs(self, token: str) -> Waiting[None]:
        if not (yield from self.takes(token)):
            raise ValueError(f"the text lacks {token}")

    def until(self, *markers: str) -> Waiting[tuple[str, str | None]]:
        """Take the text before the first marker, and the marker. If the text ends first, the marker is None."""
        pieces = []
        while True:
            text, marker = self.piece(*markers)
            pieces.append(text)
            if marker is not None or self.is_last:
                return "".join(pieces), marker
            yield None

    def until_needed(self, *markers: str) -> Waiting[str]:
        """Take the text before the first marker, and the marker. If the text ends first, the call is malformed."""
        text, marker = yield from self.until(*markers)
        if marker is None:
            raise ValueError(f"the text lacks {markers[0]}")
        return text


@lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
