"""RowLists: the lists of token ids among the sampling parameters of rows: logit biases and bad words, in one arena, and
allowed tokens.

    logit bias of n tokens     n ids, then n values (the bits of float32)
    n bad words                n pairs (offset, length), then the words' tokens, each word backwards

A row's lists are written when a request is admitted to the row, and stay until the next admission. If there is no room
for a request's lists, its row is `unplaced`: batches with this row are sampled by the torch code, which reads
`StepExtras`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from outrider.core import Axis, Limits
from outrider.core.params import MAX_BIAS, SamplingParams
from outrider.kernels.buffers import buffer, send
from outrider.sample.arena import Arena

T = TypeVar("T")
NUM_KEPT = 16  # packed lists


@dataclass(frozen=True)
class ListPlaces:
    """The places of a row's lists in the arena."""

    bias_start: int = 0
    bias_len: int = 0
    words_start: int = 0
    num_words: int = 0


NOWHERE = ListPlaces()


class PackedLists:
    """Keeps the lists that were packed last, as device tensors, so that a list that many requests share is packed once.
    Lists are found by identity, which is safe because the engine's copies of a caller's lists never change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, tuple[object, torch.Tensor]] = {}  # by the list's id, with the list, so that it lives

    def get(self, given: T, pack: Callable[[T], np.ndarray]) -> torch.Tensor:
        if id(given) not in self._kept:
            if len(self._kept) == NUM_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[id(given)] = given, send(torch.from_numpy(pack(given)), self._device)
        return self._kept[id(given)][1]


class RowLists:
    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._arena = Arena(limits.extent(Axis.LIST_INTS))
        self._starts: dict[int, list[int]] = {}  # by row
        self._packed = PackedLists(device)
        self.unplaced: set[int] = set()
        self.ints = buffer(limits, Axis.LIST_INTS, dtype=torch.int32, device=device)
        self.allowed = buffer(limits, Axis.ROWS, Axis.MASK_WORDS, dtype=torch.int32, device=device)  # a bit per token

    @property
    def num_bytes(self) -> int:
        return 4 * (self.ints.numel() + self.allowed.numel())

    def are_placed(self, rows: list[int]) -> bool:
        return self.unplaced.isdisjoint(rows)

    def reset(self) -> None:
        """Forget the lists of all rows."""
        self._arena = Arena(self._arena.size)
        self._starts.clear()
        self.unplaced.clear()

    def admit(self, row: int, params: SamplingParams) -> ListPlaces:
        """Write the lists of a request that is admitted to the row, and free the lists of the row's last request."""
        self.unplaced.discard(row)
        for start in self._starts.pop(row, ()):
            self._arena.free(start)
        if params.allowed_token_ids is not None:
            self.allowed[row].copy_(self._packed.get(params.allowed_token_ids, self._mask_words))
        bias, words = params.logit_bias, params.bad_words_token_ids
        if not bias and not words:
            return NOWHERE
        return ListPlaces(self._place(row, bias, _bias_ints) if bias else 0, len(bias or ()),
                          self._place(row, words, _word_ints) if words else 0, len(words))

    def _place(self, row: int, given: T, pack: Callable[[T], np.ndarray]) -> int:
        ints = self._packed.get(given, pack)
        start = self._arena.allocate(len(ints))
        if start is None:
            self.unplaced.add(row)
            return 0
        self._starts.setdefault(row, []).append(start)
        self.ints[start : start + len(ints)].copy_(ints)
        return start

    def _mask_words(self, tokens: Sequence[int]) -> np.ndarray:
        is_allowed = np.zeros(32 * self.allowed.shape[1], dtype=bool)
        is_allowed[np.array(tokens)] = True
        return np.packbits(is_allowed, bitorder="little").view(np.int32)


def _bias_ints(bias: dict[int, float]) -> np.ndarray:
    values = np.fromiter(bias.values(), np.float64, len(bias)).clip(-MAX_BIAS, MAX_BIAS).astype(np.float32)
    return np.concatenate([np.fromiter(bias, np.int32, len(bias)), values.view(np.int32)])


def _word_ints(words: tuple[tuple[int, ...], ...]) -> np.ndarray:
    pairs: list[int] = []
    tokens: list[int] = []
    for word in words:
        pairs += [2 * len(words) + len(tokens), len(word)]
        tokens += reversed(word)
    return np.array([*pairs, *tokens], dtype=np.int32)
