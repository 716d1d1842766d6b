"""LoadChoice: decides whether pages from beyond the device are loaded or computed, by times measured while running.

    computing   the prompt tokens of large steps, and how long these steps took
    reading     the time in which each place reads a page
    a trip      what a load takes beside reading: until its order is sent, and its report is back

Before enough was measured, pages are loaded. A choice against loading is tried again now and then, because a place that
was slow once may be fast again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from outrider.core.page_moves import ReadTime

LEAST_TOKENS = 2048  # prompt tokens that must have been timed
LEAST_PAGES = 32  # pages of a place that must have been timed
LARGE_STEP = 0.5  # times the most prompt tokens of a step: smaller steps say little of the time of a token
HALF_LIFE = 256.0  # observations after which one counts half
TRIED_AGAIN = 32  # of so many choices against loading, one is not followed

TOO_SMALL: Final = "too small"
SLOWER: Final = "slower than computing"


class Mean:
    """A mean of which new observations count more than old ones."""

    def __init__(self) -> None:
        self.count = 0.0  # of all observations
        self._weight, self._sum = 0.0, 0.0

    def add(self, total: float, count: float = 1.0) -> None:
        """Add observations of this total."""
        kept = 0.5 ** (1 / HALF_LIFE)
        self.count += count
        self._weight, self._sum = kept * self._weight + count, kept * self._sum + total

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


@dataclass(slots=True)
class TimedSteps:
    """When the steps in flight were scheduled, and the prompt tokens in them."""

    tokens: dict[int, int] = field(default_factory=dict)  # by step
    scheduled: dict[int, float] = field(default_factory=dict)
    last_result: float = 0.0


class LoadChoice:
    """Times are those of the monotonic clock."""

    def __init__(self) -> None:
        self._steps = TimedSteps()
        self._most_tokens = 0
        self._token = Mean()  # seconds of a prompt token
        self._trip = Mean()
        self._reading: dict[str, Mean] = {}  # by place, seconds of a page
        self._num_against = 0

    # Measuring

    def schedule_tokens(self, step: int, num_tokens: int) -> None:
        """Note that a step computes prompt tokens."""
        self._steps.tokens[step] = self._steps.tokens.get(step, 0) + num_tokens
        self._steps.scheduled.setdefault(step, time.monotonic())

    def end_step(self, step: int) -> None:
        """Note that the result of a step has come."""
        now, steps = time.monotonic(), self._steps
        num_tokens = steps.tokens.pop(step, 0)
        seconds = now - max(steps.scheduled.pop(step, now), steps.last_result)
        steps.last_result = now
        self._most_tokens = max(self._most_tokens, num_tokens)
        if num_tokens and num_tokens >= LARGE_STEP * self._most_tokens:
            self._token.add(seconds, num_tokens)

    def forget_steps(self) -> None:
        """Forget steps that will have no result."""
        self._steps.tokens.clear()
        self._steps.scheduled.clear()

    def observe_reading(self, times: list[ReadTime]) -> None:
        for read in times:
            self._reading.setdefault(read.place, Mean()).add(read.seconds)

    def observe_load(self, began: float, num_pages: Mapping[str, int]) -> None:
        """Note that a load has ended, of so many pages by place."""
        seconds = time.monotonic() - began - self.read_seconds(num_pages)
        self._trip.add(max(0.0, seconds))

    # Choosing

    def read_seconds(self, num_pages: Mapping[str, int]) -> float:
        return sum(count * self._reading[name].value for name, count in num_pages.items() if name in self._reading)

    def compute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self._token.value

    def why_not(self, num_tokens: int, num_pages: Mapping[str, int], waiting: Mapping[str, int]) -> str | None:
        """Why pages should be computed, in words for a metric; None if they should be loaded. num_tokens: how many
        tokens that would be. num_pages: how many pages each place has. waiting: pages that are loaded before them."""
        if self._token.count < LEAST_TOKENS or not all(self._is_measured(name) for name in num_pages):
            return None
        computing, reading = self.compute_seconds(num_tokens), self.read_seconds(num_pages)
        if self._trip.value + reading + self.read_seconds(waiting) <= computing:
            return None
        self._num_against += 1
        if self._num_against % TRIED_AGAIN == 0:
            return None
        return TOO_SMALL if reading <= computing else SLOWER

    def _is_measured(self, name: str) -> bool:
        return name in self._reading and self._reading[name].count >= LEAST_PAGES
