"""EngineStats and its log line: counts from batches and results, differences, and when a line is due."""

from __future__ import annotations

import logging

import pytest

from outrider.core import RequestResult, ScheduledBatch, StepResult, Uncaptured
from outrider.core.outputs import RequestMetrics
from outrider.engine.stats import EngineStats, StatsLog
from tests.unit.made_requests import made_admission


def result(run: int, drafted: int = 0, accepted: int = 0) -> RequestResult:
    return RequestResult(0, 0, [1] * run, run, drafted, accepted)


def batch(drafts: list[int], samples: list[bool], hits: list[int]) -> ScheduledBatch:
    count = len(drafts)
    admissions = [made_admission(i + 1, [1, 2, 3], 9, computed=hit) for i, hit in enumerate(hits)]
    rows = list(range(1, count + 1))
    return ScheduledBatch(0, rows, [0] * count, rows, [1] * count, drafts, samples, [1] * count, admissions)


def filled() -> EngineStats:
    stats = EngineStats()
    stats.add(10, samples=2)
    stats.observe_batch(batch([3, 0, 2, 0], [True, True, True, False], hits=[2, 0]))
    for part in (result(3, 3, 2), result(1, 3, 0), result(1), result(0), result(4, 3, 3), result(2, 1, 1)):
        stats.observe_runs([part])
    return stats


def test_counts() -> None:
    stats = filled()
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_hit_tokens) == (1, 20, 2)
    assert (stats.num_runs, stats.num_generation_tokens, stats.num_drafts) == (5, 11, 4)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 6)
    assert stats.drafted_per_position == [4, 3, 3] and stats.accepted_per_position == [3, 2, 1]
    assert stats.acceptance_per_position == [3 / 4, 2 / 3, 1 / 3]
    assert stats.mean_run_length == 11 / 5 and stats.mean_acceptance_length == 2.5
    assert stats.chosen == [1, 0, 1, 1] and stats.mean_chosen == 5 / 3


def test_a_copy_stays_and_the_rest_is_what_came_after() -> None:
    stats = filled()
    before = stats.copy()
    assert before == stats and before.chosen is not stats.chosen
    stats.observe_runs([result(5, 4, 4)])
    recent = stats.since(before)
    assert (recent.num_runs, recent.num_generation_tokens, recent.accepted_per_position) == (1, 5, [1, 1, 1, 1])
    assert before.num_runs == 5
    still = stats.since(stats.copy())
    assert still == EngineStats() and still.acceptance_per_position == [] and still.line()


def test_uncaptured_steps_are_counted_by_reason() -> None:
    stats = EngineStats()
    assert stats.uncaptured_line == "Steps: 0, uncaptured: none"
    stats.observe_step(StepResult(0, [], uncaptured=Uncaptured.FOLDS))
    before = stats.copy()
    for reason in (Uncaptured.SAMPLING_PARAMETERS, None, Uncaptured.SAMPLING_PARAMETERS, Uncaptured.FOLDS):
        stats.observe_step(StepResult(0, [], uncaptured=reason))
    line = f"Steps: 4, uncaptured: 2 ({Uncaptured.SAMPLING_PARAMETERS.value}), 1 ({Uncaptured.FOLDS.value})"
    assert stats.since(before).uncaptured_line == line and before.num_steps == 1
    assert sum(stats.uncaptured.values()) == 4


def test_the_line_can_be_grepped() -> None:
    line = filled().line()
    assert line.startswith("Mean acceptance length: 2.50, Accepted/drafted: 6/10, "
                           "Per-position acceptance rate: 0.750, 0.667, 0.333, Avg Draft acceptance rate: 60.0%")
    assert EngineStats().line().startswith("Mean acceptance length: 1.00")


def test_a_line_at_most_every_ten_seconds_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    stats = EngineStats()
    log = StatsLog(stats, clock=lambda: now)
    with caplog.at_level(logging.INFO, logger="outrider"):
        for now in (1.0, 9.9, 10.0, 11.0, 19.0, 21.0, 40.0):
            if now < 30:
                stats.observe_runs([result(2, 1, 1)])
            log.flush()
        log.close()
    assert [message.split("Tokens")[0].split("Accepted/drafted: ")[1].split(",")[0] for message in caplog.messages] == [
        "3/3", "3/3", "6/6"]
    assert caplog.messages[-1].startswith("totals since the start: Mean acceptance length")


def test_a_requests_own_positions() -> None:
    metrics = RequestMetrics()
    for accepted in (2, 0, 3, 1):
        metrics.observe_drafts(accepted)
    assert metrics.accepted_per_position == [3, 2, 1]
