"""HostStore: a PageMedium in host memory, divided into cells of equal size."""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.features.tiers.eviction import EvictionOrder


@dataclass(slots=True)
class HostStats:
    num_objects: int = 0
    num_bytes: int = 0  # payloads alone
    capacity: int = 0  # bytes of the arena
    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    declined: Counter[str] = field(default_factory=Counter)  # stores, by reason
    missed: Counter[str] = field(default_factory=Counter)  # loads, by reason


@dataclass(slots=True, frozen=True)
class _Placement:
    cells: tuple[int, ...]
    length: int


class HostStore:
    """Stores each object in as many cells as it needs, which need not be adjacent, so eviction never leaves useless
    gaps. Choose `cell_bytes` as the bytes of one page: a page is then one contiguous range. `memory`: a writable buffer
    for the cells, such as pinned memory; without it the system's pages are taken when first written."""

    def __init__(self, size_bytes: int, *, cell_bytes: int = 1 << 16, memory: memoryview | None = None,
                 name: str = "host") -> None:
        if size_bytes < cell_bytes or cell_bytes < 1:
            raise ValueError(f"a host cache of {size_bytes} bytes cannot hold one page of {cell_bytes}: make it larger")
        self.name = name
        self._cell_bytes = cell_bytes
        num_cells = size_bytes // cell_bytes
        whole = memoryview(mmap.mmap(-1, num_cells * cell_bytes)) if memory is None else memory
        self._arena = whole.cast("B")[:num_cells * cell_bytes]
        if len(self._arena) < num_cells * cell_bytes:
            raise ValueError(f"the memory has {len(self._arena)} bytes, fewer than the {size_bytes} asked for")
        self._free = list(range(num_cells - 1, -1, -1))
        self._placed: dict[bytes, _Placement] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder()
        self._evicted: list[bytes] = []  # since the last `take_evicted`
        self._lock = threading.Lock()
        self._stats = HostStats(capacity=len(self._arena))

    def contains(self, key: bytes) -> bool:
        return key in self._placed

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        data = memoryview(payload).cast("B")
        with self._lock:
            if key in self._placed:
                self._order.use(key)
                return True
            cells = self._take_cells(-(-len(data) // self._cell_bytes))
            if cells is None:
                self._stats.declined["too large"] += 1
                return False
            for i, cell in enumerate(cells):
                part = data[i * self._cell_bytes:(i + 1) * self._cell_bytes]
                start = cell * self._cell_bytes
                self._arena[start:start + len(part)] = part
            self._placed[key] = _Placement(cells, len(data))
            self._order.add(key, is_kept=boundary)
            self._stats.stored += 1
            self._stats.num_bytes += len(data)
            return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy an object into a buffer. Without a checksum, because the bytes never leave this process's memory."""
        target = memoryview(into).cast("B")
        with self._lock:
            placement = self._placed.get(key)
            if placement is None or placement.length != len(target):
                self._stats.missed["absent" if placement is None else "length"] += 1
                return False
            for i, cell in enumerate(placement.cells):
                part = target[i * self._cell_bytes:(i + 1) * self._cell_bytes]
                start = cell * self._cell_bytes
                part[:] = self._arena[start:start + len(part)]
            self._stats.loaded += 1
            return True

    def touch(self, key: bytes) -> None:
        with self._lock:
            self._order.use(key)

    def take_evicted(self) -> list[bytes]:
        """Return the keys that were evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def pin(self, keys: Iterable[bytes], until: float) -> None:
        """Evict these objects last, until a time of the wall clock."""
        with self._lock:
            for key in keys:
                self._order.pin(key, until)

    def drop(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def close(self) -> None:
        """Drop all objects. The memory is released together with this HostStore."""
        self.drop(list(self._placed))

    def stats(self) -> HostStats:
        """The live counters: read them, do not change them."""
        self._stats.num_objects = len(self._placed)
        return self._stats

    def _take_cells(self, count: int) -> tuple[int, ...] | None:
        """Return free cells for an object, evicting others if needed. None if the object is larger than all cells
        together."""
        if count * self._cell_bytes > len(self._arena):
            return None
        self._order.end_pins(time.time())
        while len(self._free) < count:
            victim = next(self._order.next_victims())
            self._remove(victim)
            self._evicted.append(victim)
            self._stats.evicted += 1
        return tuple(self._free.pop() for _ in range(count))

    def _remove(self, key: bytes) -> None:
        placement = self._placed.pop(key, None)
        if placement is not None:
            self._order.remove(key)
            self._free.extend(placement.cells)
            self._stats.num_bytes -= placement.length
