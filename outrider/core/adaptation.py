"""The report of a drafter that learns from the traffic, and the rows that have lost their request. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RowEnd(NamedTuple):
    """Says that a request has left its row, because it ended or was preempted."""

    row: int
    # Tokens of its text, the prompt's included, that count. 0 for a request that was preempted, aborted or failed.
    num_served: int


@dataclass(frozen=True, slots=True)
class AdaptationReport:
    """Counts since the start, and the last measurement on held-out texts."""

    num_texts: int = 0  # texts that were recorded
    num_steps: int = 0  # optimizer steps of the trainer
    num_swaps: int = 0  # times that better weights replaced those that serve
    num_errors: int = 0  # times that the trainer failed
    serving_run: float = 0.0  # mean run of the serving head on held-out texts; 0 before the first measurement
    candidate_run: float = 0.0  # mean run of the head in training, on the same texts
    work_seconds: float = 0.0  # that the trainer has worked
    error: str = ""  # the last error of the trainer
