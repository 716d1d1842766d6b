"""Joining the ranks of a worker: the torch.distributed group that layers sum over, and the device of a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outrider.core.ranks import RankLost
from outrider.formats.ranks import RankGroup, integers_of_rank_0
from outrider.runner.device import pick_device
from outrider.runner.rank_link import ONE_RANK_LINK, RankLink, RankStatus
from outrider.runner.ranks import ProcessRanks

if TYPE_CHECKING:
    from outrider.runner.device_ranks import DeviceRanks  # with Triton, which a CPU need not have

# The parent watches the ranks and ends them much earlier than a sum gives up; during start-up one rank may read its
# weights for long while another waits in a sum.
GROUP_SECONDS = 24 * 3600
DEVICE_SECONDS = 900.0  # that a sum on a GPU waits for another rank, which may be compiling kernels
MAX_DEVICE_RANKS = 16  # that sum through each other's memory
SHARED_DEVICE = "OUTRIDER_RANKS_SHARE_DEVICE"  # tests: set to 1, all ranks use the first CUDA device


class OneRank:
    """The `RankGroup` of a worker that holds the whole model."""

    rank, count = 0, 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return part


@dataclass(frozen=True)
class WorkerRanks:
    """A rank's place among those that hold a model together: how tensors are summed, and how hosts agree."""

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
        """Within, sums raise an error: code of users may fail on one rank alone, and the others would wait for it."""
        if not isinstance(self.group, WatchedRanks):
            yield
            return
        self.group.is_open = False
        try:
            yield
        finally:
            self.group.is_open = True

    def integers_of_rank_0(self, own: torch.Tensor) -> torch.Tensor:
        """Rank 0's int64 tensor, in place of the rank's own."""
        return integers_of_rank_0(self.group, own)

    def check(self) -> None:
        """Raise RankLost if a sum on a GPU waited for a rank in vain: results since then are undefined. Called when the
        device has run the step whose result is to be read."""
        late = None if self.device_ranks is None else self.device_ranks.late_rank
        if late is not None:
            raise RankLost(f"rank {late} did not come to a sum of rank {self.rank} in {DEVICE_SECONDS:.0f} s")


ONE_RANK = WorkerRanks(ONE_RANK_LINK, OneRank())


class WatchedRanks:
    """A `RankGroup` that shows its parent when it waits for other ranks, and calls every failure RankLost."""

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
            raise RuntimeError("a drafter of your own cannot run layers of the target where tensor_parallel_size is "
                               "above 1: their sums need all ranks")
        try:
            with self._status.waiting():
                yield
        except Exception as error:
            raise RankLost(f"rank {self.rank} lost the other ranks in a sum: {error}") from error


def device_of_rank(name: str, link: RankLink) -> str:
    """The setting `device` of one rank: every rank has a CUDA device of its own, or all of them the CPU."""
    device = pick_device(name)
    if link.count == 1 or device.type != "cuda":
        return name
    if device.index is not None:
        raise ValueError(f"device={name!r} names one device, and tensor_parallel_size={link.count} uses several: say "
                         "device='cuda', and choose devices with CUDA_VISIBLE_DEVICES")
    if _shares_device():
        return "cuda:0"
    found = torch.cuda.device_count()
    if link.count > found:
        raise ValueError(f"tensor_parallel_size={link.count}, and this machine has {found} CUDA device"
                         f"{'s' * (found != 1)} that torch can use: use at most {found} ranks")
    return f"cuda:{link.rank}"


def join_ranks(link: RankLink, status: RankStatus, device_name: str) -> WorkerRanks:
    """Meet the other ranks. `device_name`: what `device_of_rank` returned."""
    if link.count == 1:
        return ONE_RANK
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // link.count))  # ranks share the cores
    is_shared = device.type != "cuda" or _shares_device()
    uses_memory = link.count <= MAX_DEVICE_RANKS and all(link.gather(_reaches_all(device, link)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    seconds = timedelta(seconds=GROUP_SECONDS)
    # The system chooses the port, so that no other program can hold it.
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if link.rank == 0 else None
    port = link.decide(lambda: own.port if own is not None else 0)
    store = own or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    backend = "gloo" if uses_memory or device.type != "cuda" else "nccl"
    dist.init_process_group(backend, store=store, rank=link.rank, world_size=link.count,
                            timeout=seconds)
    num_sharing = link.count if is_shared else 1
    if not uses_memory:
        return WorkerRanks(link, WatchedRanks(ProcessRanks(), status), num_sharing)
    from outrider.runner.device_ranks import DeviceRanks

    device_ranks = DeviceRanks(device, DEVICE_SECONDS)
    return WorkerRanks(link, WatchedRanks(device_ranks, status), num_sharing, device_ranks)


def _reaches_all(device: torch.device, link: RankLink) -> bool:
    """Whether the rank has a GPU that can read the memory of all others."""
    if device.type != "cuda":
        return False
    others = [other for other in range(link.count) if other != link.rank]
    return _shares_device() or all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _shares_device() -> bool:
    return os.environ.get(SHARED_DEVICE) == "1"
