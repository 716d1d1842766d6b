"""Waits for work, and lets a worker prepare for later steps meanwhile. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Got = TypeVar("Got")


def wait_for(take: Callable[[float | None], Got | None], idle: Callable[[float], float | None]) -> Got:
    """Call `take` until it returns something, and return that. `take` gets the seconds that it may wait, or None for no
    limit. Between its calls `idle` does a little work. It gets the seconds since the wait began, and returns the
    seconds until it wants the next call, or None for no further call."""
    begin = time.perf_counter()
    pause = idle(0.0)
    while pause is not None:
        got = take(pause)
        if got is not None:
            return got
        pause = idle(time.perf_counter() - begin)
    while (got := take(None)) is None:
        pass
    return got
