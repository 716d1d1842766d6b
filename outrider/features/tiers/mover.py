"""PageMover: the part of a step that copies pages between the device and other storage."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.core import ScheduledBatch, StepPart, StepResult
from outrider.core.page_moves import LoadedPages, MovesReport, OpenedPlaces, PageStore
from outrider.features.tiers.copies import HostCopies, PageCopies, StreamCopies
from outrider.features.tiers.loader import Loader, StagedPage
from outrider.features.tiers.medium import CountsReasons, ListsKeys, PageMedium, PinsObjects, TellsEvictions, TellsFinds
from outrider.features.tiers.store_thread import StoreThread
from outrider.mixers.pool import DevicePool

log = logging.getLogger("outrider")
CLOSE_SECONDS = 10.0
POLL_SECONDS = 0.005  # that a batch without requests waits for pages, so that an idle engine does not spin


class OpenPlaces:
    """Opens a worker's storages on a separate thread, because hashing a model's files and listing cache files take
    time."""

    def __init__(self, open_places: Callable[[], tuple[bytes, Sequence[PageMedium]]]) -> None:
        """open_places: returns the digest of everything that all pages depend on, and the storages in lookup order."""
        self._open_places = open_places
        self._ended = threading.Event()
        self._domain, self._media, self._keys = b"", list[PageMedium](), dict[str, Sequence[bytes]]()
        self._thread = threading.Thread(target=self._open, name="outrider-open-cache", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            self._domain, media = self._open_places()
            self._keys = {medium.name: medium.keys() if isinstance(medium, ListsKeys) else [] for medium in media}
            self._media = list(media)
        except Exception as error:
            log.error("the caches in host memory and on disk are not used, because opening them failed: %s", error)
        self._ended.set()

    def wait(self, seconds: float) -> Sequence[PageMedium] | None:
        """Wait for the storages, and return them; None if they are still being opened after `seconds`."""
        return self._media if self._ended.wait(seconds) else None

    def report(self) -> OpenedPlaces:
        return OpenedPlaces(self._domain, self._keys)

    def close(self) -> None:
        self._thread.join(CLOSE_SECONDS)  # a file system may not answer
        for medium in self._media:
            try:
                medium.close()
            except Exception:
                log.exception("%s: closing failed, so some pages may not have been written", medium.name)


@dataclass(slots=True)
class Filling:
    """The pages of a load that have come so far."""

    places: list[str | None]  # that each page came from
    num_left: int
    is_late: bool = False  # some pages were given up


class PageMover(StepPart):
    def __init__(self, pool: DevicePool, open_places: Callable[[], tuple[bytes, Sequence[PageMedium]]]) -> None:
        self._copies: PageCopies = HostCopies(pool) if pool.data.device.type == "cpu" else StreamCopies(pool)
        self._page_bytes = pool.layout.page_bytes
        self._open_places = open_places
        self._places: OpenPlaces | None = None  # made by the first batch: a step that only measures memory has none
        self._media: Sequence[PageMedium] = ()
        self._loader: Loader | None = None
        self._loading: dict[int, Filling] = {}  # by load
        self._rests: Mapping[str, float] = {}
        self._reasons: dict[str, Mapping[str, int]] = {}
        self._reports: dict[int, MovesReport] = {}  # by step
        self._stored: deque[tuple[bytes, tuple[str, ...]]] = deque()
        self._store_thread = StoreThread(self._store)

    def begin(self, batch: ScheduledBatch) -> None:
        moves = batch.cache.pages.moves
        if moves is None:
            return
        report = self._reports[batch.step] = MovesReport()
        wait = 0.0 if batch.num_requests else POLL_SECONDS
        loader = self._loader or self._open(wait)
        if loader is None or self._places is None:
            return
        if moves.asks_places:
            report.opened = self._places.report()
        if moves.cancelled:
            self._forget(moves.cancelled)
            self._copies.join()
        self._copies.store([(store.page, partial(self._keep, store)) for store in moves.stores])
        for medium in self._media:
            if isinstance(medium, PinsObjects):
                for pin in moves.pins:
                    medium.pin(pin.keys, pin.until)
                if moves.dropped:
                    medium.drop(moves.dropped)
        for load in moves.loads:
            self._loading[load.id] = Filling([None] * len(load.pages), len(load.pages))
        loader.begin(moves.loads)
        self._copies.fill(loader.take(wait))
        report.rests = self._rests = loader.rests()
        for filled in self._copies.settle():
            self._fill(filled, report)
            loader.give_back(filled)
        report.stored = [self._stored.popleft() for _ in range(len(self._stored))]
        report.read_times = loader.take_read_times()
        report.evicted = [(medium.name, medium.take_evicted()) for medium in self._media
                          if isinstance(medium, TellsEvictions)]
        report.reasons = {medium.name: reasons for medium in self._media if isinstance(medium, CountsReasons)
                          if (reasons := medium.reasons()) != self._reasons.get(medium.name)}
        self._reasons |= report.reasons
        shared = [medium for medium in self._media if isinstance(medium, TellsFinds)]
        report.found = [(medium.name, medium.take_found()) for medium in shared]
        report.is_shared = any(medium.is_shared for medium in shared)
        if wait and not (report.stored or self._loading or moves.asks_news):
            time.sleep(wait)  # for copies to the host

    def amend_result(self, batch: ScheduledBatch, result: StepResult) -> StepResult:
        report = self._reports.pop(batch.step, None)
        return result if report is None else replace(result, moved=report)

    def reset(self) -> None:
        self._forget(list(self._loading))
        self._reports.clear()

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._copies.settle(waits=True)
        self._store_thread.close()
        if self._places is not None:
            self._places.close()

    def _open(self, wait: float) -> Loader | None:
        """Begin to open the storages, and return their loader once they are open."""
        if self._places is None:
            self._places = OpenPlaces(self._open_places)
        media = self._places.wait(wait)
        if media is not None:
            self._media = media
            self._loader = Loader(media, self._page_bytes, self._copies.make_buffer)
        return self._loader

    def _forget(self, loads: Sequence[int]) -> None:
        for load in loads:
            self._loading.pop(load, None)
        if self._loader is not None:
            self._loader.cancel(loads)

    def _keep(self, store: PageStore, payload: memoryview) -> None:
        """Store a page whose bytes have come to the host."""
        if not self._copies.keeps_buffers:
            self._store(store, payload)
        elif not self._store_thread.put(store, payload):
            self._stored.append((store.key, ()))

    def _store(self, store: PageStore, payload: memoryview) -> None:
        """Offer a page's bytes to every medium that answers, and note for the report which of them took the page."""
        took = tuple(medium.name for medium in self._media if self._gives(medium, store, payload))
        self._stored.append((store.key, took))

    def _gives(self, medium: PageMedium, store: PageStore, payload: memoryview) -> bool:
        if medium.name in self._rests:
            return False
        try:
            return medium.store(store.key, payload, boundary=store.is_boundary)
        except Exception:  # whatever a place fails of, the page is not there
            log.exception("%s: a page could not be stored", medium.name)
            return False

    def _fill(self, filled: StagedPage, report: MovesReport) -> None:
        """Note a filled page. A load is reported with its last one."""
        filling = self._loading.get(filled.load)
        if filling is None:
            return  # cancelled
        filling.places[filled.position] = filled.place
        filling.is_late |= not filled.is_asked
        filling.num_left -= 1
        if not filling.num_left:
            report.loaded.append(LoadedPages(filled.load, tuple(filling.places), filling.is_late))
            del self._loading[filled.load]
