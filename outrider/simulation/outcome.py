"""Outcome: the counts and times of a simulation's requests, and their summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

PERCENTILES = (50, 90, 99)
GAP_UNIT = 1e-6  # seconds: gaps are counted in whole microseconds


@dataclass
class DraftTally:
    """Counts drafts of decode steps. The numbers of drafts are grouped by the number of requests in the step, rounded
    down to a power of two."""

    num_runs: int = 0  # parts of steps that yielded tokens
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    chosen: dict[int, Counter[int]] = field(default_factory=dict)  # by requests: how often so many drafts

    def choose(self, num_requests: int, num_drafts: int) -> None:
        """Count a decode step. num_requests: its requests; num_drafts: the drafts of all its requests together."""
        size = 1 << (num_requests.bit_length() - 1)
        self.chosen.setdefault(size, Counter())[round(num_drafts / num_requests)] += 1

    def summary(self) -> dict[str, Any]:
        most_chosen = {str(size): max(counts, key=lambda drafts: (counts[drafts], -drafts))
                       for size, counts in sorted(self.chosen.items())}
        return {
            "mean_run": self.num_tokens / self.num_runs if self.num_runs else 0.0,
            "acceptance_rate": self.num_accepted / self.num_drafted if self.num_drafted else 0.0,
            "most_chosen_by_requests": most_chosen,
        }


@dataclass
class Outcome:
    """Counts and times that a simulation collects over all replicas."""

    first_token: list[float] = field(default_factory=list)  # seconds from arrival, of each request
    whole: list[float] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)  # between two runs of a request, in GAP_UNIT
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    end: float = 0.0  # seconds at which the last request ended
    busy: list[float] = field(default_factory=list)  # seconds that each replica's device computed
    page_use: list[float] = field(default_factory=list)  # share of a replica's pages, when a request ends
    num_queried_tokens: int = 0  # prompt tokens that were looked up in the cache
    num_hit_tokens: int = 0
    loaded_pages: Counter[str] = field(default_factory=Counter)  # by the place beyond the device
    num_preemptions: int = 0
    num_steps: int = 0
    drafts: DraftTally = field(default_factory=DraftTally)

    def summary(self) -> dict[str, Any]:
        """The figures that `outrider bench serve` also reports, by name; times in milliseconds."""
        seconds = self.end or 1.0
        gaps = sorted(self.gaps.items())
        result: dict[str, Any] = {
            "completed": len(self.whole), "duration": self.end, "num_steps": self.num_steps,
            "request_throughput": len(self.whole) / seconds, "output_throughput": self.num_output_tokens / seconds,
            "total_token_throughput": (self.num_output_tokens + self.num_prompt_tokens) / seconds,
            "utilisation": fsum(self.busy) / len(self.busy) / seconds if self.busy else 0.0,
            "mean_page_use": fsum(self.page_use) / len(self.page_use) if self.page_use else 0.0,
            "max_page_use": max(self.page_use, default=0.0),
            "prefix_hit_rate": self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0,
            "preemptions": self.num_preemptions,
        }
        if self.loaded_pages:
            result["loaded_pages"] = dict(self.loaded_pages)
        for name, values in (("ttft", self.first_token), ("e2el", self.whole)):
            result |= _times(name, [(value * 1e3, 1) for value in sorted(values)])
        result |= _times("itl", [(gap * GAP_UNIT * 1e3, count) for gap, count in gaps])
        if self.drafts.num_drafted:
            result["drafts"] = self.drafts.summary()
        return result


def _times(name: str, ordered: Sequence[tuple[float, int]]) -> dict[str, float]:
    """The mean and percentiles of times. `ordered`: pairs of a time and how often it occurred, ascending."""
    total = sum(count for _, count in ordered)
    if not total:
        return {}
    result = {f"mean_{name}_ms": fsum(value * count for value, count in ordered) / total}
    for percent in PERCENTILES:
        rank, seen = -(-total * percent // 100), 0
        for value, count in ordered:
            seen += count
            if seen >= rank:
                result[f"p{percent}_{name}_ms"] = value
                break
    return result
