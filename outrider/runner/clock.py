"""Clocks that time the parts of a step for a trace. A step that is not traced has a clock that does nothing."""

from __future__ import annotations

import time

from outrider.core.step_messages import StepTimes


class NoClock:
    """The clock of a step that is not traced."""

    def lap(self, part: str) -> None:
        """Note that the part with this name ends now. The part began where the previous part ended."""

    @property
    def times(self) -> StepTimes | None:
        return None


class StepClock(NoClock):
    """Measures how long each part of a step takes, starting at its construction. It reads the host's clock, so a part's
    time is right only if the host does the computing itself."""

    def __init__(self) -> None:
        self._began = time.time()
        self._last = time.perf_counter()
        self._parts: list[tuple[str, float]] = []

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts.append((part, now - self._last))
        self._last = now

    @property
    def times(self) -> StepTimes:
        return StepTimes(self._began, tuple(self._parts))


NO_CLOCK = NoClock()
