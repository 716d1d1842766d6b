"""The actions of `outrider cache` on a folder: list it, check it, export and import a model, and clear it."""

from __future__ import annotations

import json
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.features.tiers.disk.folder import ABOUT, CacheFolder, CacheFolderError
from outrider.features.tiers.disk.index import named_record
from outrider.features.tiers.disk.object_file import (
    HEADER_BYTES,
    DamagedObject,
    ObjectHeader,
    bytes_on_disk,
    find_damage,
)
from outrider.features.tiers.disk.records import TAG_BYTES, Op
from outrider.features.tiers.disk.shared_log import SharedLog
from outrider.features.tiers.disk.store import DiskStore

LOCK_SECONDS = 30.0
MOST_ABOUT = 1 << 20  # bytes of a description
MOST_BYTES = 1 << 32  # of an object
FEW = 256  # objects that are deleted while the lock is held once


@dataclass(slots=True)
class DomainSummary:
    """One domain of a cache folder: the objects of one model and the settings that decide the bytes of its pages."""

    domain: bytes
    about: dict[str, Any]
    num_objects: int = 0
    num_kept: int = 0  # boundaries, and what was used again
    num_pinned: int = 0  # held by sessions
    num_bytes: int = 0  # on the disk
    oldest: float | None = None  # time of the last use
    newest: float | None = None


@dataclass(slots=True)
class CheckResult:
    num_whole: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)  # path and reason


@contextmanager
def open_folder(path: str | Path) -> Iterator[tuple[CacheFolder, SharedLog]]:
    """Open an existing cache folder with its list of objects. Raises CacheFolderError if it is not a disk cache."""
    if not os.path.isdir(path):
        raise CacheFolderError(f"there is no folder {path}: give the folder of --disk-cache-dir")
    folder = CacheFolder(path, create=False)
    log = SharedLog(folder)
    try:
        with log.transaction(LOCK_SECONDS):
            pass
        yield folder, log
    finally:
        log.close()
        folder.close()


def summaries(folder: CacheFolder, log: SharedLog) -> list[DomainSummary]:
    """Summarise every domain of a folder, the most recently used one first."""
    found = {domain[:TAG_BYTES]: DomainSummary(domain, folder.about(domain)) for domain in folder.domains()}
    for name, entry in log.index.stored.items():
        summary = found.get(name[:TAG_BYTES])
        if summary is not None:
            summary.num_objects += 1
            summary.num_kept += name in log.index.order.kept
            summary.num_pinned += name in log.index.order.pinned
            summary.num_bytes += bytes_on_disk(entry.length)
            summary.oldest = min(entry.time, summary.oldest or entry.time)
            summary.newest = max(entry.time, summary.newest or entry.time)
    return sorted(found.values(), key=lambda summary: -(summary.newest or 0.0))


def find_domain(found: list[DomainSummary], text: str | None) -> DomainSummary:
    """Find the domain whose digest begins with a text, or whose model has that name. Without a text, return the only
    domain."""
    chosen = [summary for summary in found if text is None or summary.domain.hex().startswith(text)
              or summary.about.get("model") == text]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(f"{summary.domain.hex()[:12]} ({summary.about.get('model', 'unknown')})" for summary in found)
    if not chosen:
        what = "holds no model" if text is None else f"holds no model {text!r}"
        raise CacheFolderError(f"the cache folder {what}; it holds: {there or 'nothing'}")
    raise CacheFolderError(f"say which model with --model, by the first digits of its digest: {there}")


def check_objects(folder: CacheFolder, log: SharedLog, *, remove: bool) -> CheckResult:
    """Read every object and verify its checksum. remove: delete those that are damaged."""
    result = CheckResult()
    names = []
    for domain in folder.domains():
        for key, path in folder.object_keys(domain):
            reason = find_damage(path, domain, key)
            if reason is None:
                result.num_whole += 1
            elif reason != "absent":  # evicted while this reads
                result.damaged.append((path, reason))
                names.append(domain[:TAG_BYTES] + key)
    if remove and names:
        _remove(folder, log, names)
    return result


