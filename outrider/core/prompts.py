"""The forms in which callers give prompts, by the names that vLLM gives them."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    bidirectional_spans: NotRequired[list[list[int]]]  # [start, end) pairs whose tokens see each other both ways


class EmbedsPrompt(TypedDict):
    prompt_embeds: Any  # a numpy array or a torch tensor [tokens, hidden size], as the model's embedding would return
    prompt_token_ids: NotRequired[list[int]]  # for what reads ids: penalties, bad words, prompt logprobs, lookups
    cache_salt: NotRequired[str]
    bidirectional_spans: NotRequired[list[list[int]]]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Prompt: TypeAlias = str | list[int] | dict[str, Any]  # as it comes, before it is checked
