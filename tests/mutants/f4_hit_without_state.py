"""A prefix is served where attention has pages, whether or not the recurrent state there is known."""

from __future__ import annotations

from collections.abc import Callable

from outrider.cache.kinds import RecurrentKind

NAME = "f4: hits without a state"
TESTS = ["tests/unit/test_recurrent_cache.py", "-k", "not f4"]


def apply() -> None:
    def any_state(self: RecurrentKind, has_checkpoint: Callable[[int], bool], candidate: int) -> int:
        return candidate

    RecurrentKind.serves = any_state  # type: ignore[method-assign]
