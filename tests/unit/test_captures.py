"""When a graph is captured while requests run: at once where no other serves, else after many steps, with pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from outrider.core import StepForm
from outrider.runner.graphs import captures
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.sizes import PATIENCE
from tests.unit.test_graph_keys import graphs as make_keys

WIDE, OWN, OTHER = (GraphKey(requests, requests, 0, False) for requests in (64, 40, 24))
SPLIT = replace(OWN, form=StepForm.SPLIT)
CAPTURE = 0.1  # seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(captures.time, "perf_counter", lambda: now[0])
    return now


def made(clock: list[float]) -> Any:
    """Graphs whose captures take time and are their keys."""
    own: Any = StepGraphs.__new__(StepGraphs)
    own.keys, own._captured, own._missed, own._refused = make_keys(), {WIDE: WIDE}, Counter(), set()
    own._num_at_start, own._stand_ins, own._next_capture = 1, {}, 0.0

    def get(key: GraphKey) -> GraphKey:
        clock[0] += CAPTURE
        own._stand_ins.clear()
        own._captured[key] = key
        return key

    own.get = get
    return own


def test_a_size_that_is_met_often_gets_its_own_graph(clock: list[float]) -> None:
    own = made(clock)
    assert [own.serve(OWN) for _ in range(PATIENCE + 1)] == [WIDE] * PATIENCE + [OWN]


@pytest.mark.parametrize(("first", "pauses"), [(OWN, True), (SPLIT, False)], ids=["served", "not served"])
def test_captures_pause_after_one_that_could_have_waited(clock: list[float], first: GraphKey, pauses: bool) -> None:
    """A graph that no other could replace says nothing about how often others are captured."""
    own = made(clock)
    own._missed = Counter({OWN: PATIENCE, OTHER: PATIENCE})
    assert own.serve(first) == first
    assert own.serve(OTHER) == (OWN if pauses else OTHER)
    clock[0] += captures.PAUSE * CAPTURE + 0.01
    assert own.serve(OTHER) == OTHER
