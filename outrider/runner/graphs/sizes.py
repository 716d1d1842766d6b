"""The table of padded sizes: those that steps are captured in, those that are captured at start-up, and those that are
measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from outrider.core import Limits
from outrider.core.decode_sizes import FEW

MOST_AT_START = 256  # requests of the largest decode step that start-up captures and measures
SHARED_DRAFTS = 1  # drafts of a request up to which attention can read shared pages once for several requests
FILLED_ROWS = (1, 8, 64)  # rows just admitted for which the filling of a drafter's slots is loaded
MOST_LATER = 256  # captures after start-up
PROMPTS_AT_START = ((4, 256), (16, 512), (256, 1024))  # requests and tokens of steps with prompts, captured at start-up
DRAFTING_REQUESTS = (1, 8, 64)  # numbers of requests for which proposals are measured, and the most there are
MEASURED_CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # token counts for which steps are measured on a GPU
# Without captures, on a CPU: both sides of the steps that products make there. Every further token costs the same.
MEASURED_UNCAPTURED = (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 32, 48)


@dataclass(frozen=True)
class GraphSizes:
    """Padded sizes of captured steps, each list in ascending order. Lists for later captures end with the largest size
    that a step can have; lists for start-up end with the largest size that start-up captures."""

    requests: list[int]  # request counts of decode steps
    at_start: list[int]  # the request counts captured at start-up; the others are captured once they are met often
    full_at_start: list[int]  # the counts of `at_start` that are also captured with all sampling parameters
    shared: list[int]  # request counts of decode steps of requests that share pages
    prompt_requests: list[int]  # request counts of steps with prompts
    prompt_tokens: list[int]  # padding costs time there, so it is an eighth at most; few tokens cost what weights cost

    @classmethod
    def from_limits(cls, limits: Limits) -> GraphSizes:
        most, most_tokens = limits.max_requests, limits.max_batched_tokens
        tokens = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512),
                  *range(5120, most_tokens + 1, 1024))
        first = min(most, MOST_AT_START)
        powers = _up_to(first, (1 << i for i in range(first.bit_length())))
        at_start = powers
        if not limits.max_drafts:  # with drafts there are several graphs for each size
            at_start = _up_to(first, (*powers, *(3 << i for i in range(4, first.bit_length()))))
        return cls(
            requests=_up_to(most, (1, 2, 4, 8, *range(16, 129, 8), *range(144, most + 1, 16))),
            at_start=at_start,
            full_at_start=powers[::-2][::-1],
            shared=_up_to(most, (2 * FEW << i for i in range(most.bit_length()))),
            prompt_requests=_up_to(most, (4**i for i in range(10))),
            prompt_tokens=_up_to(most_tokens, tokens),
        )

    def unequal_when_idle(self, max_drafts: int) -> list[tuple[int, int]]:
        """Return (requests, mean number of drafts) of the steps to capture while the engine is idle for requests with
        different numbers of drafts, which share their token rows. Until smaller ones are captured, each also serves the
        sizes below it."""
        sizes = [requests for requests in reversed(self.at_start) if requests > FEW]
        return list(product(sizes, range(max_drafts - 1, 0, -1)))


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})


def next_size(sizes: list[int], at_least: int) -> int:
    """Return the smallest of `sizes` that is at least `at_least`; there must be one."""
    return sizes[bisect_left(sizes, at_least)]
