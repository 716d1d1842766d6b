"""The scheduler's reports: the result of a step for one request, and counts since the scheduler was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.core import RequestResult
from outrider.sched.request import Request


@dataclass(slots=True)
class SchedulerStats:
    num_steps: int = 0
    num_preemptions: int = 0
    num_dropped_results: int = 0
    num_restarts: int = 0  # of requests that shared what another one was computing, and that turned out not finite
    max_steps_in_flight: int = 0


class Update(NamedTuple):
    """One request and its result of a step, which has been applied to the request."""

    request: Request
    result: RequestResult
