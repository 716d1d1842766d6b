"""Measured times of steps, as plain data. The worker measures them at start-up. The scheduler uses them to choose how
many drafts and how many prompt tokens a step has."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outrider.core.decode_sizes import size_for
from outrider.core.params import SamplingParams

MEASURED_BOUNDS = 2  # steps with prompts are measured up to this many times their time bound, since some may exceed it
SMALL_STEP = 1.15  # a small step takes at most so many times what decoding takes: reading the weights is most of both


class DraftCost(NamedTuple):
    """Seconds that a drafter needs to propose drafts for `requests` requests."""

    requests: int
    first: float  # the pass over the step's tokens, which yields the first draft
    each: float  # each further draft


class ReadCost(NamedTuple):
    """Seconds for each token of context that a step reads. With a window, only the last `window` tokens count."""

    window: int | None
    seconds: float


class SamplerLoad(enum.IntEnum):
    """The work that a request makes for the sampler, for each of its logit rows."""

    GREEDY = 0
    DRAW = 1  # noise
    FULL = 2  # edits, filters or reports

    @classmethod
    def from_params(cls, params: SamplingParams) -> SamplerLoad:
        if not params.is_plain:
            return cls.FULL
        return cls.GREEDY if params.is_greedy else cls.DRAW


@dataclass(frozen=True)
class SizedCosts:
    """Measured seconds of a step as a function of its number of tokens, plus the time to read the contexts and
    recurrent states of its requests.

    `tokens` and `seconds` are sorted points; values between two points are interpolated linearly."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    reading: tuple[ReadCost, ...] = field(default=(), kw_only=True)  # contexts that are read, added to `seconds`
    row_seconds: float = field(default=0.0, kw_only=True)  # recurrent states of one request, added to `seconds`

    def read(self, lengths: list[int]) -> float:
        """Seconds that a step takes to read the contexts and recurrent states of requests with these lengths."""
        return len(lengths) * self.row_seconds + sum(
            cost.seconds * (sum(lengths) if cost.window is None else sum(min(n, cost.window) for n in lengths))
            for cost in self.reading
        )


@dataclass(frozen=True)
class StepCosts(SizedCosts):
    """Measured seconds of decode steps with drafts, and of the drafter that proposes them."""

    drafting: tuple[DraftCost, ...] = ()  # empty if a proposal costs nothing worth counting
    logit_row_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # sampling by load, added to `seconds`
    is_padded: bool = False  # steps are captured: they have the sizes of core/decode_sizes.py

    def step(self, tokens: int, requests: int = 1) -> float:
        if self.is_padded and tokens % requests:
            tokens = size_for(requests, tokens, tokens // requests)
        return interpolate(self.tokens, self.seconds, tokens)

    def draft(self, most: int, requests: int = 1) -> float:
        return self.drafts(most, requests)[most]

    def drafts(self, most: int, requests: int) -> list[float]:
        """Seconds to propose 0, 1, ... `most` drafts for each request."""
        if not self.drafting:
            return [0.0] * (1 + most)
        at, firsts, eachs = self._drafting_points
        first, each = interpolate(at, firsts, requests), interpolate(at, eachs, requests)
        return [0.0, *(first + num * each for num in range(most))]

    @cached_property
    def _drafting_points(self) -> tuple[list[int], list[float], list[float]]:
        at, firsts, eachs = zip(*self.drafting, strict=True)
        return list(at), list(firsts), list(eachs)

    def sample(self, loads: Iterable[SamplerLoad]) -> float:
        """Seconds that the sampler takes for logit rows. loads: the sampler load of each row."""
        return sum(map(self.logit_row_seconds.__getitem__, loads))


@dataclass(frozen=True)
class MixedStepCosts(SizedCosts):
    """Measured seconds of steps that compute prompts while other requests decode, by the size of the captured step. The
    attention of the prompts is not included: `attend` gives its seconds."""

    attending: tuple[ReadCost, ...] = ()  # for each pair of a prompt's token and a key that the token sees

    def step(self, tokens: int) -> float:
        return interpolate(self.tokens, self.seconds, tokens)

    def largest_size(self, max_seconds: float) -> int:
        """Return the largest size of a step that takes at most `max_seconds`; 0 if every step takes longer."""
        fitting = (size for size, seconds in zip(self.tokens, self.seconds, strict=True) if seconds <= max_seconds)
        return max(fitting, default=0)

    def attend(self, num_tokens: int, context: int) -> float:
        """Return the seconds that attention takes for a chunk of `num_tokens` tokens of a prompt, after `context`
        tokens that were computed before."""
        keys = context + (num_tokens + 1) / 2  # in the mean
        return num_tokens * sum(
            cost.seconds * (keys if cost.window is None else min(keys, cost.window)) for cost in self.attending
        )


def interpolate(points: Sequence[int], values: Sequence[float], x: int) -> float:
    """Return the value at x of the piecewise linear function through sorted points. Beyond the last point the last
    slope continues."""
    at = bisect_right(points, x)
    if at == 0 or len(points) == 1:
        return values[0]
    at = min(at, len(points) - 1)
    low, high = points[at - 1], points[at]
    return values[at - 1] + (values[at] - values[at - 1]) / (high - low) * (x - low)
