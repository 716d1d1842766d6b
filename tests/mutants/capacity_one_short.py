"""Every kind of cache says it needs one page less than a request can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider.cache.kinds import Capacity, FullKind, SlidingKind
from outrider.core import Limits

NAME = "capacity one short"
TESTS = ["tests/unit/test_cache_kinds.py", "tests/unit/test_scheduler.py"]


def apply() -> None:
    for kind in (FullKind, SlidingKind):
        kind.capacity = _one_short(kind.capacity)  # type: ignore[method-assign]


def _one_short(capacity: Callable[..., Capacity]) -> Callable[..., Capacity]:
    def short(self: object, limits: Limits) -> Capacity:
        whole = capacity(self, limits)
        return replace(whole, max_pages=whole.max_pages - 1)

    return short
