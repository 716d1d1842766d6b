"""ObservedPool: a PagePool that queues pages to be stored outside the device, and tracks pages that are being
loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from outrider.cache.events import STATE_BYTES, PageContent
from outrider.cache.media import PageMedia
from outrider.cache.pages import PageKey, PagePool
from outrider.core.page_moves import MOST_STORE_BYTES, PageStore


class PageQueue:
    """Pages to be stored with the next batch, by page number."""

    def __init__(self, media: PageMedia, state_group: int) -> None:
        self.media, self._state_group = media, state_group
        self.is_boundary = True  # of the pages that are published now
        self._stores: dict[int, PageStore] = {}
        self._reused: list[PageStore] = []  # of pages that the next batch overwrites
        self.told: dict[bytes, tuple[PageKey, PageContent]] = {}  # of pages to be stored, if events are recorded

    def __len__(self) -> int:
        return len(self._stores) + len(self._reused)

    def add(self, page: int, page_key: PageKey, content: PageContent | None = None) -> None:
        if not self.media.is_open:
            return
        group, digest = page_key
        index = int.from_bytes(digest[STATE_BYTES:], "little") if group == self._state_group else 0
        key = self.media.key_of(group, digest, index)
        if not self.media.is_everywhere(key):
            self._stores[page] = PageStore(page, key, self.is_boundary)
            if content is not None:
                self.told[key] = page_key, content

    def evict(self, page: int, page_key: PageKey) -> None:
        """Queue an evicted page that no storage has. Pages of recurrent states are not queued, because they are evicted
        one by one and are useless alone."""
        group, digest = page_key
        if page not in self._stores and group != self._state_group and self.media.is_open:
            if not self.media.has(self.media.key_of(group, digest)):
                self.add(page, page_key)

    def reuse(self, page: int, *, was_blank: bool) -> None:
        """Note that the next batch overwrites a page. It must be copied first, unless it was blank: then it has no
        content any more."""
        store = self._stores.pop(page, None)
        if store is not None and not was_blank:
            self._reused.append(store)

    def take(self, pool: PagePool) -> list[PageStore]:
        """Return the pages to store with the next batch: all that it overwrites, and others up to MOST_STORE_BYTES. The
        rest waits for later batches. Blank pages are left out, because they have no content any more."""
        stores, self._reused = self._reused, []
        most = max(1, MOST_STORE_BYTES // max(1, self.media.stats.page_bytes))
        for page in list(islice(self._stores, most)):
            store = self._stores.pop(page)
            if not pool.is_blank(page):
                stores.append(store)
        return stores

    def clear(self) -> None:
        self._stores.clear()
        self._reused.clear()
        self.told.clear()


class WantedPage(NamedTuple):
    """A page of a prefix that the device lacks and another storage holds."""

    key: bytes
    group: int
    page_key: PageKey | None  # None: a page of a recurrent state
    content: PageContent | None = None  # for the record of cache events, if there is one


@dataclass(slots=True)
class Arrival:
    """The pages of one prefix that are being loaded, and the requests that wait for them."""

    requests: set[int]
    wanted: list[WantedPage]
    pages: list[int]  # one for each of `wanted`
    present: list[int]  # pages of the prefix that are on the device, held so that they are not evicted meanwhile
    digest: bytes = b""  # of the tokens before the recurrent state, if one is among them
    num_pages: Counter[str] = field(default_factory=Counter)  # by the place that they are expected from
    began: float = field(default_factory=time.monotonic)

    @property
    def held(self) -> list[int]:
        return [*self.pages, *self.present]


@dataclass(slots=True)
class Pending:
    """The moves that the worker was ordered to make and has not reported yet."""

    num_batches: int = 0  # batches with orders
    num_stores: int = 0
    num_forgotten: int = 0  # of these, the first ones: pages that are not to be found again
    loads: dict[int, Arrival] = field(default_factory=dict)  # by id


class ObservedPool(PagePool):
    """A PagePool that queues pages to be stored when they become findable and when they are evicted."""

    def __init__(self, num_pages: int, queue: PageQueue) -> None:
        super().__init__(num_pages)
        self.queue = queue
        self.arriving = Pending()

    def check(self, held: dict[int, int]) -> None:
        arriving = [page for arrival in self.arriving.loads.values() for page in arrival.held]
        super().check(Counter(held) + Counter(arriving))

    def publish(self, page: int, key: PageKey, content: PageContent | None = None) -> None:
        known = self.find(key)
        super().publish(page, key, content)
        if known != page and self.find(key) == page:
            self.queue.add(page, key, content)

    def forget_pages(self, keys: Iterable[PageKey]) -> None:
        """Make pages blank that are cached under these keys; those of running requests stay."""
        for key in keys:
            page = self.find(key)
            if page is not None and not self.is_held(page):
                del self._cached[page]
                self._forget(page)
                self._add_blank(page)
                if self.events is not None:
                    self.events.remove_pages([key], is_empty=False)

    def allocate(self, group: int, *, is_overwritten: bool = False) -> int:
        if not self._num_blank:
            page = next(iter(self._cached))
            key = self._key[page]
            assert key is not None, f"page {page} is cached without content"
            self.queue.evict(page, key)
        was_blank = self._num_blank > 0
        page = super().allocate(group, is_overwritten=is_overwritten)
        self.queue.reuse(page, was_blank=was_blank)
        return page
