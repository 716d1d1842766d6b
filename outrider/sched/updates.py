"""The scheduler's reports: each request's part of a settled step, and counts over the scheduler's life."""

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
    """One request's part of a settled step, as everything after the scheduler sees it."""

    request: Request
    result: RequestResult
