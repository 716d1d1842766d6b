"""PageMedia: the list of pages and recurrent states that are stored outside the device, in host memory or on disk.

The worker that copies the bytes reports every change to this list, the only one that the scheduler has. The list may be
out of date: a storage may have evicted a page, or another engine may have removed it. Then the load fails, the key is
forgotten here, and the tokens are computed. This file uses neither tokens nor bytes."""

from __future__ import annotations

import enum
import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.cache.events import DIGEST_BYTES
from outrider.core.feature_parts import Figure, ResultPart
from outrider.core.page_moves import OpenedPlaces

NEWS_SECONDS = 0.5  # after which a request that misses asks what others have stored, where others are
LONE_NEWS_SECONDS = 30.0  # the same, where no others are known
PATIENCE = 10.0  # seconds after the start for which requests wait until the places are open


class PlaceState(enum.Enum):
    OPENING = "the worker opens the places"
    OPEN = "pages are stored and found"
    UNUSABLE = "the places could not be opened: the engine goes on without them"


@dataclass(slots=True)
class MediaStats(ResultPart):
    """Counts of stores and loads since the engine started."""

    page_bytes: int = 0
    num_held: Counter[str] = field(default_factory=Counter)  # pages that a place is known to hold
    num_stored: Counter[str] = field(default_factory=Counter)  # pages by place
    num_declined: Counter[str] = field(default_factory=Counter)  # pages that a place did not take
    num_loaded: Counter[str] = field(default_factory=Counter)  # pages by place
    num_failed: int = 0  # pages whose load failed
    num_loads: int = 0  # by requests
    num_waits: int = 0  # requests that waited for the load of another request
    num_unloaded: Counter[str] = field(default_factory=Counter)  # requests that compute what a place has, by reason
    reasons: dict[str, Mapping[str, int]] = field(default_factory=dict)  # of places, see `MovesReport`

    def figures(self) -> tuple[Figure, ...]:
        by_place = [figure for name in self.num_held for figure in self._figures_of(name)]
        return (*by_place,
                Figure("cache_load_failures", "Pages whose load from beyond the device failed.", self.num_failed),
                Figure("cache_loads", "Requests that waited for pages from beyond the device.", self.num_loads),
                *[Figure("cache_unloaded", "Requests that compute what lies beyond the device, by reason.", number,
                         label=f'reason="{reason}"') for reason, number in list(self.num_unloaded.items())],
                *[Figure("cache_place_declines", "Pages that a place did not take or give, by reason.", number,
                         label=f'place="{name}",reason="{reason}"')
                  for name, own in list(self.reasons.items()) for reason, number in own.items()],
                Figure("cache_shared_loads", "Requests that waited for another one's pages.", self.num_waits))

    def _figures_of(self, name: str) -> list[Figure]:
        stored, loaded = self.num_stored[name], self.num_loaded[name]
        return [Figure(f"cache_{name}_pages", f"Pages that are kept in: {name}.", self.num_held[name], False),
                Figure(f"cache_{name}_pages_stored", f"Pages that were stored in: {name}.", stored),
                Figure(f"cache_{name}_pages_loaded", f"Pages that came from: {name}.", loaded),
                Figure(f"cache_{name}_bytes_stored", f"Bytes that were stored in: {name}.", stored * self.page_bytes),
                Figure(f"cache_{name}_bytes_loaded", f"Bytes that came from: {name}.", loaded * self.page_bytes),
                Figure(f"cache_{name}_pages_declined", f"Pages that were not taken by: {name}.",
                       self.num_declined[name])]


