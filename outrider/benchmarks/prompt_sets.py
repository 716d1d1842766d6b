"""Prompt sets of benchmarks. A set is a JSON file with a name, prompts, and whether the prompts are a user's messages.
A .jsonl file in the form of Spec-Bench has one set for each category."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.commands.parser import UsageError
from outrider.engine.text import Tokenizer

FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: list[str]
    is_chat: bool
    is_category: bool = False  # one of several in a file

    def encode(self, tokenizer: Tokenizer, count: int) -> list[list[int]]:
        """Token ids of `count` prompts. If the set has fewer, its prompts are repeated."""
        texts = [self.prompts[i % len(self.prompts)] for i in range(count)]
        if self.is_chat and tokenizer.chat_templates:
            return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        return [tokenizer.encode(text) for text in texts]


def read_sets(paths: list[str] | None) -> list[PromptSet]:
    files = [Path(path) for path in paths] if paths else sorted(FOLDER.glob("*.json"))
    if not files:
        raise UsageError(f"there are no prompt sets in {FOLDER}: give some with --prompts FILE")
    return [prompts for path in files for prompts in _read(path)]


def _read(path: Path) -> list[PromptSet]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}: correct the path of --prompts")
    return _read_categories(path) if path.suffix == ".jsonl" else [_read_set(path)]


def _read_categories(path: Path) -> list[PromptSet]:
    """The first turn of each question of Spec-Bench, by category. Categories are in the order of the file."""
    categories: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            category, first = question["category"], question["turns"][0]
            if not isinstance(category, str) or not isinstance(first, str) or not first:
                raise ValueError("category and turns must be texts")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(f'{path}, line {number} is not a question, {{"category": ..., "turns": [...]}}: {error!r}'
                             ) from error
        categories.setdefault(category, []).append(first)
    if not categories:
        raise UsageError(f"{path} holds no question: give a file with one {{\"category\": ..., \"turns\": [...]}} a "
                         "line")
    return [PromptSet(name, prompts, is_chat=True, is_category=True) for name, prompts in categories.items()]


def _read_set(path: Path) -> PromptSet:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        prompts = data["prompts"]
        if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
            raise ValueError("prompts must be texts")
        return PromptSet(str(data.get("name", path.stem)), prompts, bool(data.get("chat", True)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f'{path} is not a prompt set, {{"name": ..., "prompts": [...]}}: {error!r}') from error
