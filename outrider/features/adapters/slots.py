"""AdapterSlots: the scheduler's accounts of which adapters are on the device, and where. The worker copies them. No
torch.

An adapter stays on the device until its memory is needed for another one and no running request uses it. The least
recently used one is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from outrider.core.checked_request import CheckedRequest
from outrider.features.adapters.placements import AdapterPlacement, AdapterPlacements
from outrider.lora_request import LoadedAdapter
from outrider.sched.row_resources import Room, RowResource


class AdapterSlots(RowResource):
    def __init__(self, num_slots: int, capacity: int, sizes: Mapping[int, int]) -> None:
        """sizes: the sizes of all loaded adapters, by load number. The caller owns this mapping and changes it."""
        self._capacity, self._sizes = capacity, sizes
        self._free = list(range(num_slots - 1, -1, -1))
        self._placed: OrderedDict[int, AdapterPlacement] = OrderedDict()  # least recently used first
        self._users: dict[int, int] = {}  # running requests of each placed adapter
        self._changes: list[AdapterPlacement] = []

    def room_for(self, asked: CheckedRequest) -> Room:
        """Whether the request's adapter can have a slot on the device. Returns TAKEN if the adapter has no slot and
        running requests use the adapters of all slots."""
        part = asked.part(LoadedAdapter)
        if part is None:
            return Room.NOT_NEEDED
        may_start = part.number in self._placed or bool(self._free) or len(self._users) < len(self._placed)
        return Room.FREE if may_start else Room.TAKEN

    def take(self, asked: CheckedRequest) -> bool:
        part = asked.part(LoadedAdapter)
        assert part is not None
        number = part.number
        if number not in self._placed and not self._place(number):
            return False
        self._placed.move_to_end(number)
        self._users[number] = self._users.get(number, 0) + 1
        return True

    def give(self, asked: CheckedRequest) -> None:
        part = asked.part(LoadedAdapter)
        assert part is not None
        self._users[part.number] -= 1
        if not self._users[part.number]:
            del self._users[part.number]

    def forget(self, number: int) -> None:
        """Remove an adapter that was dropped from the host's memory."""
        assert number not in self._users, "an adapter is dropped while requests run with it"
        if number in self._placed:
            self._evict(number)

    @property
    def running(self) -> list[int]:
        """The load numbers of the adapters that running requests use."""
        return list(self._users)

    def forget_all(self) -> None:
        assert not self._users
        for number in list(self._placed):
            self._evict(number)
        self._changes = []

    def take_orders(self) -> AdapterPlacements | None:
        changes, self._changes = self._changes, []
        return AdapterPlacements(tuple(changes)) if changes else None

    def check_integrity(self) -> None:
        ends = 0
        for placed in sorted(self._placed.values(), key=lambda own: own.offset):
            assert placed.offset >= ends, "adapters overlap"
            ends = placed.offset + self._sizes[placed.number]
        assert ends <= self._capacity
        slots = [placed.slot for placed in self._placed.values()]
        assert len(set(slots)) == len(slots) and not set(slots) & set(self._free), "a slot has two owners"

    def _place(self, number: int) -> bool:
        """Find a slot and memory for an adapter. Adapters without running requests are evicted if need be. Returns
        False if there is no room."""
        size, idle = self._sizes[number], [one for one in self._placed if one not in self._users]
        while not self._free or (offset := self._find_gap(size)) is None:
            if not idle:
                return False
            self._evict(idle.pop(0))
        placed = AdapterPlacement(number, self._free.pop(), offset)
        self._placed[number] = placed
        self._changes.append(placed)
        return True

    def _find_gap(self, size: int) -> int | None:
        offset = 0
        for placed in sorted(self._placed.values(), key=lambda own: own.offset):
            if placed.offset - offset >= size:
                return offset
            offset = placed.offset + self._sizes[placed.number]
        return offset if self._capacity - offset >= size else None

    def _evict(self, number: int) -> None:
        self._free.append(self._placed.pop(number).slot)
        self._changes = [change for change in self._changes if change.number != number]
