"""Pages whose load failed are published as if their bytes had come."""

from __future__ import annotations

from outrider.cache.with_media import CacheWithMedia
from outrider.core.page_moves import LoadedPages

NAME = "failed load found"
TESTS = ["tests/tiers/test_faults.py", "-k", "failed_load"]


def apply() -> None:
    arrive = CacheWithMedia._arrive

    def believe(self: CacheWithMedia, loaded: LoadedPages) -> None:
        name = self.media.names[0]
        arrive(self, loaded._replace(places=tuple(place or name for place in loaded.places)))

    CacheWithMedia._arrive = believe  # type: ignore[method-assign]
