"""How long steps with and without drafts really take, beside what their measured costs foresee.

Costs are those of the device, measured at start-up with null rows. A host that is slower than a small model's steps, or
token rows that go to different experts where null rows all go to the same, make steps longer, and those with drafts not
as much as those without. So the times of steps are compared with what was foreseen, as the median of the last ones: a
step beside which a graph was captured, or whose result nobody fetched for a while, says nothing.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

READING = -1  # in the place of the most drafts: a drafter proposes some, to read along, and none are checked
LAST = 15  # steps of a kind that count
ENOUGH = 5  # below, what was foreseen holds: what is not known yet is to be tried
FORGET_AFTER = 4096  # steps without one of a kind, until it is tried again


class ObservedTimes:
    """Ratios of times to foreseen times, by the most drafts of a request, for numbers of requests up to each power of
    two."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._found: dict[tuple[int, int], float] = {}
        self._last_seen: dict[tuple[int, int], int] = {}
        self._num_observed = 0

    def ratio(self, num_requests: int, depth: int) -> float:
        """What to multiply the foreseen time of a step by. depth: the most drafts of a request. Where no such step was
        seen, half of what the nearest number of drafts has shown is believed: what is not tried is never known."""
        requests = num_requests.bit_length()
        self._forget_old(requests, depth)
        found = self._found.get((requests, depth))
        if found is not None or depth <= 0:
            return 1.0 if found is None else found
        known = [other for own, other in self._found if own == requests and other > 0]
        if not known:
            return 1.0
        return math.sqrt(self._found[requests, min(known, key=lambda other: abs(other - depth))])

    def _forget_old(self, requests: int, depth: int) -> None:
        kind = (requests, depth)
        if kind in self._found and self._num_observed - self._last_seen[kind] > FORGET_AFTER:
            del self._found[kind], self._ratios[kind]

    def observe(self, num_requests: int, depth: int, foreseen: float, seconds: float) -> None:
        kind = (num_requests.bit_length(), depth)
        ratios = self._ratios.setdefault(kind, deque(maxlen=LAST))
        ratios.append(seconds / foreseen)
        self._num_observed += 1
        self._last_seen[kind] = self._num_observed
        if len(ratios) >= ENOUGH:
            self._found[kind] = median(ratios)
