"""The cache manager, one request or two at a time: hits at every boundary, growth, settling, and its own checks."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import count

import pytest

from outrider.cache import manager as manager_module
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import NULL_PAGE, Bound, Limits, PageChanges, Settled
from tests.unit.hash_mixer import make_layout

LIMITS = Limits(max_requests=4, max_batched_tokens=8, max_len=32, max_drafts=3, vocab_size=99)
TOKENS = list(range(40))
OTHERS = count(1000)  # requests that only ask


def manager(*groups: tuple[int, int], num_pages: int = 50, prefix: bool = True, lookahead: int = 0) -> CacheManager:
    return CacheManager(make_layout(*groups), PagePool(num_pages), LIMITS, enable_prefix_caching=prefix,
                        lookahead=lookahead)


def compute(cache: CacheManager, request: int, tokens: list[int], keys: tuple[str, ...] = (), **admit: bool) -> int:
    """Admit a request and compute all its tokens in one step; returns the hit."""
    hit = cache.admit(request, request + 1, cache.find_start(request, tokens, keys, **admit))
    assert cache.reserve(request, Bound(len(tokens)))
    cache.settle(request, Settled(len(tokens)), tokens)
    cache.check_integrity()
    return hit


GROUPS = {"full": [(4, 0)], "sliding": [(4, 5)], "both": [(4, 0), (4, 6)], "sizes": [(2, 0), (8, 9)]}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_hit_ends_at_the_last_boundary_before_the_last_token(groups: list[tuple[int, int]]) -> None:
    step = max(page_tokens for page_tokens, _ in groups)
    for length in range(1, 33):
        cache = manager(*groups)
        compute(cache, 0, TOKENS[:length])
        cache.free(0)
        # One token at least is computed, also where the prompt ends on a page boundary.
        assert compute(cache, 1, TOKENS[:length]) == (length - 1) // step * step
        assert cache.stats.queried_tokens == 2 * length and cache.stats.hit_tokens == (length - 1) // step * step


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_hit_ends_where_the_tokens_part(groups: list[tuple[int, int]]) -> None:
    step = max(page_tokens for page_tokens, _ in groups)
    for equal in range(24):
        cache = manager(*groups)
        compute(cache, 0, TOKENS[:24])
        cache.free(0)
        hit = compute(cache, 1, TOKENS[:equal] + [90] * 6)
        # A sliding group keeps only the last window of what was freed: it may serve less, never more.
        assert hit <= equal // step * step
        if all(window == 0 for _, window in groups):
            assert hit == equal // step * step


def pages_held(cache: CacheManager, request_id: int) -> list[int]:
    """Pages that a request holds in each group."""
    pages = cache._requests[request_id]
    return [len(columns) - first for columns, first in zip(pages.columns, pages.first, strict=True)]


def test_pages_are_shared_while_the_first_still_runs() -> None:
    cache = manager((4, 0))
    compute(cache, 0, TOKENS[:10])
    assert compute(cache, 1, TOKENS[:10]) == 8
    assert cache.pool.num_free == cache.pool.num_usable - 4  # two shared, one more each
    cache.free(0)
    cache.check_integrity()
    assert pages_held(cache, 1) == [3]


def test_other_salts_do_not_hit() -> None:
    cache = manager((4, 0))
    compute(cache, 0, TOKENS[:9], ("salt=a",))
    assert compute(cache, 1, TOKENS[:9], ("salt=b",)) == 0
    assert compute(cache, 2, TOKENS[:9], ("salt=a",)) == 8


def test_a_request_that_waited_while_the_weights_changed_is_found_by_later_ones() -> None:
    """Its pages were computed with the weights that later requests have."""
    cache = manager((4, 0))
    cache.find_start(0, TOKENS[:13])
    cache.use_weights(1)
    assert compute(cache, 0, TOKENS[:13]) == 0
    assert compute(cache, 1, TOKENS[:13]) == 12


def test_a_hit_can_be_declined_or_switched_off() -> None:
    cache = manager((4, 0))
    compute(cache, 0, TOKENS[:9])
    assert compute(cache, 1, TOKENS[:9], use_prefix=False) == 0
    off = manager((4, 0), prefix=False)
    compute(off, 0, TOKENS[:9])
    off.free(0)
    assert len(off.pool.blank_pages()) == off.pool.num_usable
    assert compute(off, 1, TOKENS[:9]) == 0


def test_a_sliding_hit_holds_only_the_window() -> None:
    cache = manager((4, 6))
    compute(cache, 0, TOKENS[:25])
    hit = cache.admit(1, 2, cache.find_start(1, TOKENS[:25]))
    assert hit == 24
    assert pages_held(cache, 1) == [2]  # positions 19 to 23
    write = cache.take_changes().table_writes[-1]
    assert write.pages[:4] == [NULL_PAGE] * 4 and NULL_PAGE not in write.pages[4:]
    assert write.row == 2 and len(write.pages) == 6


def test_requests_that_share_a_window_alone_do_not_share_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads a common beginning once for several requests, and there is none to read."""
    monkeypatch.setattr(manager_module, "LEAST_SHARED", 16)
    monkeypatch.setattr(manager_module, "FEWEST_SHARERS", 1)
    for groups, is_shared in (([(4, 5)], False), ([(4, 0)], True), ([(4, 5), (4, 0)], True), ([(4, 0), (4, 5)], True)):
        cache = manager(*groups)
        for request in range(2):
            assert compute(cache, request, TOKENS[:25]) == (24 if request else 0)
        assert cache.shares_pages is is_shared, groups


