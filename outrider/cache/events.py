"""CacheEvents: a record of which pages and recurrent states were added to the prefix cache or removed from it.

Routers in front of several engines index these events (`engine/kv_event_wire.py`). `PagePool` and `KnownStates` write
the record, if there is one. Pages that only a drafter uses are left out, because a prefix hit does not need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from outrider.cache.groups import CacheLayout

DIGEST_BYTES = 16
WEIGHTS_KEY = "weights="  # what the key of the weights' version begins with
STATE_BYTES = DIGEST_BYTES + 8  # first bytes of the keys of a state's pages: digest and checkpoint


class PageContent(NamedTuple):
    """The content of a page: its tokens and the other values that identify it, for subscribers that compute hashes
    themselves."""

    parent: bytes | None  # digest of the page before; None for the first page
    token_ids: tuple[int, ...]
    keys: tuple[str, ...]  # of its request: what must be equal beside the tokens, as a salt


class PageStored(NamedTuple):
    """An event: from now on requests can find this page, or this recurrent state. The `content` of a recurrent state is
    None."""

    group: int
    digest: bytes
    content: PageContent | None
    labels: tuple[tuple[str, str], ...] = ()  # keys of the content that have a public name, and the names
    medium: str = ""  # the place beyond the device; "": the device


class PageRemoved(NamedTuple):
    group: int
    digest: bytes
    medium: str = ""


class AllRemoved(NamedTuple):
    """An event: no page and no recurrent state can be found any more."""


CacheEvent = PageStored | PageRemoved | AllRemoved


class CacheEvents:
    """The record of an engine's cache events. It outlives the caches: an engine that starts again has a new cache and
    the same record."""

    def __init__(self, layout: CacheLayout, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        """labels: public names of cache keys, by key."""
        self.layout = layout
        self._labels = labels
        self.state_group = len(layout.groups)  # the group that the pool knows states by
        self._target_groups = frozenset(group.index for group in layout.groups if group.is_target)
        self._states: set[bytes] = set()  # digest and checkpoint of every state that can be found
        self._events: list[CacheEvent] = []

    def add(self, event: CacheEvent) -> None:
        self._events.append(event)

    def store_page(self, key: tuple[int, bytes], content: PageContent | None, medium: str = "") -> None:
        if key[0] in self._target_groups:
            keys = () if content is None else content.keys
            labels = tuple((word, label) for word in keys if (label := self._labels.get(word)) is not None)
            self._events.append(PageStored(*key, content, labels, medium))

    def store_state(self, digest: bytes, page_key: tuple[int, bytes]) -> None:
        """Note that from now on a recurrent state can be found. `page_key`: the key of one of the state's pages."""
        self._states.add(page_key[1][:STATE_BYTES])
        self._events.append(PageStored(self.state_group, digest, None))

    def remove_pages(self, keys: Sequence[tuple[int, bytes]], *, is_empty: bool) -> None:
        """Note pages that can no longer be found. A recurrent state is lost with the first of its pages. is_empty:
        whether no page can be found any more."""
        if is_empty:
            self.remove_all()
            return
        for group, digest in keys:
            if group in self._target_groups:
                self._events.append(PageRemoved(group, digest))
            elif group == self.state_group and digest[:STATE_BYTES] in self._states:
                self._states.remove(digest[:STATE_BYTES])
                self._events.append(PageRemoved(group, digest[:DIGEST_BYTES]))

    def remove_all(self) -> None:
        self._states.clear()
        self._events.append(AllRemoved())

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
