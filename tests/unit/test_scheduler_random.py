"""Thousands of random schedules on the hash mixer: every request yields what it yields alone.

Each family of schedules asserts that what it is for has occurred. The checks themselves are in the driver and the
mixer; a failing example is a `Scenario`, which reproduces it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedule_driver import Driver, Scenario, Totals

SEEDS = st.integers(0, 2**40)
PAGES = st.sampled_from([2, 4, 8])
WINDOWS = st.sampled_from([0, 0, 1, 3, 5, 9])
GROUPS = st.lists(st.tuples(PAGES, WINDOWS), min_size=1, max_size=3).map(tuple)

CHUNKS = st.lists(st.tuples(PAGES, st.sampled_from([0, 5, -1, -3, -4, -8])), min_size=1, max_size=3).map(tuple)


def any_of(groups: st.SearchStrategy[tuple[tuple[int, int], ...]]) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario, SEEDS, groups, depth=st.integers(0, 2), max_drafts=st.integers(0, 4), has_lookahead=st.booleans(),
        prefix_caching=st.booleans(), max_requests=st.integers(1, 4), budget=st.integers(1, 16),
        num_requests=st.integers(1, 7), spare_pages=st.sampled_from([0, 3, 10, 30]),
        abort_rate=st.sampled_from([0, 0.05]), preempt_rate=st.sampled_from([0, 0.05]),
        num_priorities=st.integers(1, 3), num_tenants=st.integers(1, 3), host_drafts=st.booleans(),
        is_lazy=st.booleans(), prompt_seconds=st.sampled_from([0, 0, 3, 9]), fail_rate=st.sampled_from([0, 0, 0.2]),
    )


ANY = any_of(GROUPS)
FULL_AND_SLIDING = st.tuples(st.tuples(PAGES, st.just(0)), st.tuples(PAGES, st.sampled_from([1, 3, 5])))


def run(scenarios: st.SearchStrategy[Scenario], num_examples: int) -> Totals:
    totals = Totals()

    @settings(max_examples=num_examples)
    @given(scenarios)
    def every(scenario: Scenario) -> None:
        Driver(scenario).run().add_to(totals)

    every()
    assert totals.counts["schedules"] >= num_examples
    return totals


def test_any_schedule() -> None:
    totals = run(ANY, 800)
    totals.needs(
        "preemptions", "evictions", "hits", "dropped results", "dead tokens", "cleared pages", "chunked prompts",
        "overlapped steps", "aborts in flight", "aborts while waiting", "host drafts used",
    )


def test_any_schedule_with_layers_that_see_chunks() -> None:
    run(any_of(CHUNKS), 150).needs("preemptions", "hits", "dead tokens", "chunked prompts", "overlapped steps")


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 4])
def test_every_number_of_accepted_drafts(max_drafts: int) -> None:
    scenarios = st.builds(
        Scenario, SEEDS, FULL_AND_SLIDING, depth=st.integers(0, 2), max_drafts=st.just(max_drafts),
        has_lookahead=st.booleans(), budget=st.just(24), preempt_rate=st.just(0.02), is_lazy=st.booleans(),
    )
    totals = run(scenarios, 125)
    totals.needs_acceptance(max_drafts)
    totals.needs("dead tokens", "overlapped steps", "hits", "preemptions in flight")


def test_a_pool_that_is_always_short() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(0, 2), max_drafts=st.integers(0, 2), prefix_caching=st.booleans(),
        max_requests=st.just(4), budget=st.integers(4, 20), spare_pages=st.integers(0, 2),
        num_priorities=st.integers(1, 3),
    )
    totals = run(scenarios, 400)
    totals.needs("preemptions", "evictions", "hits", "cleared pages")
    assert totals.counts["preemptions"] > 100


def test_results_that_come_after_their_request_is_gone() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(1, 2), max_drafts=st.integers(0, 3), budget=st.integers(3, 16),
        spare_pages=st.integers(0, 20), abort_rate=st.just(0.1), preempt_rate=st.just(0.2), is_lazy=st.booleans(),
    )
    totals = run(scenarios, 300)
    totals.needs("preemptions in flight", "aborts in flight", "steps of ended requests")
    assert totals.counts["dropped results"] > 1000


def test_requests_share_what_others_are_computing() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(0, 2), max_drafts=st.integers(0, 2), has_lookahead=st.booleans(),
        max_requests=st.just(4), budget=st.integers(4, 40), num_requests=st.just(8),
        spare_pages=st.sampled_from([3, 30]), abort_rate=st.sampled_from([0, 0.1]),
        preempt_rate=st.sampled_from([0, 0.1]), is_lazy=st.booleans(),
        fail_rate=st.sampled_from([0, 0.3]),
    )
    totals = run(scenarios, 300)
    totals.needs("pages shared after their writer ended", "starts again")
    assert totals.counts["pages shared within a step"] > 60
    assert totals.counts["shared pages"] > totals.counts["pages shared within a step"] + 60


@pytest.mark.long
def test_many_more_of_any_schedule() -> None:
    totals = run(ANY, 20_000)
    totals.needs_acceptance(4)
