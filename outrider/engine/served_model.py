"""ServedModel: the model as an engine and its callers see it: its sizes, its text, and its name in messages."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core import Limits
from outrider.core.class_head import ClassHead
from outrider.engine.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str  # for messages
    limits: Limits
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None  # None: token ids alone go in and out
    classes: ClassHead | None = None  # of a model that classifies and generates no text
    takes_spans: bool = False  # prompts may mark spans that attend in both directions
    device_name: str = "CPU"

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer files, or skip_tokenizer_init is set: give prompts as "
                             "token ids")
        return self.tokenizer

    def longest(self, prompt_len: int, max_tokens: int | None) -> int:
        """The most tokens that a request may have, its prompt included."""
        most = self.limits.max_len
        return most if max_tokens is None else min(most, prompt_len + max_tokens)
