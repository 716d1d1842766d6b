"""CacheSessions: pages of conversations that are kept first in places beyond the device, for a while after each turn.

A request names its session (`CacheSession`). When it ends, the pages that the next turn will look up are pinned: places
evict them last. All sessions of one owner may pin a number of pages, so that no owner takes a place for itself; beyond
that the oldest sessions are let go. The owner of a session may have its pages dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from outrider.cache.pages import PageKey
from outrider.core.input_part import InputPart
from outrider.core.page_moves import PagePin

SESSION_SECONDS = 900.0  # nine of ten pauses between turns of recorded conversations were shorter than eight minutes
PIN_SECONDS = 2 * SESSION_SECONDS  # longer, so that a turn need not pin again what the turn before it has pinned
OWNERS_SHARE = 4  # one owner pins at most this part of a place, all owners twice as much
UNPINNED = 0.0  # in place of the time until which a page is pinned
IsStored = Callable[[bytes], bool]  # whether a place holds the page of this key


@dataclass(frozen=True, slots=True)
class CacheSession(InputPart):
    """The session that a request belongs to."""

    owner: str
    name: str


@dataclass(slots=True)
class Session:
    until: float  # by the wall clock
    pinned_until: float
    pages: dict[bytes, PageKey | None]  # by their keys in other places, those that are evicted first come first
    found: Collection[bytes]  # keys of pages that were found when the session began: others may use them too


@dataclass(slots=True)
class SessionOrders:
    pins: list[PagePin] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pins or self.dropped)


class CacheSessions:
    """The sessions of one engine. They outlive schedulers."""

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: of the smallest place."""
        self._most_bytes = most_bytes
        self.page_bytes = 1
        self._sessions: dict[tuple[str, str], Session] = {}  # by owner and name, the one used last comes last
        self._awaited: dict[bytes, float] = {}  # pages that are to be pinned when they are stored
        self._unwanted: set[bytes] = set()  # pages that are to be dropped when they are stored
        self._orders = SessionOrders()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def take_orders(self) -> SessionOrders:
        orders, self._orders = self._orders, SessionOrders()
        return orders

    def begin(self, asked: CacheSession, found: Collection[bytes]) -> None:
        """Note that a request of a session starts. found: keys of the pages that it was given by the cache."""
        key = asked.owner, asked.name
        if key not in self._sessions:
            self._sessions[key] = Session(time.time() + SESSION_SECONDS, 0.0, {}, frozenset(found))

    def extend(self, asked: CacheSession, pages: Mapping[bytes, PageKey | None], is_stored: IsStored) -> None:
        """Pin the pages that the next turn of a session needs, for some time from now on. They replace those of the
        turn before."""
        now, key = time.time(), (asked.owner, asked.name)
        before = self._sessions.pop(key, None) or Session(0.0, 0.0, {}, frozenset())
        most = self._most_bytes // (OWNERS_SHARE * self.page_bytes)
        kept = dict(list(pages.items())[max(0, len(pages) - most):])  # the beginning of the text is kept longest
        is_pinned = before.pinned_until >= now + SESSION_SECONDS
        pinned_until = before.pinned_until if is_pinned else now + PIN_SECONDS
        self._sessions[key] = Session(now + SESSION_SECONDS, pinned_until, kept, before.found)
        self._unpin(name for name in before.pages if name not in kept)
        self._unwanted.difference_update(kept)
        new = [name for name in kept if not (is_pinned and name in before.pages)]
        self._pin([name for name in new if is_stored(name)], pinned_until)
        self._awaited.update({name: pinned_until for name in new if not is_stored(name)})
        self._let_go(asked.owner, most, now)

    def note_stored(self, key: bytes) -> None:
        """A place has stored a page."""
        until = self._awaited.pop(key, None)
        if key in self._unwanted:
            self._unwanted.remove(key)
            self._orders.dropped.append(key)
        elif until is not None:
            self._pin([key], until)

    def drop(self, asked: CacheSession, is_stored: IsStored) -> dict[bytes, PageKey | None] | None:
        """Drop the pages of a session's last turn, unless they were there before it or another session has them too.
        Returns the dropped pages; None if there is no such session."""
        session = self._sessions.pop((asked.owner, asked.name), None)
        if session is None:
            return None
        held = {name for other in self._sessions.values() for name in other.pages}
        own = {name: page for name, page in session.pages.items() if name not in held and name not in session.found}
        self._unpin(name for name in session.pages if name not in held and name in session.found)
        for name in own:
            self._awaited.pop(name, None)
        self._orders.dropped += [name for name in own if is_stored(name)]
        self._unwanted.update(name for name in own if not is_stored(name))
        return own

    def forget(self) -> None:
        """Forget all sessions: none of their pages is found again."""
        for key in list(self._sessions):
            self._forget_session(key)
        self._awaited.clear()
        self._unwanted.clear()

    @property
    def num_pages(self) -> int:
        return sum(len(session.pages) for session in self._sessions.values())

    def _let_go(self, owner: str, most: int, now: float) -> None:
        """Let sessions go whose time is over, then the oldest ones of owners that have too many pages."""
        for key in [key for key, session in self._sessions.items() if session.until <= now]:
            self._forget_session(key)
        own = {key: len(session.pages) for key, session in self._sessions.items() if key[0] == owner}
        self._shrink(own, most)
        self._shrink({key: len(session.pages) for key, session in self._sessions.items()}, 2 * most)

    def _shrink(self, sizes: Mapping[tuple[str, str], int], most: int) -> None:
        total = sum(sizes.values())
        for key, size in list(sizes.items())[:-1]:
            if total <= most:
                break
            self._forget_session(key)
            total -= size

    def _forget_session(self, key: tuple[str, str]) -> None:
        session = self._sessions.pop(key)
        held = {name for other in self._sessions.values() for name in other.pages}
        self._unpin(name for name in session.pages if name not in held)

    def _pin(self, names: list[bytes], until: float) -> None:
        if names:
            self._orders.pins.append(PagePin(tuple(names), until))

    def _unpin(self, names: Iterable[bytes]) -> None:
        gone = list(names)
        for name in gone:
            self._awaited.pop(name, None)
        self._pin(gone, UNPINNED)
