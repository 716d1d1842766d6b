"""Truncation: cuts prompts to a number of tokens before they are checked, as `truncate_prompt_tokens` asks.

Special tokens that the tokenizer adds before or after the text are kept, because a model that was trained with them
would misread the text without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.engine.text import Tokenizer
from outrider.server.errors import ApiError
from outrider.server.protocol import Prompted

Side = Literal["left", "right"]
ALL_THAT_FITS = -1


@dataclass(frozen=True)
class Truncation:
    num_tokens: int
    side: Side  # where tokens are left out

    @classmethod
    def from_body(cls, body: Prompted, max_len: int, side: Side, num_new: int = 0) -> Truncation | None:
        """Read the truncation from a body. side: the side that is cut by default. num_new: the number of tokens that
        follow the prompt."""
        num_tokens = body.truncate_prompt_tokens
        if num_tokens is None:
            if body.truncation_side is not None:
                raise ApiError(400, "truncation_side needs truncate_prompt_tokens: give it, or leave truncation_side "
                                    "out", param="truncation_side")
            return None
        if num_tokens == ALL_THAT_FITS:
            num_tokens = max(1, max_len - num_new)
        elif not 1 <= num_tokens <= max_len:
            raise ApiError(400, f"truncate_prompt_tokens must be from 1 to {max_len}, or -1 for as many tokens as fit",
                           param="truncate_prompt_tokens")
        return cls(num_tokens, body.truncation_side or side)

    def encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded = tokenizer.encoding(text, add_special_tokens)
        ids: list[int] = encoded.ids
        if len(ids) <= self.num_tokens:
            return ids
        mask = encoded.special_tokens_mask  # 1: not of the text itself
        num_before = next((i for i, is_added in enumerate(mask) if not is_added), len(mask))
        num_after = next((i for i, is_added in enumerate(reversed(mask)) if not is_added), 0)
        num_own = self.num_tokens - num_before - num_after
        if num_own < 1:
            return self.cut(ids)
        own = ids[num_before : len(ids) - num_after]
        return ids[:num_before] + Truncation(num_own, self.side).cut(own) + ids[len(ids) - num_after :]

    def cut(self, ids: Sequence[int]) -> list[int]:
        return list(ids[: self.num_tokens] if self.side == "right" else ids[-self.num_tokens :])

    def shorten(self, text: str, num_characters: int) -> str:
        """Cut a text to the most characters that the allowed number of tokens can have, so that tokenizing takes
        bounded time."""
        return text[:num_characters] if self.side == "right" else text[-num_characters:]
