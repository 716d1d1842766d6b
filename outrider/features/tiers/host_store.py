"""HostStore: a PageMedium in host memory, divided into cells of equal size."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from outrider.cache.eviction import EvictionOrder
from outrider.core.host_memory import available_bytes
from outrider.features.tiers.medium import Lease

log = logging.getLogger("outrider")
PART_BYTES = 64 << 20  # of the arena that are allocated at once, where that takes long
LEAST_FREE = 2 << 30  # bytes that the host keeps for other things when an arena grows


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


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes of one length, by numpy: other threads run meanwhile, unlike with an assignment of memoryviews."""
    np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)


class HostStore:
    """Objects lie in as many cells as they need, wherever those are, so evicting never leaves gaps that fit nothing.
    Choose `cell_bytes` as the bytes of one page: a page is then one contiguous range, which is lent to readers.

    `memory`: a writable buffer to use as the arena. `make_memory`: allocates a part of the arena, such as pinned
    memory, which takes long. A thread calls it until the arena is whole; meanwhile the store has the parts that are
    there. Without both, pages of the system are taken when they are first written."""

    def __init__(self, size_bytes: int, *, cell_bytes: int = 1 << 16, memory: memoryview | None = None,
                 make_memory: Callable[[int], memoryview] | None = None, name: str = "host") -> None:
        if size_bytes < cell_bytes or cell_bytes < 1:
            raise ValueError(f"a host cache of {size_bytes} bytes cannot hold one page of {cell_bytes}: make it larger")
        self.name = name
        self._cell_bytes = cell_bytes
        self._num_cells = size_bytes // cell_bytes
        self._parts: list[memoryview] = []
        self._part_cells = self._num_cells  # of every part but the last
        self._free: list[int] = []
        self._placed: dict[bytes, _Placement] = {}
        self._lent: Counter[int] = Counter()  # cells
        self._orphans: set[int] = set()  # cells without an object, which are still lent
        self._order: EvictionOrder[bytes] = EvictionOrder()
        self._evicted: list[bytes] = []  # since the last `take_evicted`
        self._lock = threading.Lock()
        self._stats = HostStats()
        self._is_closed = False
        if make_memory is None:
            num_bytes = self._num_cells * cell_bytes
            self._add(memoryview(mmap.mmap(-1, num_bytes)) if memory is None else memory, num_bytes)
        else:
            self._part_cells = min(max(1, PART_BYTES // cell_bytes), self._num_cells)
            threading.Thread(target=self._grow, args=(make_memory,), name="outrider-host-cache", daemon=True).start()

    def contains(self, key: bytes) -> bool:
        return key in self._placed

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        data = memoryview(payload).cast("B")
        with self._lock:
            if key in self._placed:
                self._order.use(key)
                return True
            count = -(-len(data) // self._cell_bytes)
            cells = self._take_cells(count)
            if cells is None:
                self._stats.declined["too large" if count > self._num_cells else "no room"] += 1
                return False
            for i, cell in enumerate(cells):
                part = data[i * self._cell_bytes:(i + 1) * self._cell_bytes]
                copy_bytes(self._cell(cell)[:len(part)], part)
            self._placed[key] = _Placement(cells, len(data))
            self._order.add(key, is_kept=boundary)
            self._stats.stored += 1
            self._stats.num_bytes += len(data)
            return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy an object into a buffer. Without a checksum, because the bytes never leave this process's memory."""
        target = memoryview(into).cast("B")
        with self._lock:
            placement = self._find(key, len(target))
            if placement is None:
                return False
            for i, cell in enumerate(placement.cells):
                part = target[i * self._cell_bytes:(i + 1) * self._cell_bytes]
                copy_bytes(part, self._cell(cell)[:len(part)])
            self._stats.loaded += 1
            return True

    def lend(self, key: bytes, num_bytes: int) -> Lease | None:
        """Lend the bytes of an object that lies in one cell."""
        with self._lock:
            placement = self._find(key, num_bytes)
            if placement is None or len(placement.cells) != 1:
                return None
            (cell,) = placement.cells
            self._lent[cell] += 1
            self._stats.loaded += 1
            return Lease(self._cell(cell)[:num_bytes], partial(self._end_lease, cell))

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
        """Forget everything. The arena's memory goes back to the system with this object."""
        self._is_closed = True
        self.drop(list(self._placed))

    def stats(self) -> HostStats:
        """The live counters: read them, do not change them."""
        self._stats.num_objects = len(self._placed)
        return self._stats

    def reasons(self) -> dict[str, int]:
        """How many objects were not stored or not found, by reason."""
        stats = self.stats()
        return {f"{what}: {reason}": count for what, reasons in (("store", stats.declined), ("load", stats.missed))
                for reason, count in list(reasons.items())}

    # The arena

    def _grow(self, make_memory: Callable[[int], memoryview]) -> None:
        """Allocate the arena part by part. If the host has too little memory, the cache stays smaller."""
        left = self._num_cells
        while left and not self._is_closed:
            num_bytes = min(left, self._part_cells) * self._cell_bytes
            try:
                if available_bytes() < num_bytes + LEAST_FREE:
                    raise MemoryError("the host has too little free memory")
                began = time.monotonic()
                memory = make_memory(num_bytes)
            except (MemoryError, RuntimeError) as error:
                log.warning("the host cache has %d MiB of %d: %s", self._stats.capacity >> 20,
                            self._num_cells * self._cell_bytes >> 20, error)
                return
            with self._lock:
                self._add(memory, num_bytes)
            left -= num_bytes // self._cell_bytes
            time.sleep(time.monotonic() - began)  # lets the device's work in between

    def _add(self, memory: memoryview, num_bytes: int) -> None:
        if len(memory) < num_bytes:
            raise ValueError(f"the memory has {len(memory)} bytes, fewer than the {num_bytes} asked for")
        first, count = len(self._parts) * self._part_cells, num_bytes // self._cell_bytes
        self._parts.append(memory.cast("B")[:num_bytes])
        self._free.extend(range(first + count - 1, first - 1, -1))
        self._stats.capacity += num_bytes

    # With the lock

    def _cell(self, cell: int) -> memoryview:
        part, index = divmod(cell, self._part_cells)
        return self._parts[part][index * self._cell_bytes:(index + 1) * self._cell_bytes]

    def _find(self, key: bytes, num_bytes: int) -> _Placement | None:
        placement = self._placed.get(key)
        if placement is None or placement.length != num_bytes:
            self._stats.missed["absent" if placement is None else "length"] += 1
            return None
        return placement

    def _end_lease(self, cell: int) -> None:
        with self._lock:
            self._lent[cell] -= 1
            if not self._lent[cell]:
                del self._lent[cell]
                if cell in self._orphans:
                    self._orphans.remove(cell)
                    self._free.append(cell)

    def _take_cells(self, count: int) -> tuple[int, ...] | None:
        """Free cells for an object, after evicting what must go. None if there are not enough."""
        if count * self._cell_bytes > self._stats.capacity:
            return None
        self._order.end_pins(time.time())
        while len(self._free) < count:
            victim = next(self._order.next_victims(), None)
            if victim is None:
                return None  # cells are lent
            self._remove(victim)
            self._evicted.append(victim)
            self._stats.evicted += 1
        return tuple(self._free.pop() for _ in range(count))

    def _remove(self, key: bytes) -> None:
        placement = self._placed.pop(key, None)
        if placement is not None:
            self._order.remove(key)
            self._stats.num_bytes -= placement.length
            lent = {cell for cell in placement.cells if cell in self._lent}
            self._orphans |= lent
            self._free.extend(cell for cell in placement.cells if cell not in lent)
