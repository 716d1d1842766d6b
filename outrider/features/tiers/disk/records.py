"""Records of the shared log: 72 bytes each, with a checksum to detect torn and damaged ones."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

RECORD_BYTES = 72
TAG_BYTES = 8
_FORM = struct.Struct("<BBHI8sQQd32s")  # operation, flags, nothing, checksum, then the fields of a record
assert _FORM.size == RECORD_BYTES
_CHECK = slice(4, 8)
LOG_MAGIC = b"outrider cache log, version 1".ljust(32)
_KEPT = 1  # the only flag


class Op(IntEnum):
    HEAD = 1  # the first record; `key` is LOG_MAGIC
    RESERVE = 2  # a writer is about to write an object: its bytes count, and it cannot be read yet
    STORE = 3  # the object's file is whole
    TOUCH = 4
    PIN = 5  # `time` is when the pin ends
    DROP = 6  # the object's file is gone


class Record(NamedTuple):
    op: Op
    key: bytes
    tag: bytes = bytes(TAG_BYTES)  # the first bytes of the object's domain
    length: int = 0  # of the payload
    is_kept: bool = False  # not among the objects that are evicted first
    writer: int = 0  # who reserves
    time: float = 0.0

    @property
    def name(self) -> bytes:
        """The name of the object in the index of the folder."""
        return self.tag + self.key

    def pack(self) -> bytes:
        return self._packed(zlib.crc32(self._packed(0)))

    def _packed(self, check: int) -> bytes:
        return _FORM.pack(self.op, _KEPT if self.is_kept else 0, 0, check, self.tag, self.writer, self.length,
                          self.time, self.key)


def pack_records(records: Iterable[Record]) -> bytes:
    return b"".join(record.pack() for record in records)


def read_records(data: bytes) -> list[Record]:
    """Return the intact records at the beginning of `data`, up to the first torn or damaged one."""
    found = []
    unchecked = bytearray(data)
    view = memoryview(unchecked)
    for start in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        op, flags, _, check, tag, writer, length, time, key = _FORM.unpack_from(data, start)
        unchecked[start + _CHECK.start:start + _CHECK.stop] = bytes(4)
        if zlib.crc32(view[start:start + RECORD_BYTES]) != check or op not in _OPS:
            break
        found.append(Record(_OPS[op], key, tag, length, bool(flags & _KEPT), writer, time))
    return found


_OPS = {int(op): op for op in Op}
