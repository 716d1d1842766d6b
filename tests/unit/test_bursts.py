"""The simulation of bursts, by its own clock: every request is answered, and a burst is served as docs/architecture.md
says, beside full steps and beside a bound that knows no bursts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import bursts

from outrider.sched.full_step import UnboundedPrompts
from outrider.sched.prompt_time import PromptTime

BOUNDED = bursts.Engine("bounded", lambda: PromptTime(0.012, bursts.COSTS), 64)
FULL = bursts.Engine("full", UnboundedPrompts, 64)


@pytest.mark.parametrize("streams", [16, 48])
def test_a_burst_has_its_first_tokens_as_soon_as_in_full_steps(streams: int) -> None:
    load = bursts.burst(streams, num_out=64)
    own, full = (bursts.Simulation(engine, load).run() for engine in (BOUNDED, FULL))
    assert len(own.first) == streams and own.num_tokens == 64 * streams and len(own.gaps) == 63 * streams
    assert max(own.first) < 1.05 * max(full.first)
    assert max(own.gaps) < max(full.gaps)


def test_requests_that_decode_meet_no_long_step_when_a_prompt_arrives() -> None:
    load = bursts.Load("one", lambda: [bursts.Arrival(0.0, 0, 512, 150), bursts.Arrival(0.3, 1, 8000, 1)])
    assert max(bursts.Simulation(BOUNDED, load).run().gaps) < 0.016
    assert max(bursts.Simulation(FULL, load).run().gaps) > 0.1
