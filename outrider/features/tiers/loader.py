"""Loader: a thread that reads pages from host memory or disk into host buffers. No torch.

The thread never touches pages of the device: a later step copies the buffers there. So a cancelled load changes no
page, and a slow disk delays no step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.page_moves import PageLoad
from outrider.features.tiers.medium import PageMedium

log = logging.getLogger("outrider")
CLOSE_SECONDS = 10.0
MOST_STAGED = 256 << 20  # bytes of pages that were read and not copied yet


class StagedPage(NamedTuple):
    """The result of reading one page: its bytes, or the fact that no storage had it."""

    load: int
    position: int  # in its load
    page: int
    data: memoryview
    place: str | None  # None: no place had it, and `data` is undefined


class Loader:
    def __init__(self, media: Sequence[PageMedium], page_bytes: int, make_buffer: Callable[[int], memoryview]) -> None:
        """make_buffer: function that makes a host buffer of a given size, such as a pinned one."""
        self._media, self._page_bytes, self._make_buffer = media, page_bytes, make_buffer
        self._most_staged = max(1, MOST_STAGED // page_bytes)
        self._changed = threading.Condition()
        self._waiting: deque[PageLoad] = deque()
        self._cancelled: set[int] = set()
        self._staged: list[StagedPage] = []
        self._free: list[memoryview] = []  # buffers to use again
        self._num_unread = 0  # pages that are not staged yet
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, loads: Sequence[PageLoad]) -> None:
        with self._changed:
            self._waiting += loads
            self._num_unread += sum(len(load.pages) for load in loads)
            self._changed.notify_all()
        if loads and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outrider-loader", daemon=True)
            self._thread.start()

    def cancel(self, loads: Sequence[int]) -> None:
        """Forget these loads: none of their pages is returned from now on."""
        with self._changed:
            self._cancelled.update(loads)
            self._staged = [staged for staged in self._staged if staged.load not in self._cancelled]
            self._changed.notify_all()

    def take(self, wait_seconds: float = 0.0) -> list[StagedPage]:
        """Return the pages that were read since the last call. Waits for the first one if there is none."""
        with self._changed:
            if wait_seconds and self._num_unread and not self._staged:
                self._changed.wait(wait_seconds)
            staged, self._staged = self._staged, []
            self._changed.notify_all()
            return staged

    def give_back(self, staged: StagedPage) -> None:
        """Return a page's buffer for reuse, after its bytes were copied."""
        self._free.append(staged.data)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)  # it may wait for a place that does not answer

    # In the thread

    def _run(self) -> None:
        while (load := self._next()) is not None:
            for index, (page, key) in enumerate(load.pages):
                if not self._has_room(load.id):
                    self._pass(len(load.pages) - index)
                    break
                data = self._free.pop() if self._free else self._make_buffer(self._page_bytes)
                self._stage(StagedPage(load.id, index, page, data, self._read(key, data)))

    def _next(self) -> PageLoad | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return None if self._is_closed else self._waiting.popleft()

    def _has_room(self, load: int) -> bool:
        """Wait until another page may be read. Returns False if the load was cancelled."""
        with self._changed:
            while len(self._staged) >= self._most_staged and not self._is_closed and load not in self._cancelled:
                self._changed.wait()
            return not self._is_closed and load not in self._cancelled

    def _pass(self, num_pages: int) -> None:
        with self._changed:
            self._num_unread -= num_pages

    def _stage(self, staged: StagedPage) -> None:
        with self._changed:
            self._num_unread -= 1
            if staged.load not in self._cancelled:
                self._staged.append(staged)
                self._changed.notify_all()

    def _read(self, key: bytes, into: memoryview) -> str | None:
        """Read a page from the first storage that has the key, and return the storage's name."""
        for medium in self._media:
            try:
                if medium.contains(key) and medium.load(key, into):
                    medium.touch(key)
                    return medium.name
            except Exception:  # whatever a place fails of, it is a miss
                log.exception("%s: a page could not be read", medium.name)
        return None
