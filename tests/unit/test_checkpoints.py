"""The edges of the checkpoints' rules: the boundary, the step and the length at which each of them begins to hold."""

from __future__ import annotations

import pytest

from outrider.cache.checkpoints import StateProgress
from outrider.cache.manager import CacheManager
from outrider.core import Bound, Settled
from tests.unit.test_recurrent_cache import TOKENS, admit, chunk, end, hit_of, manager, report

# Waiting for a checkpoint that an ended request has left


def ended_with_drafts_to_fold() -> CacheManager:
    """17 tokens are settled, and those after 14 wait to be folded: the state at 16 is yet to be made."""
    cache = manager()
    admit(cache, 0, TOKENS[:13])
    assert cache.reserve(0, Bound(17))
    cache.settle(0, Settled(17), TOKENS)
    end(cache, 0, TOKENS[:18], 17, 14)
    assert cache.has_orders
    return cache


def test_a_state_is_waited_for_only_if_a_token_is_left_to_compute_after_it() -> None:
    cache = ended_with_drafts_to_fold()
    assert cache.find_start(1, TOKENS[:17]).must_wait
    assert not cache.find_start(2, TOKENS[:16]).must_wait


def test_a_request_that_can_begin_from_a_promised_state_does_not_wait_for_it() -> None:
    """Its writer was aborted in flight: the step writes the state all the same."""
    cache = manager()
    start = cache.find_start(0, TOKENS[:20])
    cache.admit(0, 1, start)
    assert cache.reserve(0, Bound(20))
    cache.promise(1, 0, TOKENS[:20], 16)
    writes = cache.grant_checkpoints(1, {0: chunk(0, 16)})
    assert [write.boundary for write in writes] == [16]
    end(cache, 0, TOKENS[:20], 0, 0, is_exact=False)
    start = cache.find_start(1, TOKENS[:20], step=2)
    assert (start.hit, start.must_wait) == (16, False)


def test_a_state_that_is_known_is_not_waited_for() -> None:
    """Two requests with the same text end one after the other. What is cached of their tokens is too little to begin
    at the state, and another copy of it does not help."""
    cache = manager()
    for request in (0, 1):
        admit(cache, request, TOKENS[:13])
    end(cache, 0, TOKENS[:18], 17, 14)
    folds = cache.take_folds(3)
    end(cache, 1, TOKENS[:18], 17, 14)
    assert cache.find_start(2, TOKENS[:17]).must_wait
    report(cache, 3, folds, TOKENS)
    assert cache.has_orders and not cache.find_start(2, TOKENS[:17]).must_wait


# Before a step


def test_a_boundary_is_passed_once_the_settled_state_has_reached_it() -> None:
    """The state is there, and its step had no pages to write it to; no later step writes it."""
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    assert len(cache.grant_checkpoints(1, {0: StateProgress(10, 11, 12, 13)})) == 1
    report(cache, 1, [], TOKENS)
    cache.grant_checkpoints(2, {0: StateProgress(11, 12, 13, 14)})
    assert len(cache.checkpoints.held()) == 2
    assert cache.grant_checkpoints(3, {0: StateProgress(12, 12, 13, 14)}) == [] == cache.checkpoints.held()


def test_a_checkpoint_that_is_asked_for_after_its_grant_is_kept() -> None:
    """The first step that may reach 12 was granted pages before another request asked for the state."""
    cache = manager()
    admit(cache, 0, TOKENS[:10])
    assert cache.reserve(0, Bound(17))
    cache.grant_checkpoints(1, {0: StateProgress(10, 10, 11, 13)})
    digest = cache.lookup.digest_at(0, TOKENS[:13])(12)
    assert cache.checkpoints.ask(0, 12, digest)
    writes = cache.grant_checkpoints(2, {0: StateProgress(10, 11, 12, 14)})
    report(cache, 2, writes, TOKENS)
    cache.settle(0, Settled(12), TOKENS)
    assert hit_of(cache, TOKENS[:14]) == 12, "while the request goes on"


def test_a_state_is_awaited_until_a_step_surely_passes_its_boundary() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:10])
    digest = cache.lookup.digest_at(0, TOKENS[:13])(12)
    assert cache.checkpoints.ask(0, 12, digest)
    cache.grant_checkpoints(1, {0: StateProgress(10, 10, 11, 13)})
    assert cache.checkpoints.is_awaited(digest)
    cache.grant_checkpoints(2, {0: StateProgress(10, 11, 12, 14)})
    assert not cache.checkpoints.is_awaited(digest)


