"""Decides when a size of step should get a CUDA graph of its own, by comparing the time that steps lose without one
with the time that a capture takes.

A graph has one size, and a step of 7,400 tokens on a graph of 8,192 computes 800 token rows of padding. If the device
takes longer for a step than the host takes to launch its kernels, the launches cost no time, and the step need not be
padded. For other steps it is unknown how often a size will occur again. So a graph is captured once its steps have lost
as much time as the capture takes. This never costs more than twice the time of the best choice."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from outrider.runner.graphs.keys import GraphKey

PATIENCE = 1.0  # times a capture's duration that must be lost before it
DECODE_PATIENCE = 0.5  # the same for decode steps: many of a size follow each other
PAUSE = 20  # times a capture's duration in which no other is made while requests run
LONG = 0.02  # seconds; a longer capture delays streams, so its steps must have lost more before it is due
DRAFT_SECONDS = 0.3e-3  # rough cost of one more draft
LENGTH_SECONDS = 0.1e-3  # rough loss of a step with short contexts on a graph for long ones
ROUND_TO = 64  # tokens: kernels are compiled for multiples of 16, and products have tiles of this many rows
LEAST_PADDING = 128  # tokens that are worth leaving out
MARGIN = 2.0  # times the launches' duration that the device must take for a step that is launched at its own size


@dataclass(frozen=True)
class LossRates:
    """Measured times, from which to estimate the seconds that a step loses because its size has no graph."""

    launch_seconds: float = 0.0  # the host's time to launch a step of any size
    token_seconds: float = 0.0  # the device's time for each token of a large step; 0: not measured

    @property
    def least_own_tokens(self) -> float:
        """The least number of tokens at which a step with prompts is launched at its own size, without a graph."""
        return MARGIN * self.launch_seconds / self.token_seconds if self.token_seconds else math.inf

    def own_size(self, key: GraphKey, num_tokens: int) -> GraphKey | None:
        """Return the key of a step with prompts that is launched at its own size; None if the step should run on a
        graph."""
        own = -(-num_tokens // ROUND_TO) * ROUND_TO
        if num_tokens < self.least_own_tokens or key.tokens - own < LEAST_PADDING:
            return None
        return replace(key, tokens=own)

    def of_padding(self, key: GraphKey, wider: GraphKey) -> float:
        """Estimate the extra seconds that a step of `key` takes on the graph of `wider`. In a step with prompts each
        padded request also costs a logit row."""
        extra = wider.tokens - key.tokens + (wider.requests - key.requests if key.has_prompts else 0)
        longer = LENGTH_SECONDS if wider.longest != key.longest else 0.0
        return self.token_seconds * extra + DRAFT_SECONDS * (wider.num_wanted - key.num_wanted) + longer

    def of_launches(self, key: GraphKey) -> float:
        """Estimate the seconds that the device waits for the host's launches if the step runs without a graph."""
        return max(0.0, self.launch_seconds - self.token_seconds * key.tokens)


class Losses:
    """The seconds that steps have lost so far because a graph was missing, added up by the key of the missing graph."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.times = LossRates()
        self.capture_seconds = 0.0  # how long the next capture is expected to take
        self._clock = clock
        self._lost: defaultdict[GraphKey, float] = defaultdict(float)
        self._next = 0.0  # time before which nothing is due

    def add(self, key: GraphKey, seconds: float) -> None:
        self._lost[key] += seconds

    def is_due(self, key: GraphKey) -> bool:
        """Whether the key's graph should be captured now, although requests wait for the capture."""
        patience = PATIENCE if key.has_prompts else DECODE_PATIENCE
        reason = patience * self.capture_seconds * max(1.0, self.capture_seconds / LONG)
        return self._lost[key] > 0 and self._lost[key] >= reason and self._clock() >= self._next

    def worst(self, excluded: Collection[GraphKey] = ()) -> GraphKey | None:
        """Return the key that has lost the most seconds; None if none has lost any."""
        lost = {key: seconds for key, seconds in self._lost.items() if seconds > 0 and key not in excluded}
        return max(lost, key=lost.__getitem__, default=None)

    def captured(self, key: GraphKey, seconds: float, *, pauses: bool) -> None:
        """Note how long the key's capture took. `pauses`: the capture delayed running requests, so no other key is due
        until PAUSE times that duration has passed."""
        self._lost.pop(key, None)
        self.capture_seconds = (self.capture_seconds + seconds) / 2 if self.capture_seconds else seconds
        if pauses:
            self._next = self._clock() + PAUSE * seconds
