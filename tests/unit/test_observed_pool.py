"""The order in which pages are stored outside the device, when a batch may store few of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.cache import observed_pool
from outrider.cache.media import PageMedia
from outrider.cache.observed_pool import ObservedPool, PageQueue
from outrider.core.page_moves import OpenedPlaces, PageStore

GROUP = 0
NUM_PAGES = 9  # one of them is the null page


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ObservedPool:
    """A pool whose eight pages are cached and wait for storing. A batch stores two of them."""
    media = PageMedia(["host"])
    media.open(OpenedPlaces(b"model", {"host": []}))
    media.stats.page_bytes = 100
    monkeypatch.setattr(observed_pool, "MOST_STORE_BYTES", 250)
    pool = ObservedPool(NUM_PAGES, PageQueue(media, state_group=1))
    for number in range(NUM_PAGES - 1):
        page = pool.allocate(GROUP)
        pool.publish(page, (GROUP, bytes([number]) * 32))
        pool.free(page)
    return pool


def pages(stores: Sequence[PageStore]) -> list[int]:
    return [store.page for store in stores]


def test_the_rest_waits_for_later_batches(pool: ObservedPool) -> None:
    taken = [pages(pool.queue.take(pool)) for _ in range(5)]
    assert [len(each) for each in taken] == [2, 2, 2, 2, 0] and len({*sum(taken, [])}) == NUM_PAGES - 1


def test_a_page_is_stored_with_the_batch_that_overwrites_it(pool: ObservedPool) -> None:
    first = pages(pool.queue.take(pool))
    reused = [pool.allocate(GROUP) for _ in range(5)]
    stored = pages(pool.queue.take(pool))
    assert set(reused) - set(first) <= set(stored), "its bytes are those of another prefix from now on"
    assert len(pool.queue) == NUM_PAGES - 1 - len({*first, *stored})


def test_a_page_that_lost_its_content_is_not_stored(pool: ObservedPool) -> None:
    pool.forget_cached()
    reused = pool.allocate(GROUP)
    assert reused and not pages(pool.queue.take(pool)) + pages(pool.queue.take(pool)) + pages(pool.queue.take(pool))
