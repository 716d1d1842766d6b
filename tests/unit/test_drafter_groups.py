"""Groups that hold only layers of a drafter never shorten a hit: they give what pages they have, and the rest lies
outside the row's valid range.

By hand on the manager, and random schedules on the hash mixer, with recurrent states and without.
"""

from __future__ import annotations

from hypothesis import strategies as st

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, RecurrentSpec, SlidingSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.cache.prefix import PageHashes
from outrider.core import NULL_PAGE, Bound, Limits, Settled
from tests.unit.hash_mixer import make_layout
from tests.unit.schedule_driver import Scenario
from tests.unit.test_cache_manager import pages_held
from tests.unit.test_scheduler_random import PAGES, SEEDS, WINDOWS, run

TOKENS = list(range(40))
LIMITS = Limits(max_requests=4, max_batched_tokens=64, max_len=64, max_drafts=0, vocab_size=99)


def manager(*groups: tuple[int, int], num_pages: int = 100) -> CacheManager:
    """The last group is a drafter's."""
    return CacheManager(make_layout(*groups, num_drafter=1), PagePool(num_pages), LIMITS)


def compute(cache: CacheManager, request_id: int, tokens: list[int]) -> None:
    """Admitted, computed to its end, and gone; its full pages stay known."""
    cache.admit(request_id, request_id + 1, cache.find_start(request_id, tokens))
    assert cache.reserve(request_id, Bound(len(tokens)))
    cache.settle(request_id, Settled(len(tokens)), tokens)
    cache.check_integrity()
    cache.free(request_id)


def can_start(cache: CacheManager, tokens: list[int]) -> bool:
    start = cache.find_start(99, tokens)
    cache.forget(99)
    return cache.can_start(start)


def forget(cache: CacheManager, group: int, column: int) -> None:
    """As if the page had been evicted."""
    size = cache.groups[group].page_tokens
    digest = PageHashes(size, ()).upto(TOKENS, column + 1)[column]
    page = cache.pool.find((group, digest))
    assert page is not None and not cache.pool.is_held(page)
    del cache.pool._cached[page]
    cache.pool._forget(page)
    cache.pool._add_blank(page)


def admitted(cache: CacheManager, request_id: int = 9) -> tuple[int, list[list[bool]]]:
    """The hit of all tokens, and by group which of its columns have a page."""
    hit = cache.admit(request_id, 1, cache.find_start(request_id, TOKENS))
    cache.check_integrity()
    columns = cache._requests[request_id].columns
    return hit, [[page != NULL_PAGE for page in group] for group in columns]


def test_a_hit_does_not_wait_for_the_drafters_pages() -> None:
    cache = manager((4, 0), (4, 0))
    compute(cache, 0, TOKENS)
    assert admitted(cache) == (36, [[True] * 9, [True] * 9])
    cache.free(9)
    forget(cache, 1, 5)
    assert admitted(cache) == (36, [[True] * 9, [False] * 6 + [True] * 3]), "what is before a gap cannot be attended"
    cache.free(9)
    forget(cache, 1, 8)
    assert admitted(cache) == (36, [[True] * 9, [False] * 9])
    assert cache.reserve(9, Bound(40))
    cache.settle(9, Settled(40), TOKENS)
    cache.check_integrity()
    assert pages_held(cache, 9) == [10, 1]
    cache.free(9)
    forget(cache, 0, 5)
    assert admitted(cache)[0] == 20, "the target's own page"


def test_a_hit_may_end_within_a_page_of_the_drafter() -> None:
    cache = manager((4, 0), (16, 0))
    compute(cache, 0, TOKENS)
    assert admitted(cache) == (36, [[True] * 9, [True] * 2])
    assert cache.reserve(9, Bound(37)) and pages_held(cache, 9) == [10, 3]
    cache.check_integrity()


def test_pages_that_left_a_drafters_window_are_not_looked_for() -> None:
    cache = manager((4, 0), (4, 6))
    compute(cache, 0, TOKENS)
    hit, (_, sliding) = admitted(cache)
    assert (hit, sliding) == (36, [False] * 7 + [True] * 2)
    cache.free(9)
    forget(cache, 1, 7)
    assert admitted(cache) == (36, [[True] * 9, [False] * 8 + [True]])
    cache.settle(9, Settled(36), TOKENS)
    cache.check_integrity()


def test_room_for_a_request_counts_what_the_drafters_group_has() -> None:
    cache = manager((4, 0), (4, 0), num_pages=1 + 20 + 2)
    cache.admit(0, 1, cache.find_start(0, TOKENS))
    assert cache.reserve(0, Bound(40))
    cache.settle(0, Settled(40), TOKENS)
    assert cache.pool.num_free == 2
    assert can_start(cache, [*TOKENS, 1]), "ten pages of each group are shared, one of each is new"
    assert not can_start(cache, [*TOKENS, 1, 1, 1, 1])
    cache.pool._forget(cache._requests[0].columns[1][5])
    assert not can_start(cache, [*TOKENS, 1]), "of the drafter's group only the last four are"


def test_which_groups_are_the_targets() -> None:
    full, other = FullSpec(2, 16, 2), FullSpec(1, 16, 2)
    target = [LayerCache(0, full), LayerCache(1, full), LayerCache(2, RecurrentSpec(8, 4, (4,), (1,), 8, 2))]
    joined = plan_groups(target, drafter=[LayerCache(3, full)])
    assert [group.is_target for group in joined.groups] == [True], "it joins a group of its geometry"
    apart = plan_groups(target, drafter=[LayerCache(3, other), LayerCache(4, SlidingSpec(2, 16, 2, 8))])
    assert {layer: apart.groups[place].is_target for layer, ((place, _),) in apart.places.items()} == {
        0: True, 1: True, 3: False, 4: False,
    }
    size = max(group.page_tokens for group in apart.groups if group.is_target)
    assert apart.recurrent.page_tokens == size, "checkpoints lie where the target's pages end"


# Random schedules

TWO_OR_THREE = st.lists(st.tuples(PAGES, WINDOWS), min_size=2, max_size=3).map(tuple)


def scenarios(**fields: st.SearchStrategy[int]) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario, SEEDS, TWO_OR_THREE, depth=st.integers(0, 2), max_drafts=st.integers(0, 3),
        has_lookahead=st.booleans(), max_requests=st.integers(1, 4), budget=st.integers(2, 20),
        num_requests=st.just(7), spare_pages=st.sampled_from([0, 4, 10, 30]), abort_rate=st.sampled_from([0, 0.05]),
        preempt_rate=st.sampled_from([0, 0.05]), is_lazy=st.booleans(), num_drafter=st.just(1), **fields,
    )


SEEN = ("hits without all of the drafter's pages", "hits within a drafter's page", "hits", "evictions", "preemptions",
        "overlapped steps", "dropped results")


def test_any_schedule_with_a_drafters_group() -> None:
    run(scenarios(), 150).needs(*SEEN)


def test_any_schedule_with_a_drafters_group_and_recurrent_states() -> None:
    run(scenarios(state_pages=st.integers(1, 3), interval=st.sampled_from([4, 8, 16])), 200).needs(
        *SEEN, "restored states", "folds of ended rows", "checkpoints while folding"
    )