def clear(folder: CacheFolder, log: SharedLog, domain: bytes | None = None) -> int:
    """Delete the objects of one domain, or of all, and return how many. Engines that use the folder go on, and store
    new ones."""
    names = [name for name in log.index.stored if domain is None or name.startswith(domain[:TAG_BYTES])]
    _remove(folder, log, names)
    with log.transaction(LOCK_SECONDS):
        if not folder.live_writers():
            for each in folder.domains() if domain is None else [domain]:
                folder.remove_domain(each)
    return len(names)


def export_domain(folder: CacheFolder, log: SharedLog, domain: bytes, output: Path) -> int:
    """Write the intact objects of a domain to a new tar file that only the user can read. Returns how many."""
    count = 0
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        about = os.path.join(folder.path, domain.hex(), ABOUT)
        if os.path.exists(about):
            archive.add(about, f"{domain.hex()}/{ABOUT}", filter=_private)
        for name in log.index.order.next_victims():  # the order of their use, which an import keeps
            path = folder.object_path(domain, name[TAG_BYTES:])
            if name.startswith(domain[:TAG_BYTES]) and find_damage(path, domain, name[TAG_BYTES:]) is None:
                archive.add(path, f"{domain.hex()}/{name[TAG_BYTES:].hex()}", filter=_private)
                count += 1
    return count


def import_archive(path: Path, archive: Path, size_bytes: int) -> tuple[int, int]:
    """Store the objects of an exported domain in a folder, which is made if it is missing. Only headers are trusted,
    not the names in the archive. Returns how many objects were stored, and how many were damaged."""
    num_damaged = 0
    stores: dict[bytes, DiskStore] = {}
    try:
        with tarfile.open(archive, mode="r:") as members:
            about: dict[str, Any] = {}
            for member in members:
                data = _content(members, member)
                if member.name.endswith(f"/{ABOUT}"):
                    about = _read_about(data)
                    continue
                header = _header(data)
                if header is None:
                    num_damaged += 1
                    continue
                if header.domain not in stores:
                    stores[header.domain] = DiskStore(path, header.domain, size_bytes, about=about)
                _store_surely(stores[header.domain], header, data[HEADER_BYTES:])
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is not a complete export of a cache ({error}): export it again") from None
    finally:
        for store in stores.values():
            store.close(60.0)
    return sum(store.stats().stored for store in stores.values()), num_damaged


def _store_surely(store: DiskStore, header: ObjectHeader, payload: bytes) -> None:
    """Store an object, and wait if the queue is full."""
    for _ in range(2):
        if store.store(header.key, memoryview(payload), boundary=header.is_boundary):
            return
        store.flush(60.0)


def _header(data: bytes) -> ObjectHeader | None:
    """Return the header of an object's file, or None if the object is damaged."""
    try:
        header = ObjectHeader.from_bytes(data[:HEADER_BYTES])
    except DamagedObject:
        return None
    payload = memoryview(data)[HEADER_BYTES:]
    return header if (len(payload), zlib.crc32(payload)) == (header.length, header.checksum) else None


def _content(members: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = members.extractfile(member) if member.isreg() and member.size < MOST_BYTES else None
    return b"" if file is None else file.read()


def _read_about(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data[:MOST_ABOUT])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode, member.uid, member.gid, member.uname, member.gname = 0o600, 0, 0, "", ""
    return member


def _remove(folder: CacheFolder, log: SharedLog, names: list[bytes]) -> None:
    for start in range(0, len(names), FEW):  # engines wait for the lock
        with log.transaction(LOCK_SECONDS):
            for name in names[start:start + FEW]:
                folder.remove(name)
            log.append([named_record(Op.DROP, name) for name in names[start:start + FEW]])
