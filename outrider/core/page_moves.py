"""PageMoves: copies of cache pages between the device and other storage, as orders of a batch and reports of a step. No
torch.

The scheduler decides which page is copied to which storage. The worker copies the bytes and finds each storage by its
name. A page is ordered to be stored only when its content is final, and is copied before later work of the batch may
overwrite it. A loaded page belongs to no request until the load is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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


@dataclass(slots=True)
class PageMoves:
    """Orders to copy pages, as a part of one batch. Every batch with this part gets a report, so an empty one only asks
    for news."""

    stores: list[PageStore] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    asks_places: bool = False  # whether the scheduler does not know the places yet
    cancelled: list[int] = field(default_factory=list)  # ids of loads whose pages may be overwritten from now on


class LoadedPages(NamedTuple):
    """The end of a load: for each page the storage that its bytes came from, or None if no storage had them."""

    id: int
    places: tuple[str | None, ...]


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
