"""Types of the prompts that callers may give. Names are vLLM's."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]
    cache_session: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_session: NotRequired[str]
    bidirectional_spans: NotRequired[list[list[int]]]  # [start, end) pairs whose tokens see each other both ways


class EmbedsPrompt(TypedDict):
    prompt_embeds: Any  # a numpy array or a torch tensor [tokens, hidden size], as the model's embedding would return
    prompt_embeds_positions: NotRequired[list[int]]  # positions of the embeddings; the other tokens are ids
    prompt_token_ids: NotRequired[list[int]]  # for what reads ids: penalties, bad words, prompt logprobs, lookups
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    cache_session: NotRequired[str]
    bidirectional_spans: NotRequired[list[list[int]]]


# Keys of a prompt in the form of a dict, with the types of their values. Features add theirs (`feature_list.py`).
PROMPT_KEYS: dict[str, Any] = {
    "prompt": str | None, "prompt_token_ids": list | tuple | None, "cache_salt": str | None,
}
NEEDED_KEYS = ("prompt", "prompt_token_ids")  # a prompt has one of them, or a key of a feature in their place
PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Prompt: TypeAlias = str | list[int] | dict[str, Any]  # as it comes, before it is checked
