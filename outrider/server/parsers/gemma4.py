"""Gemma 4: `<|tool_call>call:F{k:<|"|>text<|"|>,n:42,a:[1,2],o:{x:true}}<tool_call|>`, thoughts in a channel."""

from __future__ import annotations

import re
from typing import Any

from outrider.server.parsers.machine import Call, CallRegion, ReasoningRegion, Schemas, read_json

QUOTE = '<|"|>'
_WORD = re.compile(r"[^,:{}\[\]]+")
MAX_DEPTH = 64


def parse_gemma4(body: str, schemas: Schemas) -> list[Call]:
    found = re.match(r"\s*call:([\w.:-]+?)\s*(?=\{)", body)
    if not found:
        raise ValueError("no call")
    reader = _Values(body, found.end())
    arguments = reader.value(0)
    if body[reader.place:].strip():
        raise ValueError("text after the call")
    return [Call.from_values(found[1], arguments)]


class _Values:
    """Reads one value at `place` and moves behind it."""

    def __init__(self, text: str, place: int) -> None:
        self._text, self.place = text, place

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if self._takes(QUOTE):
            end = self._text.index(QUOTE, self.place)
            text, self.place = self._text[self.place:end], end + len(QUOTE)
            return text
        if self._takes("{"):
            return dict(self._items("}", depth, is_object=True))
        if self._takes("["):
            return [item for _, item in self._items("]", depth, is_object=False)]
        word = self._word()
        try:
            return read_json(word)
        except ValueError:
            return word

    def _items(self, end: str, depth: int, is_object: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        if self._takes(end):
            return items
        while True:
            key = self._key() if is_object else ""
            items.append((key, self.value(depth + 1)))
            if self._takes(end):
                return items
            self._needs(",")

    def _key(self) -> str:
        key = self.value(MAX_DEPTH) if self._text.startswith(QUOTE, self.place) else self._word()
        self._needs(":")
        return str(key)

    def _word(self) -> str:
        found = _WORD.match(self._text, self.place)
        if not found:
            raise ValueError("no value")
        self.place = found.end()
        return found[0].strip()

    def _takes(self, token: str) -> bool:
        if not self._text.startswith(token, self.place):
            return False
        self.place += len(token)
        return True

    def _needs(self, token: str) -> None:
        if not self._takes(token):
            raise ValueError(f"no {token}")


GEMMA4_CALLS = (CallRegion("<|tool_call>", "<tool_call|>", parse_gemma4),)
GEMMA4_THOUGHTS = (ReasoningRegion("<|channel>thought\n", "<channel|>"),)
