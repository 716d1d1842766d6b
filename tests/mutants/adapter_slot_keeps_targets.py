"""An adapter that changes few layers is placed over one that changed more, whose entries stay for the others."""

from __future__ import annotations

from outrider.features.adapters.arena import AdapterArena
from outrider.features.adapters.host_adapter import HostAdapter

NAME = "adapter slot keeps targets"
TESTS = ["tests/adapters/test_engine.py::test_a_slot_keeps_nothing_of_the_adapter_before"]


def apply() -> None:
    place = AdapterArena.place

    def place_over(self: AdapterArena, adapter: HostAdapter, slot: int, offset: int) -> None:
        places, scales = self.tables.places[slot].clone(), self.tables.scales[slot].clone()
        place(self, adapter, slot, offset)
        is_unchanged = self.tables.scales[slot] == 0
        self.tables.places[slot, is_unchanged] = places[is_unchanged]
        self.tables.scales[slot, is_unchanged] = scales[is_unchanged]

    AdapterArena.place = place_over  # type: ignore[method-assign]
