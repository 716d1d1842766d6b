"""Prompt sets of benchmarks: a JSON file with a name, prompts, and whether they are a user's messages."""

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

    def encode(self, tokenizer: Tokenizer, count: int) -> list[list[int]]:
        """Token ids of `count` prompts; a set with fewer prompts is repeated."""
        texts = [self.prompts[i % len(self.prompts)] for i in range(count)]
        if self.is_chat and tokenizer.chat_templates:
            return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        return [tokenizer.encode(text) for text in texts]


def read_sets(paths: list[str] | None) -> list[PromptSet]:
    files = [Path(path) for path in paths] if paths else sorted(FOLDER.glob("*.json"))
    if not files:
        raise UsageError(f"there are no prompt sets in {FOLDER}: give some with --prompts FILE")
    return [_read(path) for path in files]


def _read(path: Path) -> PromptSet:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        prompts = data["prompts"]
        if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
            raise ValueError("prompts must be texts")
        return PromptSet(str(data.get("name", path.stem)), prompts, bool(data.get("chat", True)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f'{path} is not a prompt set, {{"name": ..., "prompts": [...]}}: {error!r}') from error
