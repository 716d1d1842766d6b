"""PagePool: allocates pages and counts how many requests hold each. It finds a page by the hash of its content, and
chooses the pages that are reused.

Every page but the null page is always in exactly one state: blank (no content), cached (content without a holder) or
owned (one or more holders). The pool uses no tokens and no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from outrider.cache.events import CacheEvents, PageContent
from outrider.core import NULL_PAGE, PageChanges

NO_GROUP = -1  # in place of a page's last group: no group has had the page yet
UNCLEAN = -2  # in place of a page's last group: the page may hold bytes of any group
PageKey = tuple[int, bytes]  # group, chained hash of the tokens up to the page's end


class PagePool:
    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2, because one page always stays empty; got {num_pages}")
        self.num_pages = num_pages
        # Blank pages by the group that had them last, which reuses them uncleared; the page freed last is reused first.
        self._blank: dict[int, list[int]] = {NO_GROUP: list(range(num_pages - 1, NULL_PAGE, -1))}
        self._num_blank = num_pages - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._holders = [0] * num_pages
        self._key: list[PageKey | None] = [None] * num_pages
        self._page_of: dict[PageKey, int] = {}
        self._last_group = [NO_GROUP] * num_pages
        self._changes = PageChanges()  # changes of bytes since the last `take_changes`
        self.num_evicted = 0
        self.events: CacheEvents | None = None  # record of pages that become findable, and that no longer are

    @property
    def num_free(self) -> int:
        return self._num_blank + len(self._cached)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def find(self, key: PageKey) -> int | None:
        return self._page_of.get(key)

    def hold(self, page: int) -> None:
        """Add a holder to a cached or owned page."""
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def hold_all(self, pages: Iterable[int]) -> list[int]:
        held = list(pages)
        for page in held:
            self.hold(page)
        return held

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def allocate(self, group: int, *, is_overwritten: bool = False) -> int:
        """Return a page, with one holder. If the page last belonged to another group, the device clears its bytes
        before the next step, unless the holder overwrites all of them."""
        if self._num_blank:
            page = self._take_blank(group)
        else:
            page, _ = self._cached.popitem(last=False)
            key = self._forget(page)
            if self.events is not None:
                self.events.remove_pages([key], is_empty=False)
            self.num_evicted += 1
        assert self._holders[page] == 0, f"page {page} handed out twice"
        self._holders[page] = 1
        if self._last_group[page] not in (NO_GROUP, group) and not is_overwritten:
            self._changes.cleared.append(page)
        self._last_group[page] = group
        return page

    def free(self, page: int) -> None:
        self._holders[page] -= 1
        assert self._holders[page] >= 0, f"page {page} freed twice"
        if self._holders[page] == 0:
            if self._key[page] is None:
                self._add_blank(page)
            else:
                self._cached[page] = None

    def publish(self, page: int, key: PageKey, content: PageContent | None = None) -> None:
        """Make the page findable by `key`; its content is final. If another page with the same content is held, lookups
        still find that page. If it is only cached, the new page replaces it, because the old page would be evicted
        earlier than its neighbours in the prefix. `content`: for the record of events, if there is one."""
        assert self._holders[page] > 0, f"page {page} published without a holder"
        if self._key[page] is not None:
            return
        known = self._page_of.get(key)
        if known is not None:
            if self._holders[known] > 0:
                return
            del self._cached[known]
            self._forget(known)
            self._add_blank(known)
        elif self.events is not None:
            self.events.store_page(key, content)
        self._page_of[key] = page
        self._key[page] = key

    def forget_cached(self) -> bool:
        """Turn every cached page that no request holds into a blank page. Returns whether the prefix cache is now
        empty; pages of running requests stay in it."""
        forgotten = [self._forget(page) for page in self._cached]
        for page in self._cached:
            self._add_blank(page)
        self._cached.clear()
        if self.events is not None:
            self.events.remove_pages(forgotten, is_empty=not self._page_of)
        return not self._page_of

    def forget_all(self) -> None:
        """Forget the content of every page. Requests keep the pages that they hold."""
        if self._page_of:
            for page in [page for page in self._page_of.values() if self._holders[page]]:
                self._forget(page)
            self.forget_cached()

    def take_changes(self) -> PageChanges:
        """Return the pages to clear since the last call. The device clears them before the next step."""
        changes, self._changes = self._changes, PageChanges()
        return changes

    def lose_changes(self, lost: Iterable[PageChanges]) -> None:
        """Mark pages whose clearing was ordered in failed steps as unclean, because they may not have been cleared."""
        self.mark_unclean([page for changes in lost for page in changes.cleared])

    def mark_unclean(self, pages: Sequence[int]) -> None:
        """Mark pages that may still hold the bytes of another group, so that they are cleared before their next use."""
        blank = set(self.blank_pages()).intersection(pages)
        for group, own in self._blank.items():
            self._blank[group] = [page for page in own if page not in blank]
        for page in pages:
            self._last_group[page] = UNCLEAN
        self._blank.setdefault(UNCLEAN, []).extend(sorted(blank, reverse=True))

    def is_blank(self, page: int) -> bool:
        """Whether the page has no content and no holder."""
        return not self._holders[page] and self._key[page] is None

    def blank_pages(self) -> list[int]:
        return [page for own in self._blank.values() for page in own]

    def check(self, held: dict[int, int]) -> None:
        """Assert that every page is in exactly one state. `held`: the number of holders by page, counted by the
        owners."""
        blank, cached = set(self.blank_pages()), set(self._cached)
        assert len(blank) == len(self.blank_pages()) == self._num_blank, "a page is blank twice"
        assert all(self._last_group[page] == group for group, own in self._blank.items() for page in own)
        for page in range(1, self.num_pages):
            owners = held.get(page, 0)
            assert self._holders[page] == owners, f"page {page}: {self._holders[page]} holders counted, {owners} found"
            states = (page in blank) + (page in cached) + (owners > 0)
            assert states == 1, f"page {page} is in {states} states"
            assert not (page in cached and self._key[page] is None), f"page {page} is cached without content"
            assert not (page in blank and self._key[page] is not None), f"page {page} is blank with content"
        assert NULL_PAGE not in held and self._holders[NULL_PAGE] == 0, "the null page has an owner"
        for key, page in self._page_of.items():
            assert self._key[page] == key, f"page {page} is known by two contents"

    def _take_blank(self, group: int) -> int:
        """Take a blank page: preferably one that this group had last, then one that no group has had, then any
        other."""
        own = self._blank.get(group) or self._blank.get(NO_GROUP) or next(filter(None, self._blank.values()))
        self._num_blank -= 1
        return own.pop()

    def _add_blank(self, page: int) -> None:
        self._blank.setdefault(self._last_group[page], []).append(page)
        self._num_blank += 1

    def _forget(self, page: int) -> PageKey:
        """Remove the content of a page, so that it can no longer be found. Returns the key that it had."""
        key = self._key[page]
        assert key is not None, f"page {page} has no content to forget"
        del self._page_of[key]
        self._key[page] = None
        return key
