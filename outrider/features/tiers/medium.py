"""PageMedium: the interface of one storage outside the device for the bytes of pages and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class PageMedium(Protocol):
    """One storage for page bytes outside the device: host memory, a disk folder, an object store.

    Keys are digests of 32 bytes that cover everything the bytes depend on, so the bytes of a key never change. All
    methods may be called from any thread. Objects stored without `boundary`, such as recurrent states inside a prompt,
    are evicted first until a hit promotes them. Touch the last page of a prefix first and its first page last, because
    a prefix without its first page is of no use."""

    name: str  # "host", "disk"; in metrics and KV events

    def contains(self, key: bytes) -> bool:
        """Whether a load would probably find the key. Called while a batch is planned: cheap, and never blocks on
        I/O."""
        ...

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        """Store a copy of the payload, now or later. Returns False if the medium declines because it is full or too
        slow. `boundary`: whether this is the end of a prompt or a turn, which is kept longest."""
        ...

    def load(self, key: bytes, into: memoryview) -> bool:
        """Fill `into`, and return True if all bytes were read and their checksum is right. Every error is a miss: it
        returns False, is counted, and leaves `into` undefined."""
        ...

    def touch(self, key: bytes) -> None:
        """Note a hit: the object becomes the most recently used one."""
        ...

    def close(self) -> None:
        """Write the objects that were stored but not written yet, within a bounded time."""
        ...


@runtime_checkable
class ListsKeys(Protocol):
    """A PageMedium that may hold pages when an engine starts. Only keys in its list can be found."""

    def keys(self) -> Sequence[bytes]:
        """Return the keys that it holds now. May take long."""
        ...


@runtime_checkable
class TellsEvictions(Protocol):
    """A PageMedium that reports evicted keys, so that no request waits for a page that is gone."""

    def take_evicted(self) -> list[bytes]:
        """Return the keys that were evicted since the last call."""
        ...
