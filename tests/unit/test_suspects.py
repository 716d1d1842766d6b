"""Who is to blame for failed steps: found among many, two of them, by position, by chance; it always ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from outrider.sched.faults import MAX_FAILURES, Suspects

LENGTH = 12  # tokens that every request computes, one a step
Fails = Callable[[dict[int, int]], bool]  # of a batch: request to the tokens it will have computed


def play(num_requests: int, fails: Fails, max_batch: int = 64) -> tuple[set[int], int]:
    """Runs all requests to their ends as a scheduler would. Returns (those that had to end, failed steps)."""
    suspects = Suspects()
    computed = dict.fromkeys(range(num_requests), 0)
    ended: set[int] = set()
    num_failed = 0
    for _ in range(40 * LENGTH * (num_requests + 1)):
        if not computed:
            suspects.clear({})
            assert not suspects
            return ended, num_failed
        if suspects and suspects.clear(computed):
            computed = {r: n if r in suspects.on_trial else 0 for r, n in computed.items()}
        allowed = [r for r in computed if r in suspects.on_trial]
        batch = {r: computed[r] + 1 for r in allowed[:max_batch]}
        if fails(batch):
            num_failed += 1
            for request in suspects.fail(batch):
                ended.add(request)
                del computed[request]
                suspects.forget(request)
            computed = dict.fromkeys(computed, 0)  # begun again
            continue
        for request, tokens in batch.items():
            computed[request] = tokens
            if tokens == LENGTH:
                del computed[request]
                suspects.forget(request)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("num_requests", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("position", [1, 5, LENGTH])
def test_one_culprit_is_found_and_its_mates_go_on(num_requests: int, position: int) -> None:
    for culprit in range(num_requests):
        ended, num_failed = play(num_requests, lambda batch, c=culprit: batch.get(c, 0) >= position)
        assert ended == {culprit} and num_failed <= 3 + math.ceil(math.log2(num_requests))


def test_several_culprits_are_all_found() -> None:
    rng = Random(1)
    for _ in range(100):
        culprits = {r: rng.randint(1, LENGTH) for r in rng.sample(range(16), rng.randint(2, 5))}
        ended, _ = play(16, lambda batch, c=culprits: any(batch.get(r, 0) >= at for r, at in c.items()),
                        max_batch=rng.choice([4, 64]))
        assert ended == set(culprits)


def test_a_fault_by_chance_ends_nobody() -> None:
    for at in range(LENGTH):
        steps = iter(range(10**6))
        assert play(5, lambda batch, at=at, steps=steps: next(steps) == at) == (set(), 1)


def test_a_fault_by_chance_while_a_culprit_is_looked_for_ends_no_other() -> None:
    for at in range(2, 60):
        steps = iter(range(10**6))
        ended, _ = play(8, lambda batch, at=at, steps=steps: next(steps) == at or 5 in batch)
        assert ended == {5}


def test_two_that_fail_only_together_both_come_through() -> None:
    ended, num_failed = play(6, lambda batch: {1, 4} <= batch.keys())
    assert ended == set() and num_failed > 2


def test_every_step_failing_ends_everybody() -> None:
    ended, num_failed = play(9, lambda batch: True)
    assert ended == set(range(9)) and num_failed < 40


def test_a_step_without_requests_blames_nobody() -> None:
    suspects = Suspects()
    assert suspects.fail({}) == [] and not suspects.has_trial and not suspects


def test_retries_are_bounded_whatever_speaks_for_a_request() -> None:
    suspects = Suspects()
    for failure in range(1, MAX_FAILURES):
        assert suspects.fail({1: failure, 2: failure}) == []
        suspects.clear({1: failure, 2: failure})
    assert suspects.fail({1: MAX_FAILURES, 2: MAX_FAILURES}) == [1, 2]


def test_a_half_that_fails_is_tried_in_its_own_halves_alone() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.fail(dict.fromkeys(range(4), 9))
    assert suspects._trials == [[0, 1], [2, 3]]
    suspects.fail({0: 9, 1: 9})
    assert suspects._trials == [[0], [1], [2, 3]]


def test_a_suspect_is_cleared_by_coming_as_far_as_the_failed_step_would_have() -> None:
    suspects = Suspects()
    suspects.fail({0: 9})
    suspects.clear({0: 8})
    assert suspects
    suspects.clear({0: 9})
    assert not suspects
