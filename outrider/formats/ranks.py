"""RankGroup: the interface of layers and formats to the ranks that hold one model together (tensor parallelism).

A rank holds its part of every sharded weight. During a forward pass, ranks only sum tensors or gather them; both give
the same bits on every rank. `runner/ranks.py` implements the group over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class RankGroup(Protocol):
    """The sum and the gather over ranks. Every rank must call them in the same order with tensors of equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts, added in rank order, so that every rank gets the same bits."""

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the parts of all ranks side by side along `dim`, in rank order."""


def integers_of_rank_0(group: RankGroup, own: torch.Tensor) -> torch.Tensor:
    """Replace each rank's int64 tensor by rank 0's. Groups on GPUs gather floating-point numbers, so the integers' bits
    are sent as floats."""
    bits = own.contiguous().view(-1).view(torch.float32)
    return group.gather(bits)[: bits.numel()].contiguous().view(torch.int64).view(own.shape)


@dataclass(frozen=True)
class UnsummedRanks:
    """The ranks of a layer that does not sum its result over ranks. Its caller first adds several results, and then
    sums them over ranks once. Rank 0 adds biases, the others do not."""

    rank: int
    count: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        raise AssertionError("gather is not supported before the ranks are summed: this is a bug")
