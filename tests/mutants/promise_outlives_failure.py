"""Requests go on with pages that another request promised and whose values then are not finite."""

from __future__ import annotations

from collections.abc import Collection

from outrider.cache.promises import Promises

NAME = "promises of a failed request are kept"
TESTS = ["tests/unit/test_promises.py", "-k", "not any_schedule"]


def apply() -> None:
    settle = Promises.settle

    def settle_all(self: Promises, step: int, failed: Collection[int], written: Collection[int]) -> set[int]:
        return settle(self, step, (), written)

    Promises.settle = settle_all  # type: ignore[method-assign]