class PageMedia:
    """The list of one engine. It outlives schedulers, which an engine replaces after an interrupt."""

    def __init__(self, names: Sequence[str]) -> None:
        """names: the storages in lookup order."""
        self.names = tuple(names)
        self.stats = MediaStats()
        self._state = PlaceState.OPENING
        self._keys: dict[str, set[bytes]] = {name: set() for name in names}
        self._domain, self._version = b"", 0
        self._own = os.urandom(16)  # weights that came by an update are known to this engine alone
        self._tags: dict[tuple[int, int], bytes] = {}
        self._until = time.monotonic() + PATIENCE
        self._news_at, self._is_shared = 0.0, False
        self._rests: dict[str, float] = {}  # places that are left alone, and until when

    @property
    def is_opening(self) -> bool:
        return self._state is PlaceState.OPENING

    @property
    def is_open(self) -> bool:
        return self._state is PlaceState.OPEN

    @property
    def keeps_waiting(self) -> bool:
        """Whether requests still wait until the worker has opened the storages."""
        return self.is_opening and time.monotonic() < self._until

    def open(self, opened: OpenedPlaces) -> None:
        if not opened.keys:
            self._state = PlaceState.UNUSABLE
            return
        self._domain, self._state = opened.domain, PlaceState.OPEN
        self._tags.clear()
        self._keys = {name: set(opened.keys[name]) for name in self.names if name in opened.keys}  # the others failed
        self._count()

    def use_weights(self, version: int) -> None:
        """Make this version of the weights a part of all keys. Keys of versions above 0 are valid in this engine only,
        because another engine's weights may differ after as many updates."""
        self._version = version
        self._tags.clear()

    # Keys

    def key_of(self, group: int, digest: bytes, index: int = 0) -> bytes:
        """Return the key of a page: the digest of its prefix, then a digest of everything else that its bytes depend
        on. `index`: the page's number within a recurrent state."""
        tag = self._tags.get((group, index))
        if tag is None:
            version = self._own + self._version.to_bytes(8, "little") if self._version else b""
            place = group.to_bytes(4, "little") + index.to_bytes(4, "little")
            tag = hashlib.blake2b(self._domain + place + version, digest_size=16).digest()
            self._tags[group, index] = tag
        return digest[:DIGEST_BYTES] + tag

    def group_of(self, key: bytes) -> int | None:
        """Return the group of a page of the current weights, by its key. None if the page belongs to other weights or
        another engine."""
        return next((group for (group, _), tag in self._tags.items() if tag == key[DIGEST_BYTES:]), None)

    # Places

    def has(self, key: bytes) -> bool:
        """Whether a place holds the page that may be asked now."""
        return bool(self.place_of(key))

    def place_of(self, key: bytes) -> str:
        """The first place that holds the page and may be asked now; empty if there is none."""
        return next((name for name, own in self._keys.items() if key in own and name not in self._rests), "")

    def is_stored(self, key: bytes) -> bool:
        """Whether a place holds the page, though perhaps it may not be asked now."""
        return any(key in own for own in self._keys.values())

    def is_everywhere(self, key: bytes) -> bool:
        """Whether no place that may be asked now lacks the page."""
        return all(key in own or name in self._rests for name, own in self._keys.items())

    def leave_alone(self, rests: Mapping[str, float]) -> None:
        """Do not ask these places for as many seconds: they hung or failed."""
        now = time.monotonic()
        self._rests.update({name: now + seconds for name, seconds in rests.items()})
        self._rests = {name: until for name, until in self._rests.items() if until > now}

    @property
    def has_old_news(self) -> bool:
        """Whether other engines may have stored pages since the last report."""
        most = NEWS_SECONDS if self._is_shared else LONE_NEWS_SECONDS
        return time.monotonic() > self._news_at + most

    def take_news(self, found: Sequence[tuple[str, Sequence[bytes]]], *, is_shared: bool) -> None:
        """Note pages that other engines have stored."""
        self._news_at, self._is_shared = time.monotonic(), is_shared
        for name, keys in found:
            self._keys[name].update(keys)
        if found:
            self._count()

    def add(self, key: bytes, places: Sequence[str]) -> None:
        """Note which storages took a page that was ordered to be stored."""
        for name, own in self._keys.items():
            if name in places:
                own.add(key)
                self.stats.num_stored[name] += 1
            elif name not in self._rests:
                own.discard(key)
                self.stats.num_declined[name] += 1
        self._count()

    def evict(self, name: str, keys: Sequence[bytes]) -> list[bytes]:
        """Note pages that a place has evicted. Returns those that it was known to hold."""
        lost = [key for key in keys if key in self._keys[name]]
        self._keys[name].difference_update(lost)
        self._count()
        return lost

    def remove(self, key: bytes) -> list[str]:
        """Forget a page that could not be loaded or was dropped. Returns the places that were thought to hold it."""
        lost = [name for name, own in self._keys.items() if key in own]
        for name in lost:
            self._keys[name].remove(key)
        self._count()
        return lost

    def forget(self) -> None:
        """Forget all pages that the storages hold now, so that none is found again."""
        for own in self._keys.values():
            own.clear()
        self._count()

    def _count(self) -> None:
        for name, own in self._keys.items():
            self.stats.num_held[name] = len(own)
