"""Prompts in all their forms, encoded in one place: text, token ids, or a dict with either and a cache salt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outrider.engine.text import Tokenizer

Prompt = str | list[int] | dict[str, Any]


class EncodedPrompt(NamedTuple):
    text: str | None  # as the caller gave it, if at all
    token_ids: list[int]
    cache_salt: str | None


def encode_prompt(prompt: Prompt, get_tokenizer: Callable[[], Tokenizer]) -> EncodedPrompt:
    """`get_tokenizer` is asked only for a prompt that is text, and raises where there is none."""
    if isinstance(prompt, dict):
        salt = prompt.get("cache_salt")
        if "prompt_token_ids" in prompt:
            return EncodedPrompt(prompt.get("prompt"), list(prompt["prompt_token_ids"]), salt)
        if "prompt" not in prompt:
            raise ValueError(f"a prompt needs 'prompt' or 'prompt_token_ids', got {', '.join(prompt) or 'nothing'}")
        return EncodedPrompt(prompt["prompt"], get_tokenizer().encode(prompt["prompt"]), salt)
    if isinstance(prompt, str):
        return EncodedPrompt(prompt, get_tokenizer().encode(prompt), None)
    if not isinstance(prompt, (list, tuple)):
        raise ValueError(f"a prompt is a text, token ids or a dict, got {prompt!r}")
    return EncodedPrompt(None, list(prompt), None)
