"""DiskWriter: the thread that writes queued objects and evicts others, a batch at a time.

A batch takes two short transactions of the shared log. The first makes room and reserves it. Then the files are written
without the lock. The second records them in the log. So the log never counts fewer bytes than the disk holds, even if a
process is killed at any point."""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.features.tiers.disk.folder import CacheFolder, FolderBusy
from outrider.features.tiers.disk.index import named_record
from outrider.features.tiers.disk.object_file import ObjectHeader, bytes_on_disk, find_damage, write_object
from outrider.features.tiers.disk.queue import Orders, QueuedObject, StoreQueue
from outrider.features.tiers.disk.records import RECORD_BYTES, TAG_BYTES, Op
from outrider.features.tiers.disk.shared_log import SharedLog
from outrider.features.tiers.disk.stats import StatsKeeper

BATCH_BYTES = 16 << 20
LOOK_SECONDS = 0.2  # an idle writer looks so often for what other processes stored
CLEAN_SECONDS = 60.0  # and so often for what killed processes left
LOCK_SECONDS = 2.0
FULL = {errno.ENOSPC: "disk full", errno.EDQUOT: "disk full", errno.EFBIG: "file too large for the system"}


class DiskWriter:
    def __init__(self, folder: CacheFolder, log: SharedLog, domain: bytes, queue: StoreQueue, stats: StatsKeeper, *,
                 about: Mapping[str, Any], size_bytes: int, min_free_bytes: int) -> None:
        self._folder, self._log, self._queue, self._stats = folder, log, queue, stats
        self._domain, self._tag, self._about = domain, domain[:TAG_BYTES], about
        self._size_bytes, self._min_free_bytes = size_bytes, min_free_bytes
        self._batch_bytes = max(1, min(BATCH_BYTES, size_bytes // 8))
        self.num_others = 0  # processes that use the folder too
        self._number, self._life = 0, -1  # of this writer, and the file whose lock says that it is alive
        self._num_files = 0
        self._unfinished: set[bytes] = set()  # reserved names whose file was not written
        self._cleaned = 0.0
        self._deadline = float("inf")  # of closing, by the monotonic clock
        self._thread = threading.Thread(target=self._run, name="outrider-disk-cache", daemon=True)

    def start(self) -> None:
        """Register with the folder and start the thread, which tries again if registering fails."""
        try:
            with self._log.transaction(5 * LOCK_SECONDS):
                self._clean()
                self._reserve([])  # evicts, if the size was made smaller
        except OSError as error:
            self._stats.error("the folder could not be read at start", error)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Write the queued objects for at most `timeout` seconds, then end the thread."""
        if self._queue.is_closed:
            return
        self._deadline = time.monotonic() + timeout
        self._queue.close()
        self._thread.join(timeout + 1.0)
        if self._thread.is_alive():  # it waits for a disk that does not answer; it ends with the process
            self._stats.error("the disk did not respond while the cache was closed", f"waited {timeout:g} seconds")
            return
        if self._number:
            self._folder.remove_writer(self._number, self._life)
        self._log.close()
        self._folder.close()

    def _run(self) -> None:
        self._look_for_strays()
        while True:
            batch, orders = self._queue.take(self._batch_bytes, LOOK_SECONDS)
            self._turn(batch, orders)
            if self._queue.is_closed and (self._queue.is_empty() or self._is_late()):
                break
        left = self._queue.give_up()
        if left:
            self._stats.decline("closed", f"{left} objects were not written in time", left)

    def _look_for_strays(self) -> None:
        """Find files and index entries that a power failure left without each other. The folder is listed once, in
        use."""
        try:
            strays = self._log.strays()
            if strays:
                with self._log.transaction(LOCK_SECONDS):
                    self._log.adopt(strays)
                    self._reserve([])  # evicts, if they are too many
        except OSError as error:
            self._stats.error("the folder could not be listed", error)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _turn(self, batch: list[QueuedObject], orders: Orders) -> None:
        try:
            if batch or orders or self._unfinished or self._must_clean():
                self._work(batch, orders)
            else:
                self._log.refresh()
        except OSError as error:
            self._queue.put_back(orders)
            reason = "folder busy" if isinstance(error, FolderBusy) else FULL.get(error.errno or 0, "I/O error")
            self._fail(batch, reason, error)
        except Exception as error:  # the engine goes on without this cache
            self._fail(batch, "failure", f"{type(error).__name__}: {error}")
        finally:
            self._finish(batch)

    def _finish(self, batch: list[QueuedObject]) -> None:
        index, gone = self._log.index, self._log.dropped
        for item in batch:
            self._queue.finish(item)
            name = self._tag + item.key
            if gone is not None and name not in index.stored and name not in index.reserved:
                gone.append(name)

    def _fail(self, batch: list[QueuedObject], reason: str, error: object) -> None:
        if batch:
            self._stats.decline(reason, error, len(batch))
        else:
            self._stats.error(reason, error)

    def _work(self, batch: list[QueuedObject], orders: Orders) -> None:
        with self._log.transaction(LOCK_SECONDS):
            if self._must_clean():
                self._clean()
            self._finish_reservations()
            self._follow(orders)
            chosen = self._reserve(batch)
            self._log.compact()
        if not chosen:
            return
        names = {self._tag + item.key for item in chosen}
        self._unfinished |= names
        written = [item for item in chosen if self._write(item)]
        now = time.time()
        with self._log.transaction(LOCK_SECONDS):
            self._log.append([named_record(Op.STORE, self._tag + item.key, length=len(item.payload),
                                           is_kept=item.is_boundary, time=now) for item in written])
            self._unfinished -= {self._tag + item.key for item in written}
            self._finish_reservations()
        self._stats.add(stored=len(written), stored_bytes=sum(len(item.payload) for item in written))

    # In a transaction

    def _must_clean(self) -> bool:
        return not self._number or time.monotonic() > self._cleaned + CLEAN_SECONDS

    def _clean(self) -> None:
        """Register as a writer of the folder, and remove the half-written files and reservations of killed writers."""
        self._cleaned = time.monotonic()
        if not self._number:
            self._folder.add_domain(self._domain, self._about)
            self._number, self._life = self._folder.add_writer()
        alive = self._folder.live_writers() | {self._number}
        self.num_others = len(alive) - 1
        self._folder.remove_leftovers(alive)
        self._remove([name for name, entry in self._log.index.reserved.items() if entry.writer not in alive])

    def _finish_reservations(self) -> None:
        """Release the reserved room of objects that were not written."""
        reserved = self._log.index.reserved
        self._remove([name for name in self._unfinished if name in reserved and reserved[name].writer == self._number])
        self._unfinished.clear()

    def _follow(self, orders: Orders) -> None:
        index, now = self._log.index, time.time()
        names = {self._tag + key for key in orders.dropped}
        names |= {self._tag + key for key in orders.suspects  # others may have replaced the object meanwhile
                  if find_damage(self._folder.object_path(self._domain, key), self._domain, key) is not None}
        self._remove([name for name in names if name in index.stored])
        records = [named_record(Op.TOUCH, self._tag + key, time=now) for key in orders.touched
                   if self._tag + key in index.stored]
        records += [named_record(Op.PIN, self._tag + key, time=until) for key, until in orders.pinned.items()
                    if self._tag + key in index.stored]
        if records:
            self._log.append(records)
        self._queue.reveal(orders.keys())
        early = {key: until for key, until in orders.pinned.items() if key in self._queue.pending}
        if early:
            self._queue.put_back(Orders(pinned=early), is_soon=True)

    def _reserve(self, batch: list[QueuedObject]) -> list[QueuedObject]:
        """Make and reserve room for a batch, and return the objects to write now."""
        index = self._log.index
        new = {self._tag + item.key: item for item in batch if self._queue.is_wanted(item)}
        new = {name: item for name, item in new.items() if name not in index.stored and name not in index.reserved}
        needed = sum(bytes_on_disk(len(item.payload)) + 4 * RECORD_BYTES for item in new.values())
        over = self._log.disk_bytes + needed - self._size_bytes
        if new:
            over = max(over, needed + self._min_free_bytes - self._folder.free_bytes())
        victims = index.victims(over, time.time())
        if victims is None:
            if new:
                self._stats.decline("no room", f"{self._folder.free_bytes()} bytes are free on the disk", len(new))
            return []
        self._stats.add(evicted=len(victims))
        self._remove(victims)
        now = time.time()
        reserved = [named_record(Op.RESERVE, name, length=len(item.payload), writer=self._number, time=now)
                    for name, item in new.items()]
        if reserved:
            self._log.append(reserved)
        return list(new.values())

    def _remove(self, names: list[bytes]) -> None:
        """Delete files, then record that in the log. A reader that does not know of it yet finds no file, which is a
        miss."""
        for name in names:
            self._folder.remove(name)
        if names:
            self._log.append([named_record(Op.DROP, name) for name in names])

    # Without the lock

    def _write(self, item: QueuedObject) -> bool:
        if self._is_late():
            self._stats.decline("closed", "an object was not written in time")
            return False
        self._num_files += 1
        temporary = self._folder.temporary_path(self._number, self._num_files)
        header = ObjectHeader(self._domain, item.key, len(item.payload), zlib.crc32(item.payload), item.is_boundary)
        try:
            write_object(temporary, header, item.payload)
            self._folder.publish(temporary, self._folder.object_path(self._domain, item.key))
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            self._stats.decline(FULL.get(error.errno or 0, "I/O error"), error)
            return False
        return True
