"""AdapterArena: the device memory of adapters. Each takes its real size in one flat tensor, at an offset that the
scheduler has chosen (`sched/adapter_slots.py`); tables say where the factors of each slot and target begin.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.adapters.host_adapter import Entry, HostAdapter
from outrider.adapters.targets import Targets
from outrider.core import Axis, Limits
from outrider.kernels.buffers import buffer, send

NUM_PLACES = 3  # columns of `places`: where the first and the second factor begin, and their rank
NO_SLOT = -1  # of rows without an adapter


class AdapterArena:
    def __init__(self, targets: Targets, limits: Limits, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.targets, self.device = targets, device
        self.numbers = buffer(limits, Axis.ADAPTER_NUMBERS, dtype=dtype, device=device)
        tables = limits, Axis.ADAPTER_SLOTS, Axis.ADAPTER_TARGETS
        # A rank of 0 says that the slot's adapter does not change the target.
        self.places = torch.stack([buffer(*tables, dtype=torch.int64, device=device)] * NUM_PLACES, dim=-1)
        self.scales = buffer(*tables, dtype=wide, device=device)
        self.slot_of_row = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device, fill=NO_SLOT)
        self._entries: dict[int, dict[int, Entry]] = {}  # by slot and target, as in the tables

    def place(self, adapter: HostAdapter, slot: int, offset: int) -> None:
        """Copy an adapter to its place. Queued behind the steps that may still read the memory."""
        end = offset + adapter.size
        assert end <= len(self.numbers), "the scheduler has placed an adapter beyond the arena"
        self.numbers[offset:end].copy_(adapter.numbers, non_blocking=True)
        places = torch.zeros(self.places.shape[1:], dtype=torch.int64)
        scales = torch.zeros(self.scales.shape[1:], dtype=self.scales.dtype)
        placed: dict[int, Entry] = {}
        for entry in adapter.entries:
            at = Entry(entry.target, offset + entry.a, offset + entry.b, entry.rank, entry.scale)
            places[at.target] = torch.tensor([at.a, at.b, at.rank])
            scales[at.target] = at.scale
            placed[at.target] = at
        self.places[slot].copy_(send(places, self.device))
        self.scales[slot].copy_(send(scales, self.device))
        self._entries[slot] = placed

    def reset(self) -> None:
        """Forget which rows have adapters, and what lies in the slots."""
        self.slot_of_row.fill_(NO_SLOT)
        self.places.zero_()
        self._entries.clear()

    def entries(self, target: int) -> Mapping[int, Entry]:
        """The slots whose adapters change a target."""
        return {slot: placed[target] for slot, placed in self._entries.items() if target in placed}

    def factors(self, entry: Entry, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Views of the two factors."""
        return tuple(self.numbers[start : start + torch.Size(shape).numel()].view(shape)
                     for start, shape in ((entry.a, a_shape), (entry.b, b_shape)))
