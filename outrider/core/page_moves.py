"""PageMoves: copies of cache pages between the device and other storage, as orders of a batch and reports of a step. No
torch.

The scheduler decides which page is copied to which storage. The worker copies the bytes and finds each storage by its
name. A page is ordered to be stored only when its content is final, and is copied before later work of the batch may
overwrite it. A loaded page belongs to no request until the load is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_STORE_BYTES = 32 << 20  # of pages that one batch copies to other storage, beside those that it overwrites


class PageStore(NamedTuple):
    """An order to copy a page to every storage that lacks it."""

    page: int
    key: bytes
    is_boundary: bool  # the end of a prompt or a turn: kept longest


class PageLoad(NamedTuple):
    """An order to fill pages with the bytes of these keys. The load ends when all of its pages are filled, perhaps
    several steps later."""

    id: int
    pages: tuple[tuple[int, bytes], ...]
    patience: float  # seconds after which pages that have not come are given up


class PagePin(NamedTuple):
    """An order to evict pages last, until a time of the wall clock. 0: no longer."""

    keys: tuple[bytes, ...]
    until: float


@dataclass(slots=True)
class PageMoves:
    """Orders to copy pages, as a part of one batch. Every batch with this part gets a report, so an empty one only asks
    for news."""

    stores: list[PageStore] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    asks_places: bool = False  # whether the scheduler does not know the places yet
    cancelled: list[int] = field(default_factory=list)  # ids of loads whose pages may be overwritten from now on
    pins: list[PagePin] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)  # keys whose bytes places should delete
    asks_news: bool = False  # whether a request waits for the report


class LoadedPages(NamedTuple):
    """The end of a load: for each page the place that its bytes came from, or None if they did not come."""

    id: int
    places: tuple[str | None, ...]
    is_late: bool = False  # a place was not asked for all pages, because it or the load took too long


class ReadTime(NamedTuple):
    """The time in which a place has read one page."""

    place: str
    seconds: float


@dataclass(frozen=True, slots=True)
class OpenedPlaces:
    """The keys that each storage holds after the worker has opened it. Empty if the storages could not be opened."""

    domain: bytes  # digest of everything that the bytes of all pages depend on
    keys: Mapping[str, Sequence[bytes]]  # by the place's name


@dataclass(slots=True)
class MovesReport:
    opened: OpenedPlaces | None = None  # if the orders ask for it and the places are open
    stored: list[tuple[bytes, tuple[str, ...]]] = field(default_factory=list)  # keys, and the places that took them
    loaded: list[LoadedPages] = field(default_factory=list)
    evicted: list[tuple[str, list[bytes]]] = field(default_factory=list)  # keys that places have no more, where told
    found: list[tuple[str, list[bytes]]] = field(default_factory=list)  # keys that other processes have stored
    is_shared: bool = False  # whether other processes may store pages in a place
    read_times: list[ReadTime] = field(default_factory=list)
    # By place: the pages that it did not take or give since it was opened, by reason. Left out if nothing has changed.
    reasons: dict[str, Mapping[str, int]] = field(default_factory=dict)
    rests: Mapping[str, float] = field(default_factory=dict)  # places that are left alone, and for how many seconds
