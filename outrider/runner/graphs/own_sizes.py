"""OwnSizes: which steps with prompts run uncaptured, at their own number of tokens.

A graph has one size, and a step of 7,400 tokens on a graph of 8,192 computes 800 token rows of padding. Where the
device takes longer for a step than the host takes to launch it, the launches cost no time, and the step need not be
padded.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from outrider.kernels.packet import empty_packet
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.graphs.losses import LossRates
from outrider.runner.step import DeviceStep

ROUND_TO = 64  # tokens: kernels are compiled for multiples of 16, and products have tiles of this many rows
LEAST_PADDING = 128  # tokens that are worth leaving out
MARGIN = 2.0  # times the launches' duration that the device must take


@dataclass(frozen=True)
class OwnSizes:
    least_tokens: float = math.inf  # tokens of the smallest step that may run uncaptured

    @classmethod
    def from_times(cls, times: LossRates) -> OwnSizes:
        return cls(MARGIN * times.launch_seconds / times.token_seconds)

    def key_for(self, key: GraphKey, num_tokens: int) -> GraphKey | None:
        """The step at its own size; None if it should run on a graph."""
        own = -(-num_tokens // ROUND_TO) * ROUND_TO
        if not key.has_prompts or num_tokens < self.least_tokens or key.tokens - own < LEAST_PADDING:
            return None
        return replace(key, tokens=own)


class ReplayTime:
    """The time that the device takes for a replay of a captured step. The host does other things meanwhile."""

    def __init__(self, graphs: StepGraphs, key: GraphKey) -> None:
        captured = graphs.get(key)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()
        captured.replay(lambda: None)
        self._end.record()

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3


def measure_times(step: DeviceStep, graphs: StepGraphs, largest: GraphKey, device_seconds: float) -> LossRates:
    """device_seconds: of the largest step. Times the launches of a small one."""
    tokens = ROUND_TO if largest.has_prompts else largest.tokens // largest.requests
    small = replace(largest, requests=1, tokens=min(tokens, largest.tokens))
    shape, plan = graphs.keys.shape(small), graphs.keys.plan(small)
    ints = empty_packet(shape, step.state.device)
    launches = []
    for _ in range(2):  # the first launch of a size also loads kernels, which later ones do not
        start = time.perf_counter()
        step.whole(shape, ints, plan)
        launches.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return LossRates(min(launches), device_seconds / largest.tokens)