def test_a_beginning_that_one_group_shares_with_a_running_request_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's beginning has left its window, so that no request holds these pages of the sliding group."""
    monkeypatch.setattr(manager_module, "LEAST_SHARED", 8)
    cache = manager((4, 0), (4, 16))
    compute(cache, 0, TOKENS[:12])
    assert cache.reserve(0, Bound(28))
    cache.settle(0, Settled(28), TOKENS)
    for request in range(1, 5):
        assert not cache.shares_pages
        assert compute(cache, request, TOKENS[:12] + [90]) == 12
    assert cache.shares_pages
    cache.free(1)
    assert not cache.shares_pages


def test_pages_that_have_left_the_window_are_not_promised() -> None:
    """Nothing is promised while suspects are tried alone, and the rest of a prompt is when they have passed."""
    cache, tokens = manager((4, 6), (4, 0)), TOKENS[:32]
    cache.admit(0, 1, cache.find_start(0, tokens))
    for end in (8, 16, 24):
        assert cache.reserve(0, Bound(end))
        cache.settle(0, Settled(end), tokens)
    assert cache.reserve(0, Bound(32)) and not cache.forget_cached()
    cache.promise(3, 0, tokens, 32)
    assert len(cache.promises.held()) == 4, "the two last pages of each group: the others that it holds are known"
    assert NULL_PAGE not in cache.promises.held()
    assert not cache.settle_promises(3, [], [])
    cache.settle(0, Settled(32), tokens)
    cache.check_integrity()
    assert compute(cache, 1, tokens[:32]) == 28


def test_a_resumed_request_finds_its_own_pages() -> None:
    cache = manager((4, 0), (2, 5))
    cache.admit(0, 1, cache.find_start(0, TOKENS[:3]))
    assert cache.reserve(0, Bound(14))
    cache.settle(0, Settled(13), TOKENS)
    cache.free(0)
    assert cache.admit(0, 2, cache.find_start(0, TOKENS[:14])) == 12


def test_pages_come_by_bound_and_go_by_settled() -> None:
    cache = manager((4, 6))
    cache.admit(0, 1, cache.find_start(0, TOKENS[:20]))
    assert cache.reserve(0, Bound(16))
    assert pages_held(cache, 0) == [4]
    cache.settle(0, Settled(8), TOKENS)
    assert pages_held(cache, 0) == [4]  # a query at 8 sees 3
    cache.settle(0, Settled(9), TOKENS)
    assert pages_held(cache, 0) == [3]
    writes = cache.take_changes().table_writes
    assert [(w.start, w.pages) for w in writes[1:]] == [(0, [NULL_PAGE])]


def test_only_full_settled_pages_are_published() -> None:
    cache = manager((4, 0))
    cache.admit(0, 1, cache.find_start(0, TOKENS[:20]))
    assert cache.reserve(0, Bound(20))
    for settled in (3, 4, 7, 11, 12):
        cache.settle(0, Settled(settled), TOKENS)
        assert cache.admit(1, 2, cache.find_start(1, TOKENS[:20])) == settled // 4 * 4
        cache.free(1)


