"""WorkerRanks: sums of tensors, and agreements, between the ranks of one worker. Most workers have one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.core.ranks import RankLost
from outrider.formats.ranks import RankGroup, integers_of_rank_0
from outrider.runner.rank_link import ONE_RANK_LINK, RankLink

if TYPE_CHECKING:
    from outrider.runner.device_ranks import DeviceRanks  # with Triton, which a CPU need not have
    from outrider.runner.rank_status import RankStatus

DEVICE_SECONDS = 900.0  # that a sum on a GPU waits for another rank, which may be compiling kernels


class OneRank:
    """The `RankGroup` of a worker that holds the whole model."""

    rank, count = 0, 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return part


@dataclass(frozen=True)
class WorkerRanks:
    """A rank's two connections to the other ranks of its model: the group that sums tensors, and the link over which
    the host processes agree."""

    link: RankLink
    group: RankGroup
    num_sharing: int = 1  # ranks that use the memory of this rank's device
    device_ranks: DeviceRanks | None = None  # those behind `group`, where GPUs read each other's memory

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def count(self) -> int:
        return self.link.count

    @contextmanager
    def without_sums(self) -> Iterator[None]:
        """A context for users' code, in which sums over ranks raise an error. Such code may fail on one rank alone, and
        the other ranks would then wait for ever in a sum."""
        if not isinstance(self.group, WatchedRanks):
            yield
            return
        self.group.is_open = False
        try:
            yield
        finally:
            self.group.is_open = True

    def integers_of_rank_0(self, own: torch.Tensor) -> torch.Tensor:
        """Return rank 0's int64 tensor on every rank."""
        return integers_of_rank_0(self.group, own)

    def check(self) -> None:
        """Raise RankLost if a sum on a GPU timed out waiting for a rank: results since then are undefined. Called when
        the device has run a step, before its result is read."""
        late = None if self.device_ranks is None else self.device_ranks.late_rank
        if late is not None:
            raise RankLost(f"rank {self.rank} waited {DEVICE_SECONDS:.0f} s for rank {late} in a sum over all ranks, "
                           f"and rank {late} did not come")


ONE_RANK = WorkerRanks(ONE_RANK_LINK, OneRank())


class WatchedRanks:
    """A `RankGroup` that tells the parent process when it waits for other ranks. It raises every failure of a sum as
    RankLost."""

    def __init__(self, group: RankGroup, status: RankStatus) -> None:
        self._group, self._status = group, status
        self.is_open = True
        self.rank, self.count = group.rank, group.count

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        with self._watched():
            return self._group.sum(part)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        with self._watched():
            return self._group.gather(part, dim)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if not self.is_open:
            raise RuntimeError("a drafter of your own cannot run layers of the target with tensor_parallel_size above "
                               "1, because all ranks must compute them together: use tensor_parallel_size=1, or "
                               "another drafter")
        try:
            with self._status.waiting():
                yield
        except Exception as error:
            raise RankLost(f"rank {self.rank} lost the other ranks in a sum: {error}") from error
