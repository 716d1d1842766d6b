"""The pages of a session are evicted like all others."""

from __future__ import annotations

from outrider.cache.sessions import CacheSessions

NAME = "session unpinned"
TESTS = ["tests/tiers/test_sessions.py", "-k", "stay_while or one_owner"]


def apply() -> None:
    CacheSessions._pin = lambda self, names, until: None  # type: ignore[method-assign]
