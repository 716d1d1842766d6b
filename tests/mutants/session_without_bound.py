"""The sessions of one owner may pin all pages of a place."""

from __future__ import annotations

from outrider.cache.sessions import CacheSessions

NAME = "session without bound"
TESTS = ["tests/tiers/test_sessions.py", "-k", "one_owner"]


def apply() -> None:
    CacheSessions._shrink = lambda self, sizes, most: None  # type: ignore[method-assign]
