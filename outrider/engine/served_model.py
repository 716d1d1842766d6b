"""ServedModel: the facts about the model that an engine and its callers use: its sizes, its tokenizer, and its name for
messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.class_head import ClassHead
from outrider.engine.text import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    name: str  # for messages
    limits: Limits
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None  # None: token ids alone go in and out
    classes: ClassHead | None = None  # of a model that classifies and generates no text
    takes_extra_keys: bool = False  # tokens may see keys after their own
    device_name: str = "CPU"
    config: EngineConfig | None = None  # the settings it was started with; None: they are not known
    loaded_at: float = field(default_factory=time.time)
    takes_images: bool = False  # prompts may have images

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer files, or skip_tokenizer_init is set: give prompts as "
                             "token ids")
        return self.tokenizer

    @property
    def longest_range(self) -> int:
        """Return the most tokens of a prompt that a step can always compute together. In the worst case every other
        request computes one token and its drafts in the same step."""
        return self.limits.max_batched_tokens - self.limits.max_requests * (1 + self.limits.max_drafts)

    def longest(self, prompt_len: int, max_tokens: int | None) -> int:
        """Return the most tokens that a request may have, including its prompt."""
        most = self.limits.max_len
        return most if max_tokens is None else min(most, prompt_len + max_tokens)
