"""ProcessRanks: sums tensors over the processes of a torch.distributed group.

Sums are gathered and then added in the order of ranks, because an all-reduce may choose its order by the tensor's size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

WIDE = (torch.float32, torch.float64)


class ProcessRanks:
    """A `RankGroup` over the processes of an existing torch.distributed group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: the torch.distributed group; None: the process's default group."""
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Add the parts of all ranks. 16-bit parts are added in float32, and the sum is rounded once."""
        first, *others = self._parts(part)
        total = first if part.dtype in WIDE else first.float()
        for other in others:
            total += other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._parts(part), dim)

    def _parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return parts
