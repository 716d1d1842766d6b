"""Objects for tests of the disk cache whose bytes follow from their key, so every reader can check them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.features.tiers.disk import DiskStore

DOMAIN = hashlib.sha256(b"a model").digest()
SIZE = 64 << 20


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"object %d" % number).digest()


def payload_of(key: bytes, length: int) -> bytes:
    return hashlib.shake_128(key).digest(length)


def length_of(key: bytes) -> int:
    """A length between 1 and 48 KiB that the key decides."""
    return 1 + int.from_bytes(key[:4], "little") % (48 << 10)


@contextmanager
def opened(folder: Path, size: int = SIZE, domain: bytes = DOMAIN, **more: Any) -> Iterator[DiskStore]:
    store = DiskStore(folder, domain, size, **{"min_free_bytes": 0} | more)
    try:
        yield store
    finally:
        store.close()


def put(store: DiskStore, key: bytes, length: int | None = None, *, boundary: bool = False) -> bool:
    length = length_of(key) if length is None else length
    return store.store(key, memoryview(payload_of(key, length)), boundary=boundary)


def get(store: DiskStore, key: bytes, length: int | None = None) -> bool:
    """Whether the object is found. Its bytes must be right then."""
    length = length_of(key) if length is None else length
    into = bytearray(length)
    found = store.load(key, memoryview(into))
    assert not found or into == payload_of(key, length), f"wrong bytes of {key.hex()}"
    return found


def object_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/??/*") if len(path.name) == 64)


def bytes_in(folder: Path) -> int:
    """What the files of a folder take of the disk."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total
