"""A recurrent state that a step has written for a request whose values are not finite is found by others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outrider.cache.checkpoints import Checkpoints

NAME = "failed state found"
TESTS = ["tests/unit/test_checkpoints.py", "-k", "not_finite"]


def apply() -> None:
    settle = Checkpoints.settle

    def settle_all(self: Checkpoints, step: int, written: Sequence[int], digest_of: Callable[[int, int], bytes],
                   failed: Collection[int] = ()) -> None:
        settle(self, step, written, digest_of)

    Checkpoints.settle = settle_all  # type: ignore[method-assign]