@pytest.mark.parametrize(("prompt", "before", "after", "sure"), [
    (40, 0, 16, [16]),  # the step ends at the boundary
    (40, 0, 15, []),
    (40, 0, 11, []),  # 8 is the row's latest, which others never find while the request goes on
    (40, 0, 40, [16, 32, 36]),
    (15, 15, 16, []),  # a decode step's: the request may have ended before
    (16, 15, 16, [16]),
])
def test_checkpoints_that_are_sure_to_be_kept(prompt: int, before: int, after: int, sure: list[int]) -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:prompt])
    cache.grant_checkpoints(1, {0: chunk(before, after)})
    assert [own.boundary for own in cache.checkpoints.sure_to_be_kept(0, chunk(before, after))] == sure


def test_a_step_is_not_sure_to_write_where_its_state_already_is() -> None:
    """The step before it writes that checkpoint, and has not reported yet."""
    cache = manager()
    admit(cache, 0, TOKENS[:40])
    cache.grant_checkpoints(1, {0: chunk(0, 16)})
    progress = StateProgress(0, 16, 32, 32)
    cache.grant_checkpoints(2, {0: progress})
    assert [own.boundary for own in cache.checkpoints.sure_to_be_kept(0, progress)] == [32]


# When a request ends


def test_what_the_last_reported_step_did_not_write_is_given_up_with_its_request() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    cache.grant_checkpoints(1, {0: StateProgress(10, 10, 11, 13)})
    report(cache, 1, [], TOKENS)
    end(cache, 0, TOKENS[:13], 11, 11, is_exact=False)
    assert cache.checkpoints.held() == []


def test_a_step_in_flight_may_write_the_state_after_all_known_tokens() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    assert cache.reserve(0, Bound(16))
    cache.settle(0, Settled(12), TOKENS)
    writes = cache.grant_checkpoints(1, {0: StateProgress(11, 11, 12, 14)})
    end(cache, 0, TOKENS[:12], 12, 11, is_exact=False)
    report(cache, 1, writes, TOKENS)
    assert hit_of(cache, TOKENS[:40]) == 12


def test_nothing_is_folded_for_a_boundary_that_the_state_has_already() -> None:
    """The state is at 16, and no page was free for a checkpoint when it came there: a fold cannot go back to it."""
    cache = manager()
    admit(cache, 0, TOKENS[:13])
    end(cache, 0, TOKENS[:18], 17, 16)
    assert not cache.has_orders and cache.checkpoints.held() == []


def test_a_state_that_is_known_is_not_folded_again() -> None:
    cache = ended_with_drafts_to_fold()
    report(cache, 3, cache.take_folds(3), TOKENS)
    admit(cache, 1, TOKENS[:13])
    end(cache, 1, TOKENS[:18], 17, 14)
    assert not cache.has_orders


# Failures


@pytest.mark.parametrize(("failed", "hit"), [((), 16), ((0,), 0)])
def test_a_state_of_a_request_whose_values_are_not_finite_is_never_found(failed: tuple[int, ...], hit: int) -> None:
    """The step has written it all the same, and says so."""
    cache = manager()
    admit(cache, 0, TOKENS[:17])
    assert cache.reserve(0, Bound(17))
    writes = cache.grant_checkpoints(0, {0: chunk(0, 17)})
    cache.settle_checkpoints(0, [write.id for write in writes], lambda _: TOKENS, failed)
    cache.settle(0, Settled(17), TOKENS)
    assert hit_of(cache, TOKENS[:20]) == hit


@pytest.mark.parametrize("is_written", [False, True])
def test_who_began_from_a_promised_state_starts_again_if_it_was_not_written(is_written: bool) -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:20])
    assert cache.reserve(0, Bound(16))
    cache.promise(1, 0, TOKENS[:20], 16)
    (write,) = cache.grant_checkpoints(1, {0: chunk(0, 16)})
    start = cache.find_start(1, TOKENS[:20], step=2)
    assert cache.admit(1, 2, start) == 16
    assert cache.settle_promises(1, (), [write.id] if is_written else []) == (set() if is_written else {1})
