"""AdapterArena: the device memory of adapters. Each takes its real size in one flat tensor, at an offset that the
scheduler has chosen (`sched/adapter_slots.py`); tables say where the factors of each slot and target begin.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.adapters.host_adapter import FactorPlace, HostAdapter
from outrider.adapters.targets import LinearTarget, Targets
from outrider.core import Axis, Limits
from outrider.kernels.adapters import NO_SLOT, NUM_PLACES, AdapterTables
from outrider.kernels.buffers import buffer, lazy_zeros, send, to_device


class AdapterArena:
    def __init__(self, targets: Targets, limits: Limits, max_rank: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.targets, self.device = targets, device
        axes = limits, Axis.ADAPTER_SLOTS, Axis.ADAPTER_TARGETS
        self.tables = AdapterTables(
            numbers=lazy_zeros(limits.extent(Axis.ADAPTER_NUMBERS), dtype=dtype, device=device),
            places=torch.stack([buffer(*axes, dtype=torch.int64, device=device)] * NUM_PLACES, dim=-1),
            scales=buffer(*axes, dtype=wide, device=device),
            bounds=to_device(targets.bounds, torch.int64, device).view(-1, 2), max_rank=max_rank)
        self.slot_of_row = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device, fill=NO_SLOT)
        self._entries: dict[int, dict[int, FactorPlace]] = {}  # by slot and target, as in the tables
        self._others: set[int] = set()  # slots whose adapters change more than linear layers

    def place(self, adapter: HostAdapter, slot: int, offset: int) -> None:
        """Copy an adapter to its place. Queued behind the steps that may still read the memory."""
        end = offset + adapter.size
        tables = self.tables
        assert end <= len(tables.numbers), "the scheduler has placed an adapter beyond the arena"
        tables.numbers[offset:end].copy_(adapter.numbers, non_blocking=True)
        places = torch.zeros(tables.places.shape[1:], dtype=torch.int64)
        scales = torch.zeros(tables.scales.shape[1:], dtype=tables.scales.dtype)
        placed: dict[int, FactorPlace] = {}
        for entry in adapter.entries:
            at = FactorPlace(entry.target, offset + entry.a, offset + entry.b, entry.rank, entry.scale)
            places[at.target] = torch.tensor([at.a, at.b, at.rank])
            scales[at.target] = at.scale
            placed[at.target] = at
        tables.places[slot].copy_(send(places, self.device))
        tables.scales[slot].copy_(send(scales, self.device))
        self._entries[slot] = placed
        has_others = any(not isinstance(self.targets.all[target], LinearTarget) for target in placed)
        (self._others.add if has_others else self._others.discard)(slot)

    def reset(self) -> None:
        """Forget which rows have adapters, and what lies in the slots."""
        self.slot_of_row.fill_(NO_SLOT)
        self.tables.places.zero_()
        self._entries.clear()
        self._others.clear()

    @property
    def num_numbers(self) -> int:
        """The room for all adapters together."""
        return len(self.tables.numbers)

    @property
    def has_only_linears(self) -> bool:
        """Whether the adapters that are placed change linear layers alone."""
        return self._others.isdisjoint(self._entries)

    def entries(self, target: int) -> Mapping[int, FactorPlace]:
        """The slots whose adapters change a target."""
        return {slot: placed[target] for slot, placed in self._entries.items() if target in placed}

    def factors(self, entry: FactorPlace, a_shape: tuple[int, ...],
                b_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Views of the two factors."""
        return tuple(self.tables.numbers[start : start + torch.Size(shape).numel()].view(shape)
                     for start, shape in ((entry.a, a_shape), (entry.b, b_shape)))
