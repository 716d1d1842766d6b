"""Prompts to train on: read from a file, or written by the target itself.

A chat model that is given the beginning of a user's turn writes a question (Magpie, arXiv 2406.08464). A model without
a chat template continues from its first token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.core.fields import shown
from outrider.engine.text import Tokenizer

FORMS = ("a text, or an object with one of \"prompt\", \"question\", \"turns\", \"messages\" and \"prompt_token_ids\"")
MARK = "\N{WHITE SQUARE}mark\N{WHITE SQUARE}"  # stands where the user's words begin


def read_prompts(path: Path, tokenizer: Tokenizer | None, *, vocab_size: int, max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts of a file, each once, without those of more than `max_tokens` tokens. One prompt a
    line, or JSON: a list (.json), an object or text a line (.jsonl)."""
    prompts = [_encode(place, item, tokenizer, vocab_size) for place, item in _items(path)]
    unique = {tuple(prompt): prompt for prompt in prompts if prompt}
    kept = [prompt for prompt in unique.values() if len(prompt) <= max_tokens]
    if not kept:
        why = f"all of its {len(unique)} prompts are longer than {max_tokens} tokens" if unique else "it has no prompt"
        raise ValueError(f"{path} cannot be trained on: {why}")
    return kept


def _items(path: Path) -> Iterable[tuple[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if path.suffix == ".json":
        items = _json(str(path), text)
        if not isinstance(items, list):
            raise ValueError(f"{path} must hold a list")
        return [(f"{path}, item {i}", item) for i, item in enumerate(items, start=1)]
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(place, _json(place, line)) for place, line in lines] if path.suffix == ".jsonl" else lines


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from None


def _encode(place: str, item: Any, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if isinstance(item, dict) and isinstance(item.get("prompt_token_ids"), list):
        ids = item["prompt_token_ids"]
        if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"{place}: prompt_token_ids must be token ids below {vocab_size}")
        return list(ids)
    messages = _messages(place, item)
    if tokenizer is None:
        raise ValueError(f"{place} is text, and the model has no tokenizer files: give prompt_token_ids, or copy "
                         "tokenizer.json beside the weights")
    if tokenizer.chat_templates:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n".join(str(message["content"]) for message in messages))


def _messages(place: str, item: Any) -> list[dict[str, Any]]:
    if isinstance(item, dict) and isinstance(item.get("messages"), list):
        messages: list[dict[str, Any]] = item["messages"]
        return messages
    found = item
    if isinstance(item, dict):
        turns = item.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        found = next((text for text in (item.get("prompt"), item.get("question"), first) if text is not None), None)
    if not isinstance(found, str):
        raise ValueError(f"{place} must be {FORMS}, got {shown(item)}")
    return [{"role": "user", "content": found}]


class SelfPrompts:
    """How the target is made to write prompts."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._turn: list[int] | None = None  # the beginning of a user's turn
        if tokenizer is not None and tokenizer.chat_templates:
            rendered = tokenizer.render_chat([{"role": "user", "content": MARK}])
            before, found, _ = rendered.partition(MARK)
            if not found:
                raise ValueError("the model's chat template does not show a user's words as they are, so that the "
                                 "model cannot write prompts: give some with --prompts")
            self._turn = tokenizer.encode(before, add_special_tokens=False)

    def seed_prompt(self, index: int) -> list[int]:
        """What the target continues to write prompt `index`."""
        if self._turn:
            return self._turn
        first = None if self._tokenizer is None else self._tokenizer.bos_token_id
        # Without a token that begins texts every token begins some.
        return [index % self._vocab_size if first is None else first]

    def prompt_from(self, seed: list[int], written: list[int], eos_ids: tuple[int, ...]) -> list[int] | None:
        """The prompt that the target wrote; None if it wrote nothing."""
        while written and written[-1] in eos_ids:
            written = written[:-1]
        if self._turn is None or self._tokenizer is None:
            return [*seed, *written] if written else None
        text = self._tokenizer.decode(written).strip()
        return self._tokenizer.encode_chat([{"role": "user", "content": text}]) if text else None
