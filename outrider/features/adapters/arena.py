"""AdapterArena: the device memory of LoRA adapters. Each adapter takes its real size in one flat tensor, at an offset
that the scheduler has chosen (`slots.py`). Tables say where the factors of each slot and target begin.
"""

from __future__ import annotations

import operator
from functools import reduce

import torch

from outrider.core import Axis, Limits
from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.host_adapter import HostAdapter
from outrider.features.adapters.limits import AdapterLimits
from outrider.features.adapters.targets import Targets
from outrider.kernels.buffers import buffer, lazy_zeros, send, to_device
from outrider.kernels.delta_tables import NO_SLOT, NUM_PLACES, DeltaTables


class AdapterArena:
    def __init__(self, targets: Targets, limits: Limits, max_rank: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.targets, self.device = targets, device
        room = AdapterLimits.of(limits)
        sizes = room.slots, room.targets
        self.tables = DeltaTables(
            numbers=lazy_zeros(room.numbers, dtype=dtype, device=device),
            places=torch.zeros(*sizes, NUM_PLACES, dtype=torch.int64, device=device),
            scales=torch.zeros(*sizes, dtype=wide, device=device),
            bounds=to_device(targets.bounds, torch.int64, device).view(-1, 2), max_rank=max_rank)
        self.slot_of_row = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device, fill=NO_SLOT)
        self._reach: dict[int, DeltaReach] = {}  # what the adapter in each slot changes
        self._changed: dict[int, frozenset[int]] = {}  # the targets that it changes

    def place(self, adapter: HostAdapter, slot: int, offset: int) -> None:
        """Copy an adapter to its place in device memory. The copy is queued behind the steps that may still read the
        memory."""
        end = offset + adapter.size
        tables = self.tables
        assert end <= len(tables.numbers), "the scheduler has placed an adapter beyond the arena"
        tables.numbers[offset:end].copy_(adapter.numbers, non_blocking=True)
        places = torch.zeros(tables.places.shape[1:], dtype=torch.int64)
        scales = torch.zeros(tables.scales.shape[1:], dtype=tables.scales.dtype)
        reach = DeltaReach.LINEARS  # steps without further kinds share their captures
        for entry in adapter.entries:
            places[entry.target] = torch.tensor([offset + entry.a, offset + entry.b, entry.rank])
            scales[entry.target] = entry.scale
            reach |= self.targets.all[entry.target].reach
        tables.places[slot].copy_(send(places, self.device))
        tables.scales[slot].copy_(send(scales, self.device))
        self._reach[slot] = reach
        self._changed[slot] = frozenset(entry.target for entry in adapter.entries)

    def reset(self) -> None:
        """Forget which rows have adapters, and which adapters are in the slots."""
        self.slot_of_row.fill_(NO_SLOT)
        self.tables.places.zero_()
        self._reach.clear()
        self._changed.clear()

    def may_change(self, targets: range) -> bool:
        """Whether an adapter may change one of these targets. On a CPU only the placed adapters count. On other devices
        steps are captured, so adapters that may be placed later count too."""
        if self.device.type != "cpu":
            return bool(targets)
        return any(not changed.isdisjoint(targets) for changed in self._changed.values())

    @property
    def num_numbers(self) -> int:
        """The capacity of the arena, over all adapters: the number of factor elements that fit."""
        return len(self.tables.numbers)

    @property
    def reach(self) -> DeltaReach:
        """The kinds of matrix products that at least one placed adapter changes."""
        return reduce(operator.or_, self._reach.values(), DeltaReach.LINEARS)
