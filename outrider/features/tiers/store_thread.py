"""StoreThread: gives pages to places on a thread of its own, so that no step copies their bytes a second time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from outrider.core.page_moves import PageStore

CLOSE_SECONDS = 10.0
MOST_BYTES = 1 << 30  # that wait for the thread
PAUSE_SECONDS = 2e-5  # after a page, in which the thread of the steps can take the interpreter's lock at once


class StoreThread:
    """Keeps the order of the pages. Begins with the first page."""

    def __init__(self, store: Callable[[PageStore, memoryview], None]) -> None:
        self._store = store
        self._waiting: deque[tuple[PageStore, memoryview]] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, order: PageStore, payload: memoryview) -> bool:
        """Have a page stored. The payload must not change. Returns False if too many bytes wait."""
        with self._changed:
            if self._num_bytes + len(payload) > MOST_BYTES:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outrider-store", daemon=True)
                self._thread.start()
            self._waiting.append((order, payload))
            self._num_bytes += len(payload)
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Store what waits, within a bounded time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                order, payload = self._waiting.popleft()
            self._store(order, payload)
            with self._changed:
                self._num_bytes -= len(payload)
            time.sleep(PAUSE_SECONDS)
