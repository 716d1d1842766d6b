"""WeightsTurn: a lock under which a thread reads the weights. They cannot sleep or change meanwhile."""

from __future__ import annotations

import threading

from outrider.core.background_work import BackgroundWork


class WeightsTurn(BackgroundWork):
    """A lock for reading weights. A reading thread holds `lock`. The worker holds it from `pause` to `resume`, while
    weights sleep or change."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._is_paused = False

    def pause(self) -> None:
        if not self._is_paused:
            self.lock.acquire()
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.lock.release()

    def close(self) -> None:
        self.resume()  # a thread that waits goes on to its end
