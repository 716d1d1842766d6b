"""Computes block hashes of the prompt in a request's body. Prompts with a common prefix have the same first hashes,
which the router compares.

Texts are not tokenized, and chat templates are not applied: equal texts become equal tokens, which is all that routing
needs. Hashes are salted in each process (Python's `hash`), so clients cannot know which texts would collide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.server.bodies import parse_bounded
from outrider.server.errors import ApiError

BLOCK_CHARACTERS = 64  # about a page of 16 tokens
BLOCK_TOKENS = 16
MOST_BLOCKS = 1024  # of one prompt: a longer beginning does not change which replica holds it
# Fields that become part of a prompt, in the order in which templates write them.
PROMPT_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")


class PromptNames(NamedTuple):
    """The values of a body that decide which replica gets its request."""

    blocks: list[int]  # hashes of the prompt
    previous_response: str | None  # id of the stored response that the request continues


NO_NAMES = PromptNames([], None)


def read_names(body: bytes, tenant: bytes = b"") -> PromptNames:
    """Read a JSON body within the bounds that replicas have too. A body that replicas will refuse has no names."""
    try:
        given = parse_bounded(body)
        if not isinstance(given, dict):
            return NO_NAMES
        previous = given.get("previous_response_id")
        return PromptNames(prompt_blocks(given, tenant), previous if isinstance(previous, str) else None)
    except (ApiError, ValueError, RecursionError):  # a body may nest as deeply as can be read, and too deep to write
        return NO_NAMES


def body_blocks(body: bytes, tenant: bytes = b"") -> list[int]:
    """The block hashes of the prompt in a JSON body; none if no prompt can be read. `tenant`: the API key, which is
    part of the hashes because prefix caches of different keys are separate."""
    return read_names(body, tenant).blocks


def prompt_blocks(body: Mapping[str, Any], tenant: bytes = b"") -> list[int]:
    # A model of another name may be an adapter, whose pages are its own.
    first = hash((tenant, str(body.get("cache_salt")), str(body.get("model"))))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):  # of several prompts the first one counts
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return _chained(first, prompt, BLOCK_TOKENS)
    return _chained(first, "".join(_text(body.get(name)) for name in PROMPT_FIELDS), BLOCK_CHARACTERS)


def _text(value: Any) -> str:
    """Convert a field of the body to text for hashing. If one prompt is a prefix of another, its text is a prefix
    too."""
    match value:
        case None:
            return ""
        case str():
            return value
        case [str() as text, *_]:  # several prompts, of which the first counts
            return text
        case list():
            return "".join(json.dumps(item, sort_keys=True) for item in value)
    return json.dumps(value, sort_keys=True)


def _chained(before: int, values: Sequence[Any], size: int) -> list[int]:
    """Return a hash for each full block of values. Each hash also depends on all blocks before it."""
    blocks = []
    for end in range(size, min(len(values), size * MOST_BLOCKS) + 1, size):
        part = values[end - size : end]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        blocks.append(before)
    return blocks
