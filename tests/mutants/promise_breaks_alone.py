"""A broken promise takes those along that shared it, but not what they promised to others."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.cache.promises import Promise, Promises

NAME = "promise breaks alone"
TESTS = ["tests/unit/test_promises.py", "-k", "not any_schedule"]


def apply() -> None:
    break_all = Promises._break

    def break_alone(self: Promises, broken: Iterable[Promise]) -> set[int]:
        broken = list(broken)
        sharers = {request for promise in broken for request in promise.sharers}
        for promise in broken:
            promise.sharers.clear()
        return break_all(self, broken) | sharers

    Promises._break = break_alone  # type: ignore[method-assign]
