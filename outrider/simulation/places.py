"""SimulatedPlaces: host memory and a disk in simulated time, where cached pages lie beyond the device.

They evict like the real ones. A place reads one page after another, and takes stores at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from outrider.cache.eviction import EvictionOrder
from outrider.cache.manager import CacheManager
from outrider.cache.media import PageMedia
from outrider.cache.with_media import CacheWithMedia, add_media
from outrider.core import ScheduledBatch
from outrider.core.fields import INT64, Range
from outrider.core.page_moves import LoadedPages, MovesReport, OpenedPlaces, PageLoad
from outrider.engine.engine_feature import EngineFeature

POLL_SECONDS = 0.005  # that a step without requests takes


@dataclass(frozen=True)
class PlaceCosts:
    """The size and the speed of one place."""

    name: str
    size_bytes: Annotated[int, Range(1, INT64)]
    bandwidth: Annotated[float, Range(1e-3, 1e30)]  # bytes per second of reading pages
    unit: Annotated[int, Range(1, INT64)] = 1  # bytes: each page takes a multiple of these
    head: Annotated[int, Range(0, INT64)] = 0  # more bytes of each page


class SimulatedPlace:
    def __init__(self, costs: PlaceCosts, page_bytes: int) -> None:
        self.name = costs.name
        taken = -(-(page_bytes + costs.head) // costs.unit) * costs.unit
        self._capacity = costs.size_bytes // taken
        self.page_seconds = page_bytes / costs.bandwidth
        self._order: EvictionOrder[bytes] = EvictionOrder()
        self._held: set[bytes] = set()
        self.evicted: list[bytes] = []

    def use(self, key: bytes) -> bool:
        """Whether the place has a page, which is then its most recently used one."""
        self._order.use(key)
        return key in self._held

    def store(self, key: bytes, *, is_boundary: bool) -> bool:
        if self.use(key):
            return True
        if not self._capacity:
            return False
        while len(self._held) >= self._capacity:
            victim = next(self._order.next_victims())
            self._order.remove(victim)
            self._held.remove(victim)
            self.evicted.append(victim)
        self._order.add(key, is_kept=is_boundary)
        self._held.add(key)
        return True


@dataclass
class ReadingLoad:
    """A load that is being read, and the time at which its last page has come."""

    order: PageLoad
    places: tuple[str | None, ...]
    end: float


class SimulatedPlaces(EngineFeature):
    """Makes the account of the scheduler, and answers the orders of batches as a worker does."""

    def __init__(self, costs: Sequence[PlaceCosts], page_bytes: int) -> None:
        self._places = [SimulatedPlace(each, page_bytes) for each in costs]
        self.media = PageMedia([place.name for place in self._places])
        self._loads: list[ReadingLoad] = []
        self._read_until = 0.0

    def make_cache(self, plain: CacheManager) -> CacheWithMedia:
        return add_media(plain, self.media)

    def carry_out(self, batch: ScheduledBatch, now: float) -> MovesReport | None:
        """Carry out the orders of a batch whose result comes now."""
        moves = batch.cache.pages.moves
        if moves is None:
            return None
        report = MovesReport()
        if moves.asks_places:
            report.opened = OpenedPlaces(b"", {place.name: () for place in self._places})
        for store in moves.stores:
            took = [place.name for place in self._places if place.store(store.key, is_boundary=store.is_boundary)]
            report.stored.append((store.key, tuple(took)))
        self._loads += [self._read(load, now) for load in moves.loads]
        ended = [load for load in self._loads if load.end <= now]
        self._loads = [load for load in self._loads if load.end > now and load.order.id not in moves.cancelled]
        report.loaded = [LoadedPages(load.order.id, load.places) for load in ended]
        for place in self._places:
            report.evicted.append((place.name, place.evicted))
            place.evicted = []
        return report

    def _read(self, load: PageLoad, now: float) -> ReadingLoad:
        found = [next((place for place in self._places if place.use(key)), None) for _, key in load.pages]
        seconds = sum(place.page_seconds for place in found if place is not None)
        self._read_until = max(now, self._read_until) + seconds
        return ReadingLoad(load, tuple(None if place is None else place.name for place in found), self._read_until)
