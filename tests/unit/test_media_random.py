"""Random schedules over pages on the device and in three places beyond it: each request yields what it yields alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache import media
from tests.unit.media_driver import Faults, MediaDriver, Place
from tests.unit.schedule_driver import Scenario, Totals
from tests.unit.test_scheduler_random import SEEDS

LAYOUTS = st.sampled_from([((4, 0),), ((4, 0), (4, 5)), ((2, 0), (4, 3)), ((4, 0), (4, -4)), ((4, 0), (2, 0))])
FAULTS = st.builds(Faults, refused=st.sampled_from([0, 0.1, 0.5]), lost=st.sampled_from([0, 0.1, 0.5]),
                   latest=st.integers(0, 4), late=st.sampled_from([0, 0.2]), resting=st.sampled_from([0, 0.1]),
                   named=st.sampled_from([0, 0.5]), told=st.sampled_from([0, 0.2]))


NONE = st.just(0)


def run(num_examples: int, faults: st.SearchStrategy[Faults], *, state_pages: st.SearchStrategy[int] = NONE,
        num_drafter: st.SearchStrategy[int] = NONE, disturb_rate: float = 0.0) -> Totals:
    totals = Totals()
    places = [Place("host", 60), Place("disk", 400), Place("far", 2000)]
    scenarios = st.builds(
        Scenario, SEEDS, LAYOUTS, depth=st.integers(0, 2), max_drafts=st.integers(0, 3), has_lookahead=st.booleans(),
        max_requests=st.integers(1, 4), budget=st.integers(2, 16), num_requests=st.integers(1, 7),
        spare_pages=st.sampled_from([0, 3, 10]), abort_rate=st.sampled_from([0, 0.05]),
        preempt_rate=st.sampled_from([0, 0.05]), num_tenants=st.integers(1, 3), is_lazy=st.booleans(),
        fail_rate=st.sampled_from([0, 0, 0.2]), state_pages=state_pages, num_drafter=num_drafter,
    )

    @settings(max_examples=num_examples)
    @given(scenarios, faults)
    def every(scenario: Scenario, faults: Faults) -> None:
        if scenario.num_drafter >= len(scenario.groups):
            scenario = replace(scenario, num_drafter=0)
        MediaDriver(scenario, places, faults, disturb_rate).run().add_to(totals)

    every()
    totals.needs("loads", "pages stored", "pages host", "pages disk", "pages far", "hits", "evictions", "preemptions",
                 "waits for a load of another request")
    return totals


def test_pages_from_three_places() -> None:
    run(150, st.just(Faults()))


def test_places_that_fail() -> None:
    run(150, FAULTS, num_drafter=st.integers(0, 1)).needs("pages failed")


def test_recurrent_states() -> None:
    run(150, FAULTS, state_pages=st.integers(1, 3)).needs("pages failed", "restored states")


def test_sessions_and_late_loads_and_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request that misses asks what others have stored."""
    monkeypatch.setattr(media, "NEWS_SECONDS", 0.0)
    run(150, FAULTS, state_pages=st.integers(0, 2), disturb_rate=0.05).needs(
        "pages late", "pages rests", "pages told", "pages pinned", "pages dropped")


def test_resets_and_rests_while_pages_come() -> None:
    run(300, FAULTS, state_pages=st.integers(0, 2), disturb_rate=0.15).needs("pages cancelled",
                                                                            "rests while pages come")


@pytest.mark.long
def test_many_schedules_with_faults() -> None:
    run(1000, FAULTS, state_pages=st.integers(0, 2), disturb_rate=0.02).needs("pages failed", "pages cancelled")
    run(1000, FAULTS, num_drafter=st.integers(0, 1), disturb_rate=0.02).needs("pages failed", "pages cancelled")
