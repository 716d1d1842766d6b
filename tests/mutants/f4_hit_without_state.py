"""A prefix is served where attention has pages, whether or not the recurrent state there is known."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.checkpoints import Checkpoints
from outrider.cache.prefix import PageHashes

NAME = "f4: hits without a state"
TESTS = ["tests/unit/test_recurrent_cache.py", "-k", "not f4"]


def apply() -> None:
    def any_state(self: Checkpoints, hashes: dict[int, PageHashes], token_ids: Sequence[int], candidate: int) -> int:
        return candidate

    Checkpoints.serves = any_state  # type: ignore[method-assign]
