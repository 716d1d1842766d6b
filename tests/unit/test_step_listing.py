"""What `outrider bench steps` says of recorded steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.benchmarks.step_listing import StepRecorder, list_steps
from outrider.core import ScheduledBatch, StepResult, Uncaptured
from outrider.core.step_messages import DraftOrders


def batch_of(step: int, num_known: int, num_drafts: int) -> ScheduledBatch:
    ids = [0, 1]
    return ScheduledBatch(step, ids, [0, 0], ids, [num_known] * 2, [num_drafts] * 2, [True] * 2, [9, 9],
                          drafting=DraftOrders(num_wanted=1))


def test_steps_are_timed_between_ends_and_the_slowest_are_listed() -> None:
    times = iter([0.0, 1.0, 10.0, 11.0, 12.0, 42.0, 50.0, 51.0])
    recorder = StepRecorder(clock=lambda: next(times))
    batches = [batch_of(1, 7, 0), batch_of(2, 1, 1), batch_of(3, 1, 1), batch_of(4, 1, 1)]
    scheduler: Any = SimpleNamespace(schedule=lambda: batches.pop(0) if batches else None)
    recorder.finish(StepResult(0, []))  # scheduled before
    recorder.schedule(scheduler)  # at 1
    recorder.schedule(scheduler)  # at 10, while the first runs
    recorder.finish(StepResult(1, [], uncaptured=Uncaptured.OWN_SIZE))  # 11
    recorder.finish(StepResult(2, []))  # 12
    recorder.schedule(scheduler)  # 42, after a pause
    recorder.finish(StepResult(3, []))  # 50
    steps = recorder.take()
    assert [step.seconds for step in steps] == [10.0, 1.0, 8.0] and not recorder.take()
    lines, found = list_steps(steps, 2)
    assert found["drafts"] == {"1": 2} and found["steps_with_prompts"] == 1
    assert [one["step"] for one in found["slowest"]] == [0, 2]
    assert "drafts of a request in the others: 1 in 2" in lines[0]
    assert "2 requests, 14 token rows, 14 of prompts, 0 drafts checked, 1 proposed; uncaptured (" in lines[1]
    assert "1.8 times the usual; 2 requests, 4 token rows, 1 drafts checked, 1 proposed; captured" in lines[2]
    assert "the first of its size" in lines[1] and "the first of its size" not in lines[2]