def test_the_next_event_is_the_first_length_at_which_settling_does_something() -> None:
    cache = manager((4, 0), (8, 5))
    for settled in range(24):
        event = cache.next_event(Settled(settled))
        effects = [(n // 4, [g.kind.first_needed(n) for g in cache.groups]) for n in range(settled, 40)]
        assert event == settled + next(i for i, effect in enumerate(effects) if effect != effects[0])


def test_changes_for_a_batch_that_was_never_made_are_not_sent_after_a_failed_step() -> None:
    """Rows have other owners then."""
    cache = manager((4, 0))
    cache.admit(0, 1, cache.find_start(0, TOKENS[:9]))
    assert cache.reserve(0, Bound(9))
    cache.free(0)
    cache.forget_unsettled([])
    assert cache.take_changes() == PageChanges()


def test_a_reserve_that_fails_takes_nothing() -> None:
    cache = manager((4, 0), (4, 0), num_pages=6)
    cache.admit(0, 1, cache.find_start(0, TOKENS[:20]))
    assert cache.reserve(0, Bound(8))
    assert not cache.reserve(0, Bound(9))
    assert pages_held(cache, 0) == [2, 2] and cache.pool.num_free == 1 and cache.covered(0) == 8
    cache.check_integrity()


def test_reserve_covers_the_lookahead_up_to_the_longest_request() -> None:
    cache = manager((4, 0), lookahead=3)
    cache.admit(0, 1, cache.find_start(0, TOKENS[:20]))
    assert cache.reserve(0, Bound(6)) and cache.covered(0) == 12
    assert cache.reserve(0, Bound(32)) and cache.covered(0) == 32
    with pytest.raises(AssertionError, match="no slots beyond these"):
        manager((4, 0), lookahead=5)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_whoever_can_start_gets_its_first_chunk(groups: list[tuple[int, int]]) -> None:
    outcomes: Counter[tuple[bool, bool]] = Counter()
    for num_pages, length in itertools.product(range(4, 16), range(1, 20)):
        cache = manager(*groups, num_pages=num_pages)
        other, tokens = TOKENS[: max(0, length - 2)], TOKENS[:length]
        if other and cache.can_start(cache.find_start(next(OTHERS), other)):
            compute(cache, 0, other)
        free = cache.pool.num_free
        can_start = cache.can_start(cache.find_start(1, tokens))
        assert cache.pool.num_free == free, "asking changes nothing"
        hit = cache.admit(1, 2, cache.find_start(1, tokens))
        if can_start:
            assert cache.reserve(1, Bound(min(hit + LIMITS.max_batched_tokens, length)))
        outcomes[can_start, hit > 0] += 1
        cache.check_integrity()
    assert outcomes[True, True] and outcomes[True, False] and outcomes[False, False] + outcomes[False, True]


def test_a_hit_on_held_pages_lets_a_request_start_that_would_not_fit_alone() -> None:
    cache = manager((4, 0), num_pages=6)
    compute(cache, 0, TOKENS[:13])  # 4 of 5 pages
    assert cache.can_start(cache.find_start(next(OTHERS), TOKENS[:13]))
    assert not cache.can_start(cache.find_start(next(OTHERS), TOKENS[:13], use_prefix=False))
    assert not cache.can_start(cache.find_start(next(OTHERS), TOKENS[1:14]))
    cache.free(0)
    # Cached pages that nobody holds are taken from the free ones, so they help no more than blank ones.
    assert cache.can_start(cache.find_start(next(OTHERS), TOKENS[:19]))
    assert not cache.can_start(cache.find_start(next(OTHERS), TOKENS[:20]))


def test_tails_are_evicted_before_heads() -> None:
    cache = manager((4, 0), num_pages=4)
    compute(cache, 0, TOKENS[:12])
    cache.free(0)
    compute(cache, 1, [90, 91, 92])
    cache.free(1)
    assert cache.pool.num_evicted == 1
    assert compute(cache, 2, TOKENS[:9]) == 8


@pytest.mark.parametrize("broken", ["doubled", "dropped by name only", "wide", "two groups"])
def test_check_integrity_sees_what_is_wrong(broken: str) -> None:
    cache = manager((4, 0), (4, 6))
    compute(cache, 0, TOKENS[:24])
    pages = cache._requests[0]
    match broken:
        case "doubled":
            pages.columns[0][1] = pages.columns[0][0]
        case "dropped by name only":
            pages.columns[1][0] = pages.columns[1][-1]
        case "wide":
            pages.columns[0] += [NULL_PAGE] * 9
        case "two groups":
            pages.columns[0][0] = pages.columns[1][-1]
    with pytest.raises(AssertionError):
        cache.check_integrity()
