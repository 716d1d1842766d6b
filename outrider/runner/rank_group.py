"""Joining the ranks of a worker: the torch.distributed group that layers sum over, and the device of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from outrider.core.ranks import RankLost
from outrider.formats.ranks import RankGroup
from outrider.runner.device import pick_device
from outrider.runner.rank_link import ONE_RANK_LINK, Doing, RankLink, RankStatus
from outrider.runner.ranks import ProcessRanks

# The parent watches the ranks and ends them much earlier than a sum gives up; during start-up one rank may read its
# weights for long while another waits in a sum.
GROUP_SECONDS = 24 * 3600
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

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def count(self) -> int:
        return self.link.count


ONE_RANK = WorkerRanks(ONE_RANK_LINK, OneRank())


class WatchedRanks:
    """A `RankGroup` that shows its parent when it waits for other ranks, and calls every failure RankLost."""

    def __init__(self, group: RankGroup, status: RankStatus) -> None:
        self._group, self._status = group, status
        self.rank, self.count = group.rank, group.count

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        with self._watched():
            return self._group.sum(part)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        with self._watched():
            return self._group.gather(part, dim)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = self._status.doing
        self._status.begin(Doing.WAITING)
        try:
            yield
        except Exception as error:
            raise RankLost(f"rank {self.rank} lost the other ranks in a sum: {error}") from error
        self._status.begin(before)


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
    is_shared = device.type != "cuda" or _shares_device()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    seconds = timedelta(seconds=GROUP_SECONDS)
    # The system chooses the port, so that no other program can hold it.
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if link.rank == 0 else None
    port = link.decide(lambda: own.port if own is not None else 0)
    store = own or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    dist.init_process_group("gloo" if is_shared else "nccl", store=store, rank=link.rank, world_size=link.count,
                            timeout=seconds)
    return WorkerRanks(link, WatchedRanks(ProcessRanks(), status), link.count if is_shared else 1)


def _shares_device() -> bool:
    return os.environ.get(SHARED_DEVICE) == "1"
