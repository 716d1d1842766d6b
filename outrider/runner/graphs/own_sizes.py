"""OwnSizes: which steps with prompts run uncaptured, at their own number of tokens.

A graph has one size, and a step of 7,400 tokens on a graph of 8,192 computes 800 token rows for nobody. Where the
device takes longer for a step than the host takes to launch it, the launches cost no time, and the step need not be
padded.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

import torch

from outrider.kernels.packet import empty_packet
from outrider.runner.graphs.captures import StepGraphs
from outrider.runner.graphs.keys import GraphKey
from outrider.runner.step import DeviceStep

log = logging.getLogger("outrider")
ROUND_TO = 64  # tokens: kernels are compiled for multiples of 16, and products have tiles of this many rows
LEAST_PADDING = 128  # tokens that are worth leaving out
MARGIN = 2.0  # times the launches' duration that the device must take


@dataclass(frozen=True)
class OwnSizes:
    least_tokens: float = math.inf  # of a step that may run uncaptured

    @classmethod
    def from_costs(cls, launch_seconds: float, token_seconds: float) -> OwnSizes:
        """launch_seconds: of the host, for a step of any size. token_seconds: of the device, for each token."""
        return cls(MARGIN * launch_seconds / token_seconds)

    def key_for(self, key: GraphKey, num_tokens: int) -> GraphKey | None:
        """The step at its own size; None if it should run on a graph."""
        own = -(-num_tokens // ROUND_TO) * ROUND_TO
        if not key.has_prompts or num_tokens < self.least_tokens or key.tokens - own < LEAST_PADDING:
            return None
        return replace(key, tokens=own)


def measure_own_sizes(step: DeviceStep, graphs: StepGraphs, largest: GraphKey) -> OwnSizes:
    """Times a replay of the largest step with prompts, and the launches of a small one."""
    captured = graphs.get(largest)
    torch.cuda.synchronize()
    start = time.perf_counter()
    captured.replay(lambda: None)
    torch.cuda.synchronize()
    device_seconds = time.perf_counter() - start
    small = replace(largest, requests=1, tokens=min(ROUND_TO, largest.tokens))
    shape, plan = graphs.keys.shape(small), graphs.keys.plan(small)
    ints = empty_packet(shape, step.state.device)
    start = time.perf_counter()
    step.whole(shape, ints, plan)
    launch_seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    found = OwnSizes.from_costs(launch_seconds, device_seconds / largest.tokens)
    log.info("a step of %d tokens takes %.1f ms, its launches %.1f ms: from %.0f tokens on steps are not padded",
             largest.tokens, device_seconds * 1e3, launch_seconds * 1e3, found.least_tokens)
    return found
