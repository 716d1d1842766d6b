"""The page pool: blank, cached or owned, reused in order, and never handed out twice."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.pages import NO_GROUP, PageKey, PagePool


def key(content: int, group: int = 0) -> PageKey:
    return (group, content.to_bytes(2, "big"))


def cached(pool: PagePool, *contents: int) -> list[int]:
    """Pages of these contents, freed in this order."""
    pages = [pool.allocate(0) for _ in contents]
    for page, content in zip(pages, contents, strict=True):
        pool.publish(page, key(content))
    for page in pages:
        pool.free(page)
    return pages


def test_blank_pages_go_before_cached_ones_and_those_by_age() -> None:
    pool = PagePool(6)
    first, second, third = cached(pool, 1, 2, 3)
    assert {pool.allocate(0) for _ in range(2)}.isdisjoint({first, second, third})
    assert pool.num_evicted == 0
    assert [pool.allocate(0) for _ in range(3)] == [first, second, third]
    assert pool.num_evicted == 3 and pool.num_free == 0
    assert all(pool.find(key(content)) is None for content in (1, 2, 3))


def test_forgotten_pages_are_blank_and_held_ones_stay() -> None:
    pool = PagePool(6)
    first, second, third = cached(pool, 1, 2, 3)
    pool.hold(second)
    assert not pool.forget_cached()
    pool.check({second: 1})
    assert [pool.find(key(content)) for content in (1, 2, 3)] == [None, second, None]
    assert {first, third} <= set(pool.blank_pages())
    pool.free(second)
    assert pool.forget_cached() and pool.num_free == 5 and len(pool.blank_pages()) == 5
    pool.check({})


def test_a_hit_makes_a_page_young() -> None:
    pool = PagePool(4)
    first, second, third = cached(pool, 1, 2, 3)
    pool.hold(first)
    pool.free(first)
    assert [pool.allocate(0) for _ in range(3)] == [second, third, first]


def test_a_held_page_is_never_evicted() -> None:
    pool = PagePool(3)
    first, second = cached(pool, 1, 2)
    pool.hold(first)
    assert pool.allocate(0) == second
    assert pool.num_free == 0
    with pytest.raises(KeyError):
        pool.allocate(0)


def test_a_page_that_changes_group_is_cleared_unless_it_is_overwritten() -> None:
    pool = PagePool(2)
    page = pool.allocate(0)
    pool.free(page)
    assert pool.allocate(0) == page and not pool.take_changes().cleared
    pool.free(page)
    assert pool.allocate(1, is_overwritten=True) == page and not pool.take_changes().cleared
    pool.free(page)
    assert pool.allocate(0) == page and pool.take_changes().cleared == [page]


def test_a_page_that_a_failed_step_was_to_clear_is_cleared_for_its_next_holder() -> None:
    """Though the next holder is of the group that the page was to be cleared for."""
    pool = PagePool(2)
    page = pool.allocate(0)
    pool.free(page)
    assert pool.allocate(1) == page
    lost = pool.take_changes()
    pool.free(page)
    pool.lose_changes([lost])
    assert pool.allocate(1) == page and pool.take_changes().cleared == [page]


def test_a_group_gets_its_own_pages_back_in_their_order() -> None:
    pool = PagePool(9)
    pages = [[pool.allocate(group) for _ in range(3)] for group in (0, 1)]
    for own in pages:
        for page in reversed(own):
            pool.free(page)
    again = [[pool.allocate(group) for _ in range(3)] for group in (0, 1)]
    assert again == pages
    for _ in range(pool.num_free):
        pool.allocate(2)
    assert not pool.take_changes().cleared
    pool.free(pages[1][0])
    assert pool.allocate(2) == pages[1][0], "no other is left"
    assert pool.take_changes().cleared == [pages[1][0]]
    pool.free(pages[0][1])
    pool.mark_unclean([pages[0][1], pages[0][2]])
    assert pool.allocate(0) == pages[0][1] and pool.take_changes().cleared == [pages[0][1]]
    pool.check(dict.fromkeys(range(1, 9), 1))


def test_the_first_page_of_a_content_stays_the_one_found() -> None:
    pool = PagePool(3)
    first, second = pool.allocate(0), pool.allocate(0)
    pool.publish(first, key(7))
    pool.publish(second, key(7))
    assert pool.find(key(7)) == first
    assert pool.find(key(7, group=1)) is None
    pool.free(second)
    assert pool.blank_pages() == [second]


def test_a_fresh_page_takes_the_place_of_one_that_nobody_holds() -> None:
    """Else a prefix that was just computed again would go with its old page, the next to be evicted."""
    pool = PagePool(4)
    old, fresh = pool.allocate(0), pool.allocate(0)
    pool.publish(old, key(7))
    pool.free(old)
    pool.publish(fresh, key(7))
    assert pool.find(key(7)) == fresh and old in pool.blank_pages()
    pool.check({fresh: 1})
    pool.free(fresh)
    pool.check({})


def test_misuse_is_noticed() -> None:
    pool = PagePool(3)
    page = pool.allocate(0)
    pool.free(page)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(page)
    with pytest.raises(AssertionError, match="published without a holder"):
        PagePool(3).publish(1, key(1))
    with pytest.raises(ValueError, match="num_pages must be at least 2"):
        PagePool(1)


@pytest.mark.parametrize("broken", ["lost", "blank twice", "cached without content", "wrong count", "stale key"])
def test_check_sees_every_broken_state(broken: str) -> None:
    pool = PagePool(5)
    cached(pool, 1)
    held = {pool.allocate(0): 1}
    pool.check(held)
    blank = pool._blank[NO_GROUP]
    match broken:
        case "lost":
            blank.pop()
        case "blank twice":
            blank.append(blank[0])
        case "cached without content":
            pool._cached[blank.pop()] = None
        case "wrong count":
            held[blank[0]] = 1
        case "stale key":
            pool._page_of[key(9)] = blank[0]
    with pytest.raises(AssertionError):
        pool.check(held)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_any_use_keeps_every_page_in_one_state(seed: int, num_pages: int) -> None:
    rng, pool = Random(seed), PagePool(num_pages)
    held: Counter[int] = Counter()
    contents = 0
    for _ in range(60):
        match rng.randrange(5):
            case 0 if pool.num_free:
                page = pool.allocate(rng.randrange(2))
                assert held[page] == 0 and page != 0
                held[page] = 1
            case 1 if +held:
                page = rng.choice(list(+held))
                pool.free(page)
                held[page] -= 1
            case 2 if +held:
                contents += rng.randrange(2)
                pool.publish(rng.choice(list(+held)), key(contents))
            case 3:
                found = pool.find(key(rng.randint(0, contents)))
                if found is not None:
                    pool.hold(found)
                    held[found] += 1
            case 4 if rng.randrange(4) == 0:
                pool.forget_cached()
        pool.check(dict(+held))
        assert pool.num_free == pool.num_usable - len(+held)
