"""LiteralTexts: prevents text of a chat from being tokenized as a placeholder of an image.

Only a chat template may write the placeholder of an image. If a user's text or a tool's output contains the characters
of a placeholder, they are tokenized as ordinary text. Therefore a random mark is put into the middle of each such text
before the template is rendered, and the rendered text is tokenized in pieces, cut where the marks are."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import Any

from outrider.engine.text import Tokenizer

MEDIA = re.compile("image|video|audio|vision|img", re.IGNORECASE)  # in the names of tokens that stand for media


class LiteralTexts:
    """Hides placeholders in the texts of one chat. The mark is new for each chat, so that no text contains it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._mark = tokenizer, secrets.token_hex(16)
        self._found = media_tokens(tokenizer)

    def hide(self, value: Any) -> Any:
        """Return a copy of `value` (texts in lists and dicts) with a mark inside every placeholder."""
        match value:
            case str():
                return value if self._found is None else self._found.sub(self._marked, value)
            case list():
                return [self.hide(part) for part in value]
            case dict():
                return {self.hide(name): self.hide(part) for name, part in value.items()}
        return value

    def show(self, text: str) -> str:
        """Remove the marks from a rendered text."""
        return text.replace(self._mark, "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a rendered text with marks."""
        first, *others = text.split(self._mark)
        if not others:
            return self._tokenizer.encode(text, add_special_tokens)
        begin = self._tokenizer.encoding(first, add_special_tokens)
        num_after = next((i for i, is_added in enumerate(reversed(begin.special_tokens_mask)) if not is_added), 0)
        cut = len(begin.ids) - num_after
        ids = list(begin.ids[:cut])
        for part in others:
            ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids + list(begin.ids[cut:])

    def _marked(self, found: re.Match[str]) -> str:
        text = found[0]
        return text[: len(text) // 2] + self._mark + text[len(text) // 2 :]


@lru_cache(maxsize=16)
def media_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the tokenizer's special tokens for media, or None if it has none."""
    names = sorted((token.content for token in tokenizer.backend.get_added_tokens_decoder().values()
                    if MEDIA.search(token.content)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None
