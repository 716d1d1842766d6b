"""Kinds of cache against brute force: what a request can hold, what it can still read, what serves a prefix."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.kinds import ChunkedKind, ChunkedSpec, FullKind, FullSpec, Kind, SlidingKind, SlidingSpec, kind_of
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Bound, Limits, Settled
from tests.unit.hash_mixer import make_layout
from tests.unit.test_cache_manager import pages_held


def full(page_tokens: int) -> FullKind:
    return FullKind(FullSpec(1, 1, 1), page_tokens)


def sliding(page_tokens: int, window: int) -> SlidingKind:
    return SlidingKind(SlidingSpec(1, 1, 1, window), page_tokens)


def chunked(page_tokens: int, chunk: int) -> ChunkedKind:
    return ChunkedKind(ChunkedSpec(1, 1, 1, chunk), page_tokens)


def limits_of(budget: int, max_len: int, max_drafts: int = 0, steps: int = 2) -> Limits:
    return Limits(1, budget, max_len, max_drafts, 10, steps_in_flight=steps)


def visible(window: int, settled: int, end: int) -> set[int]:
    """Positions that queries at settled, ..., end - 1 see; window 0 is all."""
    return {key for query in range(settled, end) for key in range(query + 1) if not window or key > query - window}


def seen_in_chunks(chunk: int, settled: int, end: int) -> set[int]:
    """Positions that queries at settled, ..., end - 1 see of the chunks that they lie in."""
    return {key for query in range(settled, end) for key in range(query // chunk * chunk, query + 1)}


def most_pages(page_tokens: int, window: int, limits: Limits) -> int:
    """Pages held with any settled length, and the farthest bound and slots of drafters behind it."""
    most = 0
    for settled in range(limits.max_len):
        end = min(settled + limits.max_unsettled_tokens + limits.max_lookahead, limits.max_len)
        most = max(most, len({position // page_tokens for position in visible(window, settled, end)}))
    return most


@pytest.mark.parametrize("page_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_capacity_is_what_the_worst_request_holds_and_not_a_page_more(page_tokens: int, budget: int) -> None:
    for drafts in (0, 3):
        limits = limits_of(budget, 56, drafts)
        assert full(page_tokens).capacity(limits).max_pages == most_pages(page_tokens, 0, limits)
        for window in range(1, 14):
            cap = sliding(page_tokens, window).capacity(limits)
            assert cap.max_pages == most_pages(page_tokens, window, limits), f"window {window}"
            assert cap.table_width == -(-56 // page_tokens)


@pytest.mark.parametrize("max_len", range(1, 24))
def test_no_request_holds_more_than_its_table_is_wide(max_len: int) -> None:
    limits = limits_of(5, max_len)
    for page_tokens, window in ((4, 0), (4, 1), (4, 6), (2, 40)):
        cap = make_layout((page_tokens, window)).groups[0].kind.capacity(limits)
        assert most_pages(page_tokens, window, limits) <= cap.max_pages <= cap.table_width


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(0, 3))
def test_pages_held_stay_within_what_admission_asked_for(
    seed: int, log_page: int, window: int, budget: int, drafts: int
) -> None:
    """A manager is led through any bounds and any acceptance, by one request with up to three steps in flight."""
    rng, limits = Random(seed), limits_of(budget, 40, drafts, steps=3)
    cache = CacheManager(make_layout((2**log_page, window), (4, 0)), PagePool(100), limits, lookahead=drafts)
    tokens = list(range(40))
    cache.admit(0, 1, cache.find_start(0, tokens[:1]))
    settled, in_flight, farthest = Settled(), deque[int](), 0
    while settled.at_least < 40:
        if len(in_flight) < 3:
            in_flight.append(rng.randint(1, budget))
            farthest = max(farthest, min(settled.at_least + sum(in_flight), 40))
            assert cache.reserve(0, Bound(min(settled.at_least + sum(in_flight), 40)))
        else:
            settled.at_least = min(settled.at_least + rng.randint(1, in_flight.popleft()), 40)
            cache.settle(0, settled, tokens)
        asked = [group.kind.pages_to_start(min(farthest + drafts, 40), limits) for group in cache.groups]
        assert all(held <= most for held, most in zip(pages_held(cache, 0), asked, strict=True))
        cache.check_integrity()


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("page_tokens", [1, 2, 4])
def test_first_needed_is_the_first_page_a_query_still_sees(window: int, page_tokens: int) -> None:
    kind = sliding(page_tokens, window)
    for settled in range(30):
        assert kind.first_needed(settled) == min(visible(window, settled, settled + 5)) // page_tokens


@pytest.mark.parametrize("window", range(1, 12))
def test_next_drop_is_when_first_needed_moves(window: int) -> None:
    kind = sliding(4, window)
    for settled in range(40):
        moved = next(n for n in range(settled + 1, 99) if kind.first_needed(n) > kind.first_needed(settled))
        assert kind.next_drop(settled) == moved


@pytest.mark.parametrize("chunk", range(1, 12))
@pytest.mark.parametrize("page_tokens", [1, 2, 4])
def test_pages_of_earlier_chunks_are_dropped_at_an_edge(chunk: int, page_tokens: int) -> None:
    kind = chunked(page_tokens, chunk)
    for settled in range(30):
        assert kind.first_needed(settled) == min(seen_in_chunks(chunk, settled, settled + 5)) // page_tokens
        moved = next(n for n in range(settled + 1, 99) if kind.first_needed(n) > kind.first_needed(settled))
        assert kind.next_drop(settled) == moved


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_chunks_hold_no_more_than_their_capacity(page_tokens: int) -> None:
    for drafts in (0, 3):
        limits = limits_of(5, 56, drafts)
        for chunk in range(1, 14):
            ends = ((n, min(n + limits.max_unsettled_tokens + limits.max_lookahead, 56)) for n in range(56))
            held = (len({at // page_tokens for at in seen_in_chunks(chunk, *span)}) for span in ends)
            assert max(held) <= chunked(page_tokens, chunk).capacity(limits).max_pages


@settings(max_examples=100)
@given(st.sets(st.integers(0, 9)), st.integers(0, 10), st.sampled_from([1, 2, 4]), st.integers(1, 14))
def test_chunks_serve_the_longest_prefix_whose_last_chunk_is_cached(
    cached: set[int], columns: int, page_tokens: int, chunk: int
) -> None:
    def is_served(length: int) -> bool:
        return all(key // page_tokens in cached for key in seen_in_chunks(chunk, length, length + 1) - {length})

    expected = max(n * page_tokens for n in range(columns + 1) if is_served(n * page_tokens))
    assert chunked(page_tokens, chunk).serves(cached.__contains__, columns * page_tokens) == expected


def test_a_full_cache_drops_nothing() -> None:
    kind = full(4)
    assert all(kind.first_needed(n) == 0 and kind.next_drop(n) > 10**9 for n in range(20))


@settings(max_examples=200)
@given(st.sets(st.integers(0, 9)), st.integers(0, 10), st.sampled_from([1, 2, 4]), st.integers(0, 14))
def test_serves_the_longest_prefix_whose_visible_pages_are_cached(
    cached: set[int], columns: int, page_tokens: int, window: int
) -> None:
    kind: Kind = sliding(page_tokens, window) if window else full(page_tokens)

    def is_served(length: int) -> bool:
        keys = visible(window, length, length + 1) - {length}
        return all(key // page_tokens in cached for key in keys)

    expected = max(n * page_tokens for n in range(columns + 1) if is_served(n * page_tokens))
    assert kind.serves(cached.__contains__, columns * page_tokens) == expected


def test_a_kind_is_found_by_the_type_of_the_spec() -> None:
    limits = limits_of(4, 64)
    assert isinstance(kind_of(FullSpec(1, 1, 1), 16), FullKind)
    assert isinstance(kind_of(SlidingSpec(1, 1, 1, 8), 16), SlidingKind)
    assert isinstance(kind_of(ChunkedSpec(1, 1, 1, 8), 16), ChunkedKind)
    assert kind_of(SlidingSpec(1, 1, 1, 8), 16).capacity(limits) == sliding(16, 8).capacity(limits)
