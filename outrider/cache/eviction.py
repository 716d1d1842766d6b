"""EvictionOrder: which object of a medium is evicted next.

Objects from the inside of a prompt are evicted before those at its end. When one list held both, recurrent states of
every thousand tokens cost a cache of 64 to 256 GiB a third to three quarters of its hits on recorded conversations."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class EvictionOrder(Generic[Name]):
    """Three lists, each ordered by last use. Interior objects are evicted first, then kept ones (ends of prompts and
    objects used again), then pinned ones, which a session protects until a time."""

    def __init__(self) -> None:
        self.interior: OrderedDict[Name, None] = OrderedDict()
        self.kept: OrderedDict[Name, None] = OrderedDict()
        self.pinned: OrderedDict[Name, float] = OrderedDict()  # with the time at which the pin ends
        self._ends: list[tuple[float, Name]] = []  # a heap; an entry whose time is not that of `pinned` is stale

    def __len__(self) -> int:
        return len(self.interior) + len(self.kept) + len(self.pinned)

    def add(self, name: Name, *, is_kept: bool) -> None:
        """Add an object as the most recently used of its list."""
        self.remove(name)
        (self.kept if is_kept else self.interior)[name] = None

    def use(self, name: Name) -> None:
        """Make an object the most recently used one. An interior object moves to the kept ones."""
        if name in self.pinned:
            self.pinned.move_to_end(name)
        elif name in self.kept:
            self.kept.move_to_end(name)
        elif name in self.interior:
            del self.interior[name]
            self.kept[name] = None

    def pin(self, name: Name, until: float) -> None:
        """Evict an object last, until a time. A later pin of the same object replaces an earlier one."""
        if name in self.interior or name in self.kept or name in self.pinned:
            self.remove(name)
            self.pinned[name] = until
            heapq.heappush(self._ends, (until, name))

    def remove(self, name: Name) -> None:
        for part in (self.interior, self.kept, self.pinned):
            part.pop(name, None)

    def end_pins(self, now: float) -> None:
        """Move objects whose pin has ended to the kept ones, with that time as their last use."""
        while self._ends and self._ends[0][0] <= now:
            until, name = heapq.heappop(self._ends)
            if self.pinned.get(name) == until:
                del self.pinned[name]
                self.kept[name] = None

    def next_victims(self) -> Iterator[Name]:
        """Names in the order of eviction. The order must not change while this is read."""
        return chain(self.interior, self.kept, self.pinned)
