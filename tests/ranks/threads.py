"""Ranks as threads of one process: the reference for sums between processes, on any device.

Sums are plain additions in the order of ranks. Captured steps cannot use these ranks, since they wait for each other on
the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from outrider.runner.ranks import WIDE

DEADLINE = 300  # seconds that a rank waits for others


class ThreadRanks:
    """A `RankGroup` of one thread. `slots` has the place of each rank's part; all ranks have the same one."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.count = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        first, *others = self._parts(part)
        total = first if part.dtype in WIDE else first.float()
        for other in others:
            total = total + other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._parts(part), dim)

    def _parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Copies: the caller may write to its part when the sum is made."""
        self._slots[self.rank] = part
        self._meet(part.device)
        parts = [other.clone() for other in self._slots]
        self._meet(part.device)
        return parts

    def _meet(self, device: torch.device) -> None:
        """Wait until every rank is here and its kernels have run, which may be on streams of their own."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._barrier.wait(DEADLINE)


def run_threads(count: int, task: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of task(group, *args) on ranks that are threads."""
    slots: list[Any] = [None] * count
    barrier, results, errors = threading.Barrier(count), [None] * count, list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = task(ThreadRanks(rank, slots, barrier), *args)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
