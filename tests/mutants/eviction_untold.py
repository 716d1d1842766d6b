"""Events of the prefix cache leave out pages that are evicted: routers send requests to pages that are gone."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.events import CacheEvents

NAME = "evictions are not told"
TESTS = ["tests/engine/test_kv_events.py", "-k", "knows_what and llama"]


def apply() -> None:
    def remove_all_only(self: CacheEvents, keys: Sequence[tuple[int, bytes]], *, is_empty: bool) -> None:
        if is_empty:
            self.remove_all()

    CacheEvents.remove_pages = remove_all_only  # type: ignore[method-assign]
