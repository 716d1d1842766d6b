"""Texts to train on, and the folder that keeps them.

A text is a prompt with the answer that the target gave. Texts are kept in shards (files of many texts). Each shard is
written as a whole, so a run that was killed continues with the first missing shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.training.workspace import replace_file

MAX_HELD_OUT = 256  # texts that acceptance is measured on


@dataclass(frozen=True)
class TrainingText:
    tokens: tuple[int, ...]  # prompt and answer
    answer_from: int  # index of the answer's first token
    is_greedy: bool  # whether the answer was made without a temperature

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.answer_from]

    def num_places(self, num_drafts: int) -> int:
        """The number of positions at which `num_drafts` drafts can be trained: those whose next `num_drafts` tokens
        belong to the answer. The first token of a text is never one."""
        return max(0, len(self.tokens) - num_drafts - max(1, self.answer_from - 1))

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.answer_from :]


class TextStore:
    """The shards of one training run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shard_path(self, index: int) -> Path:
        return self._folder / f"texts-{index:05d}.safetensors"

    def has_shard(self, index: int) -> bool:
        return self.shard_path(index).exists()

    def write(self, index: int, texts: Sequence[TrainingText]) -> None:
        values = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "answer_from": torch.tensor([text.answer_from for text in texts], dtype=torch.int32),
            "is_greedy": torch.tensor([text.is_greedy for text in texts], dtype=torch.bool),
        }
        replace_file(self.shard_path(index), lambda path: save_file(values, path))

    def read(self, index: int) -> Iterator[TrainingText]:
        try:
            with safe_open(self.shard_path(index), framework="pt") as file:
                tokens, lengths, answer_from, is_greedy = (
                    file.get_tensor(name).tolist() for name in ("tokens", "lengths", "answer_from", "is_greedy")
                )
        except SafetensorError as error:
            raise ValueError(f"{self.shard_path(index)} is damaged ({error}): delete it and run again with --resume, "
                             "which generates these texts again") from None
        start = 0
        for length, first, greedy in zip(lengths, answer_from, is_greedy, strict=True):
            yield TrainingText(tuple(tokens[start : start + length]), first, greedy)
            start += length

    def read_all(self) -> list[TrainingText]:
        texts: list[TrainingText] = []
        index = 0
        while self.has_shard(index):
            texts += self.read(index)
            index += 1
        return texts


@dataclass(frozen=True)
class SplitTexts:
    training: list[TrainingText]
    held_out: list[TrainingText]  # greedy ones, whose prompts occur in no training text


def split_texts(texts: Sequence[TrainingText], share: float) -> SplitTexts:
    """Choose held-out texts by a hash of their prompts, so that all answers to a prompt are either trained on or held
    out. At least one greedy text is held out, and at most MAX_HELD_OUT are kept."""
    def rank(text: TrainingText) -> bytes:
        return hashlib.sha256(repr(text.prompt).encode()).digest()

    greedy = sorted({rank(text) for text in texts if text.is_greedy})
    chosen = set(greedy[: min(MAX_HELD_OUT, max(1, round(share * len(greedy))))])
    held_out = [text for text in texts if text.is_greedy and rank(text) in chosen]
    return SplitTexts([text for text in texts if rank(text) not in chosen], held_out[:MAX_HELD_OUT])


def count_answer_tokens(texts: Sequence[TrainingText], vocab_size: int) -> torch.Tensor:
    """Return [vocabulary]: how often each token occurs in the answers."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(texts), 1024):
        said = [token for text in texts[start : start + 1024] for token in text.answer]
        counts += torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=vocab_size)
    return counts
