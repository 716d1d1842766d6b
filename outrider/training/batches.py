"""Chooses the texts of each training step. The choice depends only on the settings and the step's number, so that a
resumed run continues exactly.

A step has whole texts of about `batch_tokens` tokens. It is computed in micro-batches of texts of similar length,
padded to the longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

MAX_MICRO_TEXTS = 256


@dataclass(frozen=True)
class BatchPlan:
    """The order of the texts over all epochs."""

    lengths: tuple[int, ...]  # tokens of each text
    batch_tokens: int
    micro_tokens: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        assert self.lengths, "there is a text"
        assert max(self.lengths) <= self.micro_tokens, "every text fits into a micro-batch"

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch. Every epoch has the same number, so that a step's number determines the
        place in the run."""
        return min(len(self.lengths), -(-sum(self.lengths) // self.batch_tokens))

    @property
    def num_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def texts_of(self, step: int) -> list[int]:
        """Indexes of a step's texts. Every step has an equal share of the epoch's texts, in the epoch's order."""
        epoch, part = divmod(step, self.steps_per_epoch)
        order, count = self._order(epoch), len(self.lengths)
        start, stop = (count * i // self.steps_per_epoch for i in (part, part + 1))
        return order[start:stop]

    def micro_batches(self, step: int) -> list[list[int]]:
        return micro_batches(self.texts_of(step), self.lengths, self.micro_tokens)

    def _order(self, epoch: int) -> list[int]:
        return _shuffled(len(self.lengths), self.seed, epoch)


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def micro_batches(indexes: Sequence[int], lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Sort texts by falling length, and group them so that a group's padded size is at most `micro_tokens`."""
    groups: list[list[int]] = []
    for index in sorted(indexes, key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or longest * (len(groups[-1]) + 1) > micro_tokens or len(groups[-1]) == MAX_MICRO_TEXTS:
            groups.append([])
        groups[-1].append(index)
    return groups
