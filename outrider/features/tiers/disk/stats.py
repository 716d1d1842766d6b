"""DiskStats: counters of a disk cache, and one log line for each kind of trouble."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field, replace

log = logging.getLogger("outrider")


@dataclass(slots=True)
class DiskStats:
    num_objects: int = 0  # of all models in the folder
    num_bytes: int = 0  # on the disk, of all models in the folder, with what is being written
    limit_bytes: int = 0
    queued_bytes: int = 0  # stored, and not on the disk yet
    stored: int = 0  # objects that this process wrote
    stored_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    evicted: int = 0  # objects that this process evicted
    declined: Counter[str] = field(default_factory=Counter)  # stores, by reason
    missed: Counter[str] = field(default_factory=Counter)  # loads, by reason
    errors: Counter[str] = field(default_factory=Counter)  # of the folder's list and of deleting, by reason


class StatsKeeper:
    """Counts events from several threads, and logs each kind of trouble once instead of for every page."""

    def __init__(self, folder: str) -> None:
        self._stats = DiskStats()
        self._folder = folder
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def snapshot(self) -> DiskStats:
        with self._lock:
            own = self._stats
            return replace(own, declined=own.declined.copy(), missed=own.missed.copy(), errors=own.errors.copy())

    def add(self, *, stored: int = 0, stored_bytes: int = 0, loaded: int = 0, loaded_bytes: int = 0,
            evicted: int = 0) -> None:
        with self._lock:
            self._stats.stored += stored
            self._stats.stored_bytes += stored_bytes
            self._stats.loaded += loaded
            self._stats.loaded_bytes += loaded_bytes
            self._stats.evicted += evicted

    def decline(self, reason: str, trouble: object = None, count: int = 1) -> None:
        """Count declined stores. If `trouble` is given, log it once for this reason."""
        with self._lock:
            self._stats.declined[reason] += count
        self._say(f"stores are declined ({reason})", trouble)

    def miss(self, reason: str, trouble: object = None) -> None:
        with self._lock:
            self._stats.missed[reason] += 1
        self._say(f"a page could not be loaded and is computed ({reason})", trouble)

    def error(self, reason: str, trouble: object) -> None:
        with self._lock:
            self._stats.errors[reason] += 1
        self._say(reason, trouble)

    def _say(self, what: str, trouble: object) -> None:
        if trouble is None:
            return
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        log.warning("disk cache %s: %s: %s; further cases are counted but not logged", self._folder, what, trouble)
