"""DeviceRanks: ranks (tensor parallelism) whose GPUs can read each other's memory. A sum or a gather is one kernel
launch, which can be captured.

CUDA's IPC handles give the processes of other ranks access to a GPU's memory. kernels/gpu/rank_exchange.py describes
how they use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from outrider.kernels.gpu.rank_exchange import (
    BUFFER_BYTES,
    PROGRAMS,
    Exchange,
    gather_over_ranks,
    sum_over_ranks,
)

Rebuild = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class DeviceRanks:
    """A `RankGroup` over processes whose GPUs can read each other's memory, or that share one GPU."""

    def __init__(self, device: torch.device, max_wait_s: float, group: dist.ProcessGroup | None = None) -> None:
        """group: a torch.distributed group (gloo) in which the processes exchange Python objects; None: the default
        group."""
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        own = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # it is zero before anyone writes into it
        handles: list[Rebuild | None] = [None] * self.count
        dist.all_gather_object(handles, reduce_tensor(own), group=group)
        self._buffers = [own if rank == self.rank else _mapped(handle) for rank, handle in enumerate(handles)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in self._buffers], device=device)
        self._late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        counts = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        given_up = torch.zeros(1, dtype=torch.int32, device=device)
        self._exchange = Exchange(self.rank, self.count, addresses, counts, given_up, self._late, int(max_wait_s * 1e9))
        dist.barrier(group)  # all have mapped all before the first exchange

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(part.contiguous(), self._exchange)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if dim % part.ndim == part.ndim - 1:
            return gather_over_ranks(part.contiguous(), self._exchange)
        moved = part.movedim(dim, -1)
        return gather_over_ranks(moved.contiguous(), self._exchange).movedim(-1, dim)

    @property
    def late_rank(self) -> int | None:
        """Return the rank that missed an exchange's time limit. The results of all steps since then are undefined."""
        number = int(self._late[0])
        return number - 1 if number else None


def _mapped(handle: Rebuild | None) -> torch.Tensor:
    assert handle is not None
    rebuild, args = handle
    return rebuild(*args)
