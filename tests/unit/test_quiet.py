"""Waiting for work: a worker may use the time, and whoever sends something waits for it no longer than it says."""

from __future__ import annotations

import queue
from typing import Any

from outrider.engine.quiet import wait_for
from outrider.engine.worker_child import IN_FLIGHT_SECONDS, Flight
from outrider.runner.rank_status import STATUS_FIELDS, RankStatus


def test_a_worker_is_asked_until_it_has_nothing_to_do() -> None:
    asked: list[float | None] = []
    pauses = iter([0.5, 0.0, 0.0, None])

    def take(seconds: float | None) -> str | None:
        asked.append(seconds)
        return "work" if seconds is None else None

    quiet: list[float] = []

    def idle(seconds: float) -> float | None:
        quiet.append(seconds)
        return next(pauses)

    assert wait_for(take, idle) == "work"
    assert asked == [0.5, 0.0, 0.0, None] and quiet[0] == 0.0 and quiet == sorted(quiet)


def test_work_that_has_come_is_taken_first() -> None:
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    commands.put("work")
    asked: list[float] = []
    assert wait_for(lambda seconds: commands.get(timeout=seconds), lambda quiet: asked.append(quiet) or 1.0) == "work"
    assert asked == [0.0]


class _Worker:
    def __init__(self) -> None:
        self.quiet: list[float] = []

    def idle(self, quiet_seconds: float) -> float | None:
        self.quiet.append(quiet_seconds)
        return None


def test_a_child_is_not_idle_while_steps_are_in_flight() -> None:
    worker: Any = _Worker()
    flight = Flight(RankStatus([0] * STATUS_FIELDS))
    assert flight.idle(worker, 3.0) is None and worker.quiet == [3.0]
    flight.num_queued += 1
    assert flight.idle(worker, 3.0) == IN_FLIGHT_SECONDS and len(worker.quiet) == 1
    flight.answered()
    assert flight.idle(worker, 100.0) is None and worker.quiet[1] < 100.0, "it was busy until now"
