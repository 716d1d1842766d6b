"""A prefix is served where attention has pages, whether or not the recurrent state there is known."""

from __future__ import annotations

from outrider.cache.known_states import DigestAt, KnownStates

NAME = "f4: hits without a state"
TESTS = ["tests/unit/test_recurrent_cache.py", "-k", "not f4"]


def apply() -> None:
    def any_state(self: KnownStates, digest_at: DigestAt, candidate: int) -> int:
        return candidate

    KnownStates.serves = any_state  # type: ignore[method-assign]
