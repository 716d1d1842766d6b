"""PlaceHealth: whether a place beyond the device is asked now, or left alone because it hung or failed."""

from __future__ import annotations

MOST_FAILURES = 3  # in a row, after which a place is left alone
REST_SECONDS = 30.0  # for which it is left alone, at first
MOST_REST_SECONDS = 600.0


class PlaceHealth:
    """Times are those of the monotonic clock. A rest that follows another one without a success takes twice as long."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._rest_seconds = REST_SECONDS
        self._until = 0.0
        self._num_hung = 0  # threads that still wait for an answer

    def rest(self, now: float) -> float:
        """The seconds for which the place should not be asked; 0 if it may be asked."""
        return max(self._until - now, REST_SECONDS if self._num_hung else 0.0, 0.0)

    def succeed(self) -> None:
        self._num_failures, self._rest_seconds = 0, REST_SECONDS

    def fail(self, now: float) -> None:
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES:
            self._begin_rest(now)

    def hang(self, now: float) -> None:
        """A thread was given up that waits for an answer."""
        self._num_hung += 1
        self._begin_rest(now)

    def answer(self) -> None:
        """The place has answered a thread that was given up."""
        self._num_hung -= 1

    def _begin_rest(self, now: float) -> None:
        self._until = now + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, MOST_REST_SECONDS)
