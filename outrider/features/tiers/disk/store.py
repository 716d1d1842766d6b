"""DiskStore: a PageMedium in a folder on disk, which outlives the process and which several processes share."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.features.tiers.disk.folder import DOMAIN_BYTES, KEY_BYTES, CacheFolder
from outrider.features.tiers.disk.object_file import (
    DamagedObject,
    OtherLength,
    bytes_on_disk,
    read_object,
)
from outrider.features.tiers.disk.queue import StoreQueue
from outrider.features.tiers.disk.records import TAG_BYTES
from outrider.features.tiers.disk.shared_log import SharedLog
from outrider.features.tiers.disk.stats import DiskStats, StatsKeeper
from outrider.features.tiers.disk.writer import DiskWriter

LEAST_BYTES = 1 << 20
MOST_NEWS = 1 << 18  # objects that were stored or are gone, until they are asked for; more are lost, which costs hits
FEW_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # they say nothing of the object


class DiskStore:
    """Stores the objects of one domain. A domain is a digest of everything that a page's bytes depend on beside its
    key, such as the weights and the cache's dtypes. The size limit holds for all domains of the folder together; the
    least recently used objects of any domain are evicted.

    folder: made if it is missing; must belong to this user. about: a description of the domain for people, stored as
    JSON. queue_bytes: the most bytes of stores that wait for the disk; further stores are declined. min_free_bytes: the
    cache shrinks if less is free on the disk."""

    def __init__(self, folder: str | Path, domain: bytes, size_bytes: int, *, about: Mapping[str, Any] | None = None,
                 queue_bytes: int = 256 << 20, min_free_bytes: int = 1 << 30, name: str = "disk") -> None:
        if size_bytes < LEAST_BYTES:
            raise ValueError(f"a disk cache of {size_bytes} bytes is too small: give at least {LEAST_BYTES}")
        if len(domain) != DOMAIN_BYTES:
            raise ValueError(f"a domain is a digest of {DOMAIN_BYTES} bytes, not {len(domain)}")
        self.name = name
        self._folder = CacheFolder(folder)
        self._domain, self._tag = domain, domain[:TAG_BYTES]
        self._size_bytes = size_bytes
        self._stats = StatsKeeper(self._folder.path)
        self._log = SharedLog(self._folder)
        self._log.dropped = self._gone = deque[bytes](maxlen=MOST_NEWS)
        self._log.found = self._found = deque[bytes](maxlen=MOST_NEWS)
        self._queue = StoreQueue(queue_bytes)
        self._writer = DiskWriter(self._folder, self._log, domain, self._queue, self._stats, about=about or {},
                                  size_bytes=size_bytes, min_free_bytes=min_free_bytes)
        self._writer.start()

    def contains(self, key: bytes) -> bool:
        if key in self._queue.pending:
            return True
        return self._tag + key in self._log.index.stored and key not in self._queue.hidden

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key is a digest of {KEY_BYTES} bytes, not {len(key)}")
        if self.contains(key):
            self._queue.touch(key)
            return True
        data = memoryview(payload).cast("B")
        if bytes_on_disk(len(data)) > self._size_bytes // 2:
            self._stats.decline("too large", f"one object has {len(data)} bytes, more than half of the cache's size")
            return False
        reason = self._queue.put(key, data, boundary)
        if reason is not None:
            self._stats.decline(reason, "the disk is slower than what is stored" if reason == "queue full" else None)
            return False
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        target = memoryview(into).cast("B")
        pending = self._queue.pending.get(key)
        if pending is not None:
            return self._load_pending(pending.payload, target)
        entry = self._log.index.stored.get(self._tag + key)
        if entry is None or key in self._queue.hidden:
            self._stats.miss("absent")
            return False
        try:
            read_object(self._folder.object_path(self._domain, key), self._domain, key, target)
        except OtherLength:
            self._stats.miss("length", f"an object of {entry.length} bytes was asked for as one of {len(target)}")
        except FileNotFoundError:
            self._suspect(key, "evicted", None)
        except DamagedObject as error:
            self._suspect(key, error.reason, f"object {key.hex()} is damaged and will be removed")
        except OSError as error:
            if error.errno in FEW_FILES:
                self._stats.miss("I/O error", error)
            else:
                self._suspect(key, "I/O error", error)
        else:
            self._stats.add(loaded=1, loaded_bytes=len(target))
            return True
        return False

    def touch(self, key: bytes) -> None:
        self._queue.touch(key)

    def take_evicted(self) -> list[bytes]:
        """Return the keys that are gone since the last call: evicted by any process, or accepted by `store` but never
        written."""
        names = [self._gone.popleft() for _ in range(len(self._gone))]
        keys = [name[TAG_BYTES:] for name in names if name.startswith(self._tag)]
        return [key for key in keys if not self.contains(key)]

    def take_found(self) -> list[bytes]:
        """The keys that other processes have stored since the last call."""
        names = [self._found.popleft() for _ in range(len(self._found))]
        keys = [name[TAG_BYTES:] for name in names if name.startswith(self._tag)]
        return [key for key in keys if self.contains(key)]

    @property
    def is_shared(self) -> bool:
        """Whether other processes use the folder, as far as is known."""
        return self._log.has_others or self._writer.num_others > 0

    def pin(self, keys: Iterable[bytes], until: float) -> None:
        """Evict these objects last, in all processes, until a wall-clock time (`time.time`)."""
        self._queue.pin(list(keys), until)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Delete these objects, and forget them at once in this process."""
        self._queue.drop(list(keys))

    def keys(self) -> list[bytes]:
        """The keys that are on the disk now, those of other processes included."""
        self._found.clear()
        self.flush()
        return [own[TAG_BYTES:] for own in list(self._log.index.stored) if own.startswith(self._tag)]

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all stores are on the disk and those of other processes are known. Returns False after the
        timeout."""
        return self._queue.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write the queued objects for at most `timeout` seconds, then stop. May be called twice."""
        self._writer.close(timeout)

    def stats(self) -> DiskStats:
        stats = self._stats.snapshot()
        stats.num_objects, stats.num_bytes = len(self._log.index.stored), self._log.disk_bytes
        stats.limit_bytes, stats.queued_bytes = self._size_bytes, self._queue.num_bytes
        return stats

    def reasons(self) -> dict[str, int]:
        """How many objects were not stored or not found, by reason."""
        stats = self.stats()
        return {f"{what}: {reason}": count for what, reasons in (("store", stats.declined), ("load", stats.missed))
                for reason, count in list(reasons.items())}

    def _load_pending(self, payload: bytes, target: memoryview) -> bool:
        if len(payload) != len(target):
            self._stats.miss("length", f"an object of {len(payload)} bytes was asked for as one of {len(target)}")
            return False
        target[:] = payload
        self._stats.add(loaded=1, loaded_bytes=len(target))
        return True

    def _suspect(self, key: bytes, reason: str, trouble: object) -> None:
        self._stats.miss(reason, trouble)
        self._queue.suspect(key)
