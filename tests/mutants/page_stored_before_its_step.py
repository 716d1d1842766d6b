"""Pages are stored beyond the device when a step is to write them, not when its result has come."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.manager import CacheManager
from outrider.cache.with_media import CacheWithMedia

NAME = "page stored before its step"
TESTS = ["tests/unit/test_media_random.py", "-k", "three_places"]


def apply() -> None:
    promise = CacheManager.promise

    def promise_and_store(self: CacheManager, step: int, request_id: int, token_ids: Sequence[int], end: int) -> None:
        promise(self, step, request_id, token_ids, end)
        if isinstance(self, CacheWithMedia):
            for own in self.promises._by_step.get(step, {}).values():
                for key, page in own.pages.items():
                    self.queue.add(page, key)

    CacheManager.promise = promise_and_store  # type: ignore[method-assign]
