"""KnownStates: recurrent states from which requests can begin, found by the digest of the tokens before them.

The pool caches and evicts the pages of a state one by one, like any others. A state that has lost a page cannot be
found any more. When a request begins from a state, its pages are held until that batch is made."""

from __future__ import annotations

from collections.abc import Callable

from outrider.cache.kinds import RecurrentKind
from outrider.cache.pages import PageKey, PagePool

DigestAt = Callable[[int], bytes]  # boundary to the digest of a request's tokens before it


class KnownStates:
    def __init__(self, kind: RecurrentKind, group: int, pool: PagePool) -> None:
        self.kind, self.pool = kind, pool
        self.num_restored = 0
        self._group = group  # to the pool, states are a group without a page table
        self._pages_of: dict[bytes, tuple[int, list[int]]] = {}  # digest to (checkpoint, pages); pages may be evicted
        self._restoring: dict[int, list[int]] = {}  # request to pages

    def find(self, digest: bytes) -> list[int] | None:
        """Return the pages of a state; None if the state is unknown or has lost a page."""
        entry = self._pages_of.get(digest)
        if entry is None:
            return None
        keys = self._keys(digest, *entry)
        return entry[1] if all(self.pool.find(key) == page for key, page in zip(keys, entry[1], strict=True)) else None

    def publish(self, digest: bytes, checkpoint: int, pages: list[int]) -> None:
        """Make a state findable by its digest. The caller holds the pages and frees them afterwards."""
        known = self.find(digest)
        if known is not None:  # freed anew, so that it is evicted no earlier than the attention pages that go with it
            self._hold(known)
            self._free(known)
            return
        keys = self._keys(digest, checkpoint, pages)
        for page, key in zip(pages, keys, strict=True):
            self.pool.publish(page, key)
        if self.pool.events is not None:
            self.pool.events.store_state(digest, keys[0])
        self._pages_of[digest] = (checkpoint, pages)
        if len(self._pages_of) > self.pool.num_pages:
            self._pages_of = {d: entry for d, entry in self._pages_of.items() if self.find(d) is not None}

    # Restoring

    def pages_to_restore(self, pages: list[int]) -> int:
        """Return how many of these pages must be held for a restore, so that they are not allocated to others before
        the restore's batch is made. Pages that are held for another request's restore do not count."""
        restoring = set(self.held())
        return sum(page not in restoring for page in pages)

    def restore(self, request_id: int, pages: list[int]) -> None:
        """Hold the pages of the state that the request begins from. `pages` is empty if the request begins from no
        state."""
        if pages:
            self._hold(pages)
            self._restoring[request_id] = pages
            self.num_restored += 1

    def restored(self, request_id: int) -> list[int]:
        """Return the pages of the state that the request begins from; empty if it begins from none."""
        return self._restoring.get(request_id, [])

    def end_restoring(self) -> None:
        """Free the pages of all restored states. Called when the batch that restores them is made; from then on later
        batches may take the pages."""
        for request_id in list(self._restoring):
            self.release(request_id)

    def release(self, request_id: int) -> None:
        self._free(self._restoring.pop(request_id, []))

    def held(self) -> list[int]:
        """Return all pages that are held for restores. A page that is held for several requests occurs several
        times."""
        return [page for pages in self._restoring.values() for page in pages]

    def _hold(self, pages: list[int]) -> None:
        for page in pages:
            self.pool.hold(page)

    def _free(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.pool.free(page)

    def _keys(self, digest: bytes, checkpoint: int, pages: list[int]) -> list[PageKey]:
        """Return the keys of the state's pages. Keys contain the checkpoint's id, so that the pages of two states of
        the same prefix are never mixed."""
        stem = digest + checkpoint.to_bytes(8, "little")
        return [(self._group, stem + i.to_bytes(4, "little")) for i in range(len(pages))]
