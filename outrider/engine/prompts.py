"""Prompts in all their forms, encoded in one place: text, token ids, or a dict with either and a cache salt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.core.fields import check_value, did_you_mean, shown
from outrider.engine.text import Tokenizer

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "bidirectional_spans")
ONLY_TEXT = "only text and token ids are served"


class EncodedPrompt(NamedTuple):
    text: str | None  # as the caller gave it, if at all
    token_ids: list[int]
    cache_salt: str | None
    bidirectional_spans: Sequence[Any] = ()  # as the caller gave them; the engine checks them


def encode_prompt(prompt: Prompt, get_tokenizer: Callable[[], Tokenizer]) -> EncodedPrompt:
    """`get_tokenizer` is asked only for a prompt that is text, and raises where there is none."""
    if isinstance(prompt, dict):
        text: Any = prompt.get("prompt")
        token_ids: Any = prompt.get("prompt_token_ids")
        if text is None and token_ids is None:
            raise ValueError("a prompt needs 'prompt' or 'prompt_token_ids', got "
                             f"{', '.join(map(str, prompt)) or 'nothing'}")
        for key in prompt:
            if key not in PROMPT_KEYS and prompt[key] is not None:
                hint = did_you_mean(str(key), PROMPT_KEYS) or ":"
                raise ValueError(f"a prompt's {shown(key)} is not supported{hint} {ONLY_TEXT}; known are "
                                 f"{', '.join(PROMPT_KEYS)}")
        check_value("prompt_token_ids", list | tuple | None, token_ids)
        check_value("prompt", str | None, text)
        token_ids = get_tokenizer().encode(text) if token_ids is None else list(token_ids)
        spans: Any = prompt.get("bidirectional_spans")
        check_value("bidirectional_spans", list | tuple | None, spans)
        return EncodedPrompt(text, token_ids, prompt.get("cache_salt"), spans or ())
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, get_tokenizer().encode(prompt), None)
    if not isinstance(prompt, (list, tuple)):
        raise ValueError(f"a prompt is a text, token ids or a dict, got {shown(prompt)}")
    return EncodedPrompt(None, list(prompt), None)
