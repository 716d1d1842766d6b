"""A page that is loaded from beyond the device is found before its bytes have come."""

from __future__ import annotations

from outrider.cache.observed_pool import Arrival
from outrider.cache.with_media import CacheWithMedia

NAME = "page published before its bytes"
TESTS = ["tests/unit/test_media_random.py", "-k", "fail"]


def apply() -> None:
    load = CacheWithMedia._load

    def load_and_publish(self: CacheWithMedia, request_id: int, arrival: Arrival, patience: float) -> None:
        load(self, request_id, arrival, patience)
        for wanted, page in zip(arrival.wanted, arrival.pages, strict=True):
            if wanted.page_key is not None:
                self.pool.publish(page, wanted.page_key)

    CacheWithMedia._load = load_and_publish  # type: ignore[method-assign]
