"""Restarts: limits how often a failed engine is restarted, and makes the wait before each restart longer.

The wait grows because an engine that fails twice within seconds may need a resource that becomes free later, such as
device memory that another process still holds.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0  # over which restarts are counted
FIRST_SECONDS = 1.0  # before the first restart of a window
GROWTH = 4.0  # of the wait, by each restart in the window
MOST_SECONDS = 60.0


class Restarts:
    def __init__(self, most: int) -> None:
        """most: the number of restarts that are allowed within the time window."""
        self._most = most
        self._times: deque[float] = deque()  # of the restarts within the window, when they were decided

    def next_wait(self, now: float) -> float | None:
        """Record a restart and return the seconds to wait before it. None if no more restarts are allowed now."""
        while self._times and now - self._times[0] > WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= self._most:
            return None
        self._times.append(now)
        return min(MOST_SECONDS, FIRST_SECONDS * GROWTH ** min(len(self._times) - 1, 9))
