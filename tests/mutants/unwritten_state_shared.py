"""Requests that began from a promised state go on, though the step did not write it."""

from __future__ import annotations

from collections.abc import Collection

from outrider.cache.promises import Promises

NAME = "unwritten state shared"
TESTS = ["tests/unit/test_checkpoints.py", "-k", "promised_state"]


def apply() -> None:
    settle = Promises.settle

    def settle_as_written(self: Promises, step: int, failed: Collection[int], written: Collection[int]) -> set[int]:
        shared = {state for promise in self._by_step.get(step, {}).values() for state in promise.shared_states}
        return settle(self, step, failed, shared.union(written))

    Promises.settle = settle_as_written  # type: ignore[method-assign]
