"""Prompts to train on: read from a file, or written by the target itself.

A chat model that is given the beginning of a user's turn writes a question (Magpie, arXiv 2406.08464). Small models
then write similar questions again and again. So half of the turns begin with the first words of a task, and the model
writes the rest, including the passage that the task is about. A model without a chat template continues from its first
token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.core.fields import check_value, shown
from outrider.engine.messages import with_plain_content
from outrider.engine.text import Tokenizer

FORMS = ("a text, or an object with one of \"prompt\", \"question\", \"turns\", \"messages\" and \"prompt_token_ids\"")
# First words of tasks. Those that end with a line are about a passage, which comes next.
OPENERS = (
    "Summarize the following text in three sentences:\n", "Translate the following text from English to German:\n",
    "Read the passage and answer the question below it.\n\nPassage:", "Write a short story about", "Explain how",
    "Write a Python function that", "Write an email to", "Give a step-by-step solution: a shop sells",
    "Summarize the main points of this article:\n", "Rewrite the following paragraph so that it is clearer:\n",
    "What is the difference between", "Imagine you are", "List the names and dates in the following text as JSON:\n",
    "Translate the following text from English to French:\n", "Who was the first", "Compare the advantages of",
    "Use these search results to answer the question at the end.\n\n[1]", "How many", "Write an essay about",
    "Solve the equation", "Describe the history of", "Correct the mistakes in this text:\n", "Write a review of",
    "Here is a conversation. Reply as the next speaker.\n", "Plan a trip to", "Write a SQL query that", "Why do",
    "Classify the following sentences as positive or negative:\n", "Translate the following text to English:\n",
    "Let's play a game. You are", "What happens if", "Give me a recipe for", "In which year", "Prove that",
)
MARK = "\N{WHITE SQUARE}mark\N{WHITE SQUARE}"  # stands where the user's words begin


def read_prompts(path: Path, tokenizer: Tokenizer | None, *, vocab_size: int, max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts of a file, without duplicates, empty prompts and prompts of more than `max_tokens`
    tokens. The file has one prompt a line, or is JSON: a list (.json), or an object or text a line (.jsonl)."""
    prompts = [_encode(place, item, tokenizer, vocab_size) for place, item in _items(path)]
    unique = {tuple(prompt): prompt for prompt in prompts if prompt}
    kept = [prompt for prompt in unique.values() if len(prompt) <= max_tokens]
    if not kept:
        why = f"all of its {len(unique)} prompts are longer than {max_tokens} tokens" if unique else "it has no prompt"
        raise ValueError(f"{path} cannot be trained on: {why}")
    return kept


def _items(path: Path) -> Iterable[tuple[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: correct --prompts")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    if path.suffix == ".json":
        items = _json(str(path), text)
        if not isinstance(items, list):
            raise ValueError(f"{path} must hold a list of prompts, in square brackets")
        return [(f"{path}, item {i}", item) for i, item in enumerate(items, start=1)]
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(place, _json(place, line)) for place, line in lines] if path.suffix == ".jsonl" else lines


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON ({error}): correct it") from None


def _encode(place: str, item: Any, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if isinstance(item, dict) and isinstance(item.get("prompt_token_ids"), list):
        ids = item["prompt_token_ids"]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"{place}: prompt_token_ids must be token ids below {vocab_size}")
        return list(ids)
    messages = _messages(place, item)
    if tokenizer is None:
        raise ValueError(f"{place} is text, and the model has no tokenizer files: give prompt_token_ids, or copy "
                         "tokenizer.json beside the weights")
    try:
        check_value("messages", list[dict[str, Any]], messages)
        messages = [dict(with_plain_content(message)) for message in messages]
        if not any(str(message.get("content") or "").strip() for message in messages):
            return []  # as an empty line of a text file
        if tokenizer.chat_templates:
            return tokenizer.encode_chat(messages)
        return tokenizer.encode("\n".join(str(message.get("content") or "") for message in messages))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


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
    """Makes the target write prompts: gives the target their beginnings, and reads the prompts from its outputs."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._turn = ""  # the beginning of a user's turn
        if tokenizer is not None and tokenizer.chat_templates:
            rendered = tokenizer.render_chat([{"role": "user", "content": MARK}])
            self._turn, found, _ = rendered.partition(MARK)
            if not found:
                raise ValueError("the model's chat template changes the words of a user message, so the model cannot "
                                 "write prompts of its own: give some with --prompts")

    def opener(self, index: int) -> str:
        """The words that prompt `index` begins with. Prompts come in fours: two without such words, then two with the
        words of a task. Answers alternate between greedy and sampled (`AnswerPlan`), so both kinds of prompts get both
        kinds of answers."""
        return OPENERS[index // 4 % len(OPENERS)] if self._turn and index // 2 % 2 else ""

    def seed_prompt(self, index: int) -> list[int]:
        """The tokens that the target continues when it writes prompt `index`."""
        if self._turn and self._tokenizer is not None:
            return self._tokenizer.encode(self._turn + self.opener(index), add_special_tokens=False)
        first = None if self._tokenizer is None else self._tokenizer.bos_token_id
        # Without a token that begins texts every token begins some.
        return [index % self._vocab_size if first is None else first]

    def num_given_tokens(self, index: int) -> int:
        """The number of tokens of prompt `index` that the target does not write: those of the template, and the words
        of a task."""
        if self._turn and self._tokenizer is not None:
            return len(self._tokenizer.encode_chat([{"role": "user", "content": self.opener(index)}]))
        return len(self.seed_prompt(index))

    def prompt_from(self, index: int, written: list[int], eos_ids: tuple[int, ...]) -> list[int] | None:
        """Make prompt `index` from the tokens that the target wrote for it. Returns None if the target wrote
        nothing."""
        while written and written[-1] in eos_ids:
            written = written[:-1]
        if not self._turn or self._tokenizer is None:
            return [*self.seed_prompt(index), *written] if written else None
        text = self._tokenizer.decode(written)
        whole = (self.opener(index) + text).strip()
        return self._tokenizer.encode_chat([{"role": "user", "content": whole}]) if text.strip() else None
