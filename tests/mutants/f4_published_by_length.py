"""Checkpoints are known to all when the step they were given to is over, whether it wrote them or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outrider.cache.checkpoints import Checkpoints

NAME = "f4: checkpoints published by length"
TESTS = ["tests/unit/test_recurrent_cache.py", "-k", "not f4"]


def apply() -> None:
    settle = Checkpoints.settle

    def settle_all(self: Checkpoints, step: int, written: Sequence[int], digest_of: Callable[[int, int], bytes],
                   failed: Collection[int] = ()) -> None:
        settle(self, step, [c.id for c in list(self._open.values()) if c.last_step <= step], digest_of, failed)

    Checkpoints.settle = settle_all  # type: ignore[method-assign]
