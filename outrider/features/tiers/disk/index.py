"""Index: the objects of a folder according to its log. Every process that reads the same records has the same index and
so evicts in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.cache.eviction import EvictionOrder
from outrider.features.tiers.disk.object_file import bytes_on_disk
from outrider.features.tiers.disk.records import LOG_MAGIC, TAG_BYTES, Op, Record


@dataclass(slots=True)
class Entry:
    length: int  # of the payload
    time: float  # of the last use
    writer: int = 0  # of a reservation


class Index:
    """The index of a folder's objects. A name is a domain's tag and a key. Several threads read `stored` while one
    applies records, so each entry is replaced or removed in a single operation."""

    def __init__(self) -> None:
        self.dropped: deque[bytes] | None = None  # takes the names of stored objects that a record drops
        self.stored: dict[bytes, Entry] = {}
        self.reserved: dict[bytes, Entry] = {}
        self.order: EvictionOrder[bytes] = EvictionOrder()
        self.num_bytes = 0  # on the disk, of stored and reserved objects; never less than what is there

    def apply(self, record: Record) -> None:
        name = record.name
        match record.op:
            case Op.RESERVE:
                self._remove(name)
                self.reserved[name] = Entry(record.length, record.time, record.writer)
                self.num_bytes += bytes_on_disk(record.length)
            case Op.STORE:
                self._remove(name)
                self.stored[name] = Entry(record.length, record.time)
                self.num_bytes += bytes_on_disk(record.length)
                self.order.add(name, is_kept=record.is_kept)
            case Op.TOUCH if name in self.stored:
                self.stored[name].time = record.time
                self.order.use(name)
            case Op.PIN:
                self.order.pin(name, record.time)
            case Op.DROP:
                if self.dropped is not None and name in self.stored:
                    self.dropped.append(name)
                self._remove(name)

    def victims(self, num_bytes: int, now: float) -> list[bytes] | None:
        """Return the objects to evict to free `num_bytes`, or None if there are not enough."""
        self.order.end_pins(now)
        found = []
        for name in self.order.next_victims() if num_bytes > 0 else ():
            found.append(name)
            num_bytes -= bytes_on_disk(self.stored[name].length)
            if num_bytes <= 0:
                break
        return found if num_bytes <= 0 else None

    def records(self) -> Iterator[Record]:
        """Return the shortest log from which this index can be made again."""
        yield Record(Op.HEAD, LOG_MAGIC)
        for name, entry in self.reserved.items():
            yield named_record(Op.RESERVE, name, length=entry.length, writer=entry.writer, time=entry.time)
        for name in self.order.next_victims():
            entry = self.stored[name]
            yield named_record(Op.STORE, name, length=entry.length, is_kept=name not in self.order.interior,
                               time=entry.time)
            if name in self.order.pinned:
                yield named_record(Op.PIN, name, time=self.order.pinned[name])

    def _remove(self, name: bytes) -> None:
        for entries in (self.stored, self.reserved):
            entry = entries.pop(name, None)
            if entry is not None:
                self.num_bytes -= bytes_on_disk(entry.length)
        self.order.remove(name)


def named_record(op: Op, name: bytes, *, length: int = 0, is_kept: bool = False, writer: int = 0,
                 time: float = 0.0) -> Record:
    return Record(op, name[TAG_BYTES:], name[:TAG_BYTES], length, is_kept, writer, time)
