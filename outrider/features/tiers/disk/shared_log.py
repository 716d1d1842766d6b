"""SharedLog: the list of a folder's objects, as a log that every process appends to and whose end every process reads.

The log is changed only while the folder's lock is held. A process appends with one write, so a killed process leaves at
most a torn end. A process that holds the lock and finds the log torn, damaged or missing makes it again from the
folder, in the order of use that intact records give. A process that reads without the lock may miss recent records,
which only costs hits."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outrider.features.tiers.disk.folder import CacheFolder
from outrider.features.tiers.disk.index import Index, named_record
from outrider.features.tiers.disk.object_file import DamagedObject, ObjectHeader, read_header
from outrider.features.tiers.disk.records import (
    LOG_MAGIC,
    RECORD_BYTES,
    TAG_BYTES,
    Op,
    Record,
    pack_records,
    read_records,
)

NOT_OPEN = -1
SHORT_LOG = 4096  # records; a shorter log is never compacted
SMALL_FILES = 16 << 10  # bytes on the disk of the marker and descriptions, and what the log's last unit wastes


class SharedLog:
    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        self.dropped: deque[bytes] | None = None  # takes the names that are stored no more
        self.found: deque[bytes] | None = None  # takes the names that other processes have stored
        self.has_others = False  # whether another process has written to the log since it was opened
        self.index = Index()
        self.num_rebuilt = 0  # times that the log was made anew from the folder
        self._file = NOT_OPEN
        self._inode = 0
        self._is_cut = False
        self.num_bytes = 0  # of the log, as far as it was read

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of all files of the cache folder on the disk, without directories."""
        return self.index.num_bytes + self.num_bytes + SMALL_FILES

    def close(self) -> None:
        if self._file != NOT_OPEN:
            os.close(self._file)
            self._file = NOT_OPEN

    def refresh(self) -> bool:
        """Read the records that were appended since the last call. Returns False if the log is missing or empty, or if
        it has a torn or damaged record."""
        try:
            found = os.stat(self._folder.log_path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if self._file == NOT_OPEN or found.st_ino != self._inode or found.st_size < self.num_bytes:
            self._open()
        return self._read_end()

    @contextmanager
    def transaction(self, timeout: float) -> Iterator[None]:
        """Hold the lock with an index that is up to date. Raises FolderBusy, or OSError if a damaged log cannot be made
        again."""
        with self._folder.locked(timeout):
            if not self.refresh():
                self._rebuild()
            if self._is_cut:
                self._replace(self.index)
            yield

    def append(self, records: Sequence[Record]) -> None:
        """Add records to the log and apply them. Call in a transaction. If it raises OSError, no record is added."""
        data = pack_records(records)
        try:
            if os.write(self._file, data) < len(data):
                raise OSError("the log could not be written to its end")
        except BaseException:
            self._is_cut = True  # processes that have read a part of it must read the log from its beginning
            with suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(data)
        for record in records:
            self.index.apply(record)

    def compact(self) -> None:
        """Rewrite the log if most of its records are obsolete. Call in a transaction."""
        num_records = self.num_bytes // RECORD_BYTES
        if num_records > SHORT_LOG and num_records > 4 * (len(self.index.stored) + len(self.index.reserved)):
            self._replace(self.index)

    def strays(self) -> set[bytes]:
        """Names for which the index and the folder disagree: files without an entry, and entries without a file. Lists
        the folder, but opens no file. Both are rare: a power failure may lose the end of the log, or some files."""
        there = {domain[:TAG_BYTES] + key for domain in self._folder.domains()
                 for key, _ in self._folder.object_keys(domain)}
        return there.difference(self.index.stored, self.index.reserved) | (set(self.index.stored) - there)

    def adopt(self, strays: set[bytes]) -> None:
        """Make the index agree with the folder about some names. Call in a transaction."""
        records = []
        for name in strays.difference(self.index.reserved):
            path = self._folder.path_of_name(name)
            is_there = path is not None and os.path.lexists(path)
            if is_there == (name in self.index.stored):
                continue
            header, written = _whole_header(str(path), self._folder.domain_of(name), name[TAG_BYTES:])
            if header is not None:
                records.append(named_record(Op.STORE, name, length=header.length, is_kept=header.is_boundary,
                                            time=written))
            elif not is_there:
                records.append(named_record(Op.DROP, name))
        if records:
            self.append(records)

    def _open(self) -> None:
        """Read the log from its beginning, with a new index."""
        self.close()
        self._file = os.open(self._folder.log_path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._inode = os.fstat(self._file).st_ino
        self.num_bytes = 0

    def _read_end(self) -> bool:
        size = os.fstat(self._file).st_size
        is_anew = self.num_bytes == 0
        data = _read(self._file, self.num_bytes, size - self.num_bytes)
        records = read_records(data)
        if is_anew:
            if records and (records[0].op, records[0].key) != (Op.HEAD, LOG_MAGIC):
                records = []
            index = Index()
            for record in records:
                index.apply(record)
            if self.dropped is not None:
                self.dropped += [name for name in self.index.stored if name not in index.stored]
            self._note_found([name for name in index.stored if name not in self.index.stored])
            index.dropped = self.dropped
            self.index = index  # at once: other threads look things up in it
        else:
            self.has_others |= bool(records)
            self._note_found([record.name for record in records
                              if record.op is Op.STORE and record.name not in self.index.stored])
            for record in records:
                self.index.apply(record)
        self.num_bytes += len(records) * RECORD_BYTES
        return self.num_bytes == size > 0

    def _note_found(self, names: list[bytes]) -> None:
        if self.found is not None:
            self.found += names

    def _rebuild(self) -> None:
        """Make the log again from the folder. Sizes come from the files. The order of use comes from intact records, or
        from the files' times."""
        prior, found = self.index, []
        for domain in self._folder.domains():
            for key, path in self._folder.object_keys(domain):
                header, written = _whole_header(path, domain, key)
                if header is not None:
                    found.append((domain[:TAG_BYTES] + key, header, written))
        index = Index()
        for name, entry in prior.reserved.items():
            index.apply(named_record(Op.RESERVE, name, length=entry.length, writer=entry.writer, time=entry.time))
        rows = []
        for name, header, written in found:
            known = prior.stored.get(name)
            is_kept = header.is_boundary or (known is not None and name not in prior.order.interior)
            rows.append((written if known is None else known.time, name, header.length, is_kept))
        for used, name, length, is_kept in sorted(rows):
            index.apply(named_record(Op.STORE, name, length=length, is_kept=is_kept, time=used))
        for name, until in prior.order.pinned.items():
            index.apply(named_record(Op.PIN, name, time=until))
        self._replace(index)
        self.num_rebuilt += 1

    def _replace(self, index: Index) -> None:
        temporary = f"{self._folder.path}/tmp/log-{time.time_ns():x}-{os.getpid()}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(pack_records(index.records()))
            os.rename(temporary, self._folder.log_path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._is_cut = False
        self._open()
        self._read_end()


def _read(file: int, start: int, count: int) -> bytes:
    parts = []
    while count > 0:
        part = os.pread(file, count, start)
        if not part:
            break
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return b"".join(parts)


def _whole_header(path: str, domain: bytes, key: bytes) -> tuple[ObjectHeader | None, float]:
    """Return the header of an object's file and its modification time; (None, 0.0) if it cannot be read. The file is
    deleted if it is damaged or belongs to another object."""
    try:
        header, written = read_header(path), os.stat(path, follow_symlinks=False).st_mtime
        if (header.domain, header.key) == (domain, key):
            return header, written
    except OSError:  # gone, or no more files may be open: that says nothing of the object
        return None, 0.0
    except DamagedObject:
        pass
    with suppress(OSError):
        os.unlink(path)
    return None, 0.0
