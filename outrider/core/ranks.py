"""Tensor parallelism: the sizes that are divided among the ranks, and the error for a lost rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RankLost(RuntimeError):
    """Raised if a rank could not reach the others, or waited for them too long. All ranks must run the same collective
    operations in the same order. After this error that is no longer sure, so no further step may run and all ranks
    start again."""


@dataclass(frozen=True)
class ShardSize:
    """A size of a layer that is divided among the ranks, such as its number of attention heads."""

    keys: tuple[str, ...]  # under which configs have it
    size: int
    may_copy: bool = False  # with more ranks than `size`, several ranks may hold the same piece

    def fits(self, num_ranks: int) -> bool:
        return self.size % num_ranks == 0 or (self.may_copy and num_ranks % self.size == 0)


def rank_refusal(name: str, refused: ShardSize, num_ranks: int, sizes: Sequence[ShardSize]) -> str:
    """Return the error message that refuses a number of ranks and lists the numbers that divide all `sizes`. name: the
    name of the size that cannot be divided."""
    *others, most = (n for n in range(1, max(size.size for size in sizes) + 1) if all(size.fits(n) for size in sizes))
    counts = f"{', '.join(map(str, others))} or {most} ranks" if others else f"{most} rank"
    return f"{name} is {refused.size}, which {num_ranks} ranks cannot share: use {counts}"
