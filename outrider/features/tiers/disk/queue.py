"""StoreQueue: objects and orders that wait for the writer's thread. The bytes are bounded: if the disk is slow, stores
are declined, and no caller waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, eq=False)
class QueuedObject:
    key: bytes
    payload: bytes
    is_boundary: bool


@dataclass(slots=True)
class Orders:
    """Tasks of the writer other than stores, by key: objects to touch, pin, drop or check."""

    touched: dict[bytes, None] = field(default_factory=dict)  # in the order of their last use
    pinned: dict[bytes, float] = field(default_factory=dict)
    dropped: set[bytes] = field(default_factory=set)
    suspects: set[bytes] = field(default_factory=set)  # a load failed

    def __bool__(self) -> bool:
        return bool(self.touched or self.pinned or self.dropped or self.suspects)

    def keys(self) -> list[bytes]:
        """Keys that must not be loaded until the writer has carried out these orders."""
        return [*self.dropped, *self.suspects]


class StoreQueue:
    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._items: deque[QueuedObject] = deque()
        self._orders = Orders()
        self._changed = threading.Condition()
        self._is_working = False
        self._wants_turn = False
        self.is_closed = False
        self.pending: dict[bytes, QueuedObject] = {}  # queued, or being written: loads are served from here
        self.num_bytes = 0  # of pending objects
        self.hidden: set[bytes] = set()  # dropped or suspect: not to be loaded, though perhaps stored

    # Callers

    def put(self, key: bytes, payload: memoryview, is_boundary: bool) -> str | None:
        """Queue a copy of an object. Returns the reason if the store is declined, else None."""
        count = len(payload)
        with self._changed:
            if self.is_closed:
                return "closed"
            if self.num_bytes and self.num_bytes + count > self._limit:
                return "queue full"
            self.num_bytes += count  # before the copy, which is made without the lock
        item = QueuedObject(key, bytes(payload), is_boundary)
        with self._changed:
            if self.is_closed:  # meanwhile
                self.num_bytes -= count
                return "closed"
            self.pending[key] = item
            self._items.append(item)
            self._changed.notify_all()
        return None

    def touch(self, key: bytes) -> None:
        with self._changed:
            self._orders.touched.pop(key, None)
            self._orders.touched[key] = None

    def pin(self, keys: list[bytes], until: float) -> None:
        with self._changed:
            self._orders.pinned.update(dict.fromkeys(keys, until))

    def drop(self, keys: list[bytes]) -> None:
        """Remove the objects of these keys: those in the queue at once, those on the disk at the writer's next turn."""
        with self._changed:
            for key in keys:
                self.pending.pop(key, None)
                self._orders.dropped.add(key)
                self.hidden.add(key)
            self._wants_turn = True
            self._changed.notify_all()

    def suspect(self, key: bytes) -> None:
        """Have the writer check whether an object is damaged. The object is not loaded again before the check."""
        with self._changed:
            self._orders.suspects.add(key)
            self.hidden.add(key)

    def flush(self, timeout: float) -> bool:
        """Wait until all that is queued now has been written and the log has been read to its end. Returns False after
        the timeout."""
        with self._changed:
            self._wants_turn = not self.is_closed
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._is_busy(), timeout)

    def close(self) -> None:
        """Accept nothing more. The writer ends when the queue is empty."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    # The writer's thread

    def take(self, limit_bytes: int, timeout: float) -> tuple[list[QueuedObject], Orders]:
        """Take the next objects (at most `limit_bytes`, or one larger object) and all orders."""
        with self._changed:
            self._is_working = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_busy() or self.is_closed, timeout)
            self._is_working, self._wants_turn = True, False
            batch: list[QueuedObject] = []
            while self._items and (not batch or limit_bytes >= len(self._items[0].payload)):
                batch.append(self._items.popleft())
                limit_bytes -= len(batch[-1].payload)
            orders, self._orders = self._orders, Orders()
            return batch, orders

    def is_wanted(self, item: QueuedObject) -> bool:
        """Whether the object has not been dropped since it was queued."""
        return self.pending.get(item.key) is item

    def finish(self, item: QueuedObject) -> None:
        """Remove an object that has been written, or that will not be written."""
        with self._changed:
            self.num_bytes -= len(item.payload)
            if self.pending.get(item.key) is item:
                del self.pending[item.key]

    def is_empty(self) -> bool:
        return not self._items

    def give_up(self) -> int:
        """Drop all queued objects, and return how many there were."""
        with self._changed:
            count = len(self._items)
            for item in self._items:
                self.num_bytes -= len(item.payload)
                self.pending.pop(item.key, None)
            self._items.clear()
            return count

    def reveal(self, keys: Iterable[bytes]) -> None:
        """Allow loads of these keys again, because the orders about them have been carried out."""
        with self._changed:
            self.hidden.difference_update(keys)

    def put_back(self, orders: Orders, *, is_soon: bool = False) -> None:
        """Keep orders that could not be followed for a later turn, below newer ones. `is_soon`: for the next one."""
        with self._changed:
            new = self._orders
            self._wants_turn = self._wants_turn or is_soon
            self._orders = Orders(orders.touched | new.touched, orders.pinned | new.pinned,
                                  orders.dropped | new.dropped, orders.suspects | new.suspects)

    def _is_busy(self) -> bool:
        return self._is_working or self._wants_turn or bool(self._items)
