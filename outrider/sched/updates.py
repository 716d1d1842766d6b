"""Applies the results of a step to its requests, and counts what the scheduler has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from outrider.core import RequestResult, ScheduledBatch, StepResult
from outrider.sched.request import Request


@dataclass(slots=True)
class SchedulerStats:
    num_steps: int = 0
    num_preemptions: int = 0
    num_dropped_results: int = 0
    num_restarts: int = 0  # of requests that shared what another one was computing, and that turned out not finite
    max_steps_in_flight: int = 0


# One request and its result of a step, which has been applied to the request. A plain tuple, because hundreds are made
# every step.
Update: TypeAlias = tuple[Request, RequestResult]


class AppliedResults(NamedTuple):
    """The results of a step, after they were applied to the requests."""

    updates: list[Update]
    due: list[Update]  # those of requests that end, or whose pages change
    num_dropped: int  # results of requests that were ended or preempted since the step was scheduled


def apply_results(requests: Mapping[int, Request], batch: ScheduledBatch, result: StepResult) -> AppliedResults:
    """Apply the results of a step to the requests, given by id. One loop without calls: it runs for every request of
    every step."""
    updates: list[Update] = []
    due: list[Update] = []
    for part, known, drafts, sampled in zip(
        result.requests, batch.num_known, batch.num_drafts, batch.samples, strict=True
    ):
        (request_id, epoch, run, num_computed, num_drafted, num_accepted, num_proposed, finish, _, _, _, _,
         levels, _) = part
        request = requests.get(request_id)
        if request is None or request.epoch != epoch:
            continue
        settled = request.settled
        length = settled.at_least = settled.at_least + num_computed
        request.folded = length - num_accepted
        request.unsettled -= known + drafts
        request.in_flight_samples -= sampled
        if num_computed != known + drafts:  # drafts were rejected
            bound = length + request.unsettled
            request.bound.at_most = bound if bound < request.end_len else request.end_len
        request.num_proposed = num_proposed
        request.checked_levels, request.levels = request.levels, levels
        if run:
            request.token_ids += run
            stats = request.stats
            stats.num_steps += 1
            if num_drafted:
                stats.num_drafted += num_drafted
                stats.num_accepted += num_accepted
        update = request, part
        updates.append(update)
        if length >= request.next_event or finish:
            due.append(update)
    return AppliedResults(updates, due, len(result.requests) - len(updates))
