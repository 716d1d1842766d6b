"""PageMedium: the interface of one storage outside the device for the bytes of pages and recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


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
        """Store a copy of the payload, perhaps later: never blocks on I/O, because a step waits for it. False:
        declined, because the medium is full or too slow.
        `boundary`: the end of a prompt or a turn, kept longest."""
        ...

    def load(self, key: bytes, into: memoryview) -> bool:
        """Fill `into`. True only if all bytes came and their checksum is right. Every error is a miss: it returns
        False, is counted, and leaves `into` undefined. A medium that takes seconds for it is left alone for a while."""
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


@runtime_checkable
class TellsFinds(Protocol):
    """A PageMedium to which other processes write too."""

    @property
    def is_shared(self) -> bool:
        """Whether there are such processes now, as far as is known."""
        ...

    def take_found(self) -> list[bytes]:
        """The keys that others have stored since the last call."""
        ...


@runtime_checkable
class CountsReasons(Protocol):
    """A PageMedium that tells why it did not take or give an object."""

    def reasons(self) -> dict[str, int]:
        """How many objects, by reason, since the start."""
        ...


@runtime_checkable
class PinsObjects(Protocol):
    """A PageMedium that keeps the pages of sessions first. Neither method blocks on I/O."""

    def pin(self, keys: Iterable[bytes], until: float) -> None:
        """Evict these objects last, until a time of the wall clock."""
        ...

    def drop(self, keys: Iterable[bytes]) -> None:
        """Delete these objects, soon."""
        ...


class Lease(NamedTuple):
    """The bytes of an object where a medium keeps them. They do not change until `end` is called, once."""

    data: memoryview
    end: Callable[[], None]


@runtime_checkable
class LendsBytes(Protocol):
    """A PageMedium in the host's memory, whose bytes are read where they lie instead of being copied by `load`."""

    def lend(self, key: bytes, num_bytes: int) -> Lease | None:
        """The bytes of an object of this length. None: it is not there."""
        ...
