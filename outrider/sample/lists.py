"""RowLists: lists of token ids that rows bring along: logit biases and bad words, in one arena, and allowed tokens.

    logit bias of n tokens     n ids, then n values (the bits of float32)
    n bad words                n pairs (offset, length), then the words' tokens, each word backwards

A row's lists are written when a request takes the row and stay until another does. Where a request's lists find no
place, its row is `unplaced`: batches that name it are sampled by the torch code, which takes `StepExtras`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from outrider.core import Axis, Limits
from outrider.core.params import SamplingParams
from outrider.kernels.buffers import buffer, to_device
from outrider.sample.arena import Arena


@dataclass(frozen=True)
class ListPlaces:
    """Where a row's lists lie in the arena."""

    bias_start: int = 0
    bias_len: int = 0
    words_start: int = 0
    num_words: int = 0


class RowLists:
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._device = device
        self._vocab = limits.vocab_size
        self._arena = Arena(limits.extent(Axis.LIST_INTS))
        self._starts: dict[int, list[int]] = {}  # by row
        self.unplaced: set[int] = set()
        self.ints = buffer(limits, Axis.LIST_INTS, dtype=torch.int32, device=device)
        self.allowed = buffer(limits, Axis.ROWS, Axis.MASK_WORDS, dtype=torch.int32, device=device)  # a bit per token

    @property
    def num_bytes(self) -> int:
        return 4 * (self.ints.numel() + self.allowed.numel())

    def are_placed(self, rows: list[int]) -> bool:
        return self.unplaced.isdisjoint(rows)

    def reset(self) -> None:
        """No row has a list."""
        self._arena = Arena(self._arena.size)
        self._starts.clear()
        self.unplaced.clear()

    def admit(self, row: int, params: SamplingParams) -> ListPlaces:
        """Writes the lists of the request that takes a row; those of its last owner are given back."""
        self.unplaced.discard(row)
        for start in self._starts.pop(row, ()):
            self._arena.free(start)
        if params.allowed_token_ids is not None:
            self.allowed[row].copy_(to_device(_mask_words(params.allowed_token_ids, self._vocab), torch.int32,
                                              self._device))
        bias, words = _bias_ints(params.effective_bias), _word_ints(params.bad_words_token_ids)
        return ListPlaces(self._place(row, bias), len(bias) // 2, self._place(row, words),
                          len(params.bad_words_token_ids))

    def _place(self, row: int, ints: list[int]) -> int:
        if not ints:
            return 0
        start = self._arena.allocate(len(ints))
        if start is None:
            self.unplaced.add(row)
            return 0
        self._starts.setdefault(row, []).append(start)
        self.ints[start : start + len(ints)].copy_(to_device(ints, torch.int32, self._device))
        return start


def _bias_ints(bias: dict[int, float]) -> list[int]:
    return [*bias, *struct.unpack(f"{len(bias)}i", struct.pack(f"{len(bias)}f", *bias.values()))]


def _word_ints(words: tuple[tuple[int, ...], ...]) -> list[int]:
    pairs: list[int] = []
    tokens: list[int] = []
    for word in words:
        pairs += [2 * len(words) + len(tokens), len(word)]
        tokens += reversed(word)
    return [*pairs, *tokens]


def _mask_words(tokens: list[int], vocab: int) -> list[int]:
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return [word - (word >> 31 << 32) for word in words]  # as signed integers
