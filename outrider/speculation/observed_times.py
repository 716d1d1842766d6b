"""ObservedTimes: compares the times of steps with and without drafts with the times that the measured costs predict.

The costs were measured on the device at start-up, with padding rows. Real steps may take longer: the host may be slower
than a small model's steps, and real token rows use different experts, while padding rows all use the same ones. This
slows steps with drafts and without drafts by different factors. So the factors are estimated from the last steps of
each kind. The median is taken, because a step may take long for other reasons, such as the capture of a graph. The
machine may also become slower for all steps alike while only one kind of step is made; this is estimated too."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

READING = -1  # in the place of the most drafts: a drafter proposes some, to read along, and none are checked
LAST = 9  # steps of a kind that count
ENOUGH = 3  # below, the kind is not known: the median of so many bears one long step, such as the first of a size
NEAR_SIZES = 2  # doublings of the number of requests over which depths compare alike
NOTICEABLE = 0.18  # logarithm of a change of the machine's speed that is no noise
FORGET_AFTER = 4096  # steps without one of a kind, until it is tried again
STALE_AFTER = 64  # steps without one of a kind, until its times are those of another time


@dataclass(slots=True)
class _Kind:
    """Times of steps with the same depth and about the same number of requests, each divided by its predicted time."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    found: float | None = None  # their median; None if there are too few
    slowness: float = 1.0  # of the machine, when that was found
    last_seen: int = 0


class Estimate(NamedTuple):
    """The factor on the expected time of a step, and whether similar steps were observed."""

    ratio: float
    is_sure: bool


class _Slowness:
    """The factor by which steps have become slower since the beginning, estimated from neighbouring steps of the same
    size."""

    def __init__(self) -> None:
        self.now = 1.0
        self._size: object = None
        self._ratios: deque[float] = deque(maxlen=LAST)
        self._found: float | None = None

    def observe(self, size: object, ratio: float) -> None:
        if size != self._size:
            self._size, self._found = size, None
            self._ratios.clear()
        self._ratios.append(ratio)
        if len(self._ratios) >= ENOUGH:
            found = median(self._ratios)
            if self._found is None:
                self._found = found
            elif abs(math.log(found / self._found)) > NOTICEABLE:  # less would be noise, which adds up over many runs
                self.now *= found / self._found
                self._found = found


class ObservedTimes:
    """Ratios of actual to predicted step times, by the most drafts of a request (the depth) and by the number of
    requests, rounded to powers of two."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._slowness = _Slowness()
        self._num_observed = 0
        self._estimates: dict[tuple[int, int], Estimate] = {}  # what was asked since the last observation

    def ratio(self, num_requests: int, depth: int) -> float:
        """Return the factor by which to multiply the expected time of a step. depth: the most drafts of a request."""
        return self.estimate(num_requests, depth).ratio

    def estimate(self, num_requests: int, depth: int) -> Estimate:
        """Return the factor for a step, from the most similar steps that were seen. If this depth was not seen with
        about so many requests, the ratio of the nearest depth is taken, and corrected by how the two depths compare
        with other numbers of requests."""
        key = num_requests.bit_length(), depth
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = self._estimate(*key)
        return found

    def _estimate(self, size: int, depth: int) -> Estimate:
        """Estimate the factor like `estimate`. size: the number of bits of the number of requests."""
        own = self._known(size, depth)
        if own is not None:
            return Estimate(own, True)
        near, others = self._nearest(size, depth), self._sizes_near(size)
        if near is None:
            if not others:
                return Estimate(self._slowness.now, False)
            ratio, is_sure = self._estimate(others[0], depth)
            return Estimate(ratio, is_sure and abs(others[0] - size) <= NEAR_SIZES)
        near_depth, ratio = near
        if near_depth <= 0 and depth <= 0:
            return Estimate(ratio, True)
        for other in others:
            there, near_there = self._known(other, depth), self._known(other, near_depth)
            if there is not None and near_there is not None:
                return Estimate(ratio * there / near_there, abs(other - size) <= NEAR_SIZES)
        return Estimate(ratio, False)

    def _sizes_near(self, size: int) -> list[int]:
        """Return the other sizes for which the ratio of some depth is known, nearest first."""
        found = {other for other, depth in self._kinds if other != size and self._known(other, depth) is not None}
        return sorted(found, key=lambda other: abs(other - size))

    def is_known(self, num_requests: int, depth: int) -> bool:
        """Whether enough steps of this kind were seen lately."""
        return self._known(num_requests.bit_length(), depth) is not None

    def is_any_known(self, num_requests: int) -> bool:
        """Whether enough steps of any depth were seen with about so many requests."""
        return self._nearest(num_requests.bit_length(), 0) is not None

    @property
    def slowness(self) -> float:
        """Return the factor by which all steps have become slower since the beginning."""
        return self._slowness.now

    def observe(self, num_requests: int, depth: int, rows: int, foreseen: float, seconds: float) -> None:
        """Note the time of a step. rows: the number of token rows of the step."""
        kind, ratio = self._kinds.setdefault((num_requests.bit_length(), depth), _Kind()), seconds / foreseen
        self._slowness.observe((num_requests, depth, rows), ratio)
        self._num_observed += 1
        self._estimates.clear()
        if self._num_observed - kind.last_seen > STALE_AFTER:
            kind.ratios.clear()
        kind.ratios.append(ratio)
        kind.last_seen = self._num_observed
        if len(kind.ratios) >= ENOUGH:
            kind.found, kind.slowness = median(kind.ratios), self._slowness.now

    def _nearest(self, size: int, depth: int) -> tuple[int, float] | None:
        """Return the nearest depth whose ratio is known for this size, and the ratio; None if there is none."""
        known = [(abs(max(own, 0) - max(depth, 0)), own, found) for other, own in self._kinds
                 if other == size and (found := self._known(size, own)) is not None]
        return min(known)[1:] if known else None

    def _known(self, requests: int, depth: int) -> float | None:
        """Return the current ratio of steps of this kind; None if too few were seen, or too long ago."""
        kind = self._kinds.get((requests, depth))
        if kind is None or kind.found is None or self._num_observed - kind.last_seen > FORGET_AFTER:
            return None
        return kind.found * self._slowness.now / kind.slowness
