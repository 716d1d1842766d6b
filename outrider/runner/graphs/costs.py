"""Measures at start-up how long steps take by their number of tokens, how much a drafter's proposal adds, and how long
the host's launches take.

The measured steps are whole steps of null rows, which have no context and no recurrent states. The time to read context
and states is estimated from their bytes.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from outrider.core import NULL_ROW, Limits
from outrider.core.costs import DraftCost, ReadCost, StepCosts
from outrider.kernels.buffers import to_device
from outrider.kernels.packet import empty_packet
from outrider.kernels.sampling_flags import TOP_P
from outrider.runner.batch import PaddedSize, pack_eager
from outrider.runner.graphs.keys import GraphKey, SamplerForm
from outrider.runner.graphs.losses import ROUND_TO, LossRates
from outrider.runner.graphs.sizes import DRAFTING_REQUESTS, MEASURED_CAPTURED, MEASURED_UNCAPTURED
from outrider.runner.graphs.warm_up import dead_batch
from outrider.runner.plan import StepPlan
from outrider.runner.step import DeviceStep
from outrider.sample.extras import StepExtras, StepNeeds

if TYPE_CHECKING:
    from outrider.runner.graphs.captures import CapturedStep, StepGraphs

log = logging.getLogger("outrider")
REPEATS = 3
SWEEPS, SWEEP_REPEATS = 2, 2  # of steps that are not captured: others may use the cores for a part of a second
MOST_SWEEPS = 12  # over small steps, by which drafts are decided
SMALL_STEP = 9  # tokens
SETTLED = 0.97  # a sweep that brings no time below so many times the known one is the last
PROPOSALS = 7  # that are measured
ENOUGH_SECONDS = 0.1  # spent on one size on a CPU, where chance is small beside a step that takes long
SAMPLE_BYTES = 1 << 30  # bytes of the pool that are read to learn how fast reading is


@torch.inference_mode()
def measure_costs(step: DeviceStep, limits: Limits, graphs: StepGraphs | None = None,
                  sizes: Sequence[int] | None = None) -> StepCosts:
    """Measure the seconds that steps take. graphs: the captured steps; None if steps are not captured. sizes: token
    counts to measure in place of the usual ones."""
    max_requests = _most_measured(limits, graphs)
    most = min(max_requests * (1 + limits.max_drafts), limits.max_batched_tokens)
    if sizes is None:
        sizes = measured_sizes(most, is_cuda=step.state.device.type == "cuda")
    has_network = step.drafter is not None and bool(step.drafter.attention_layers)
    if graphs is None:
        plain, drafting = _uncaptured(step, limits, sizes, has_network)
    else:
        # More tokens never cost less; a dip is noise.
        seconds = accumulate((step_seconds(step, limits, graphs, size, num_wanted=0) for size in sizes), max)
        plain = StepCosts(tuple(sizes), tuple(seconds))
        counts = sorted({*(n for n in DRAFTING_REQUESTS if n < max_requests), max_requests}) if has_network else []
        drafting = [_drafting(step, limits, graphs, n, plain) for n in counts]
    reading, row_seconds = read_costs(step)
    loads = (0.0, 0.0, 0.0) if graphs is None else sampler_costs(step, graphs)
    return replace(plain, drafting=tuple(drafting), logit_row_seconds=loads, is_padded=graphs is not None,
                   reading=reading, row_seconds=row_seconds)


def _most_measured(limits: Limits, graphs: StepGraphs | None) -> int:
    """Return the number of requests in the largest step that is measured. Costs of larger steps are extrapolated along
    the line through the last two measured sizes."""
    return limits.max_requests if graphs is None else graphs.keys.sizes.at_start[-1]


def measured_sizes(most: int, *, is_cuda: bool) -> list[int]:
    """Return the token counts to measure for steps of up to `most` tokens. On a CPU only small steps are measured:
    large ones take long, and their costs are extrapolated along the line through the last two measured sizes."""
    if is_cuda:
        return sorted({size for size in MEASURED_CAPTURED if size < most} | {most})
    return sorted({min(size, most) for size in MEASURED_UNCAPTURED})


def sampler_costs(step: DeviceStep, graphs: StepGraphs) -> tuple[float, float, float]:
    """Measure the seconds that the sampler adds for one logit row that is greedy, drawn at a temperature, or drawn with
    a top-p. Steps of dead tokens are timed with each of these parameters in the null row. A top-k is not timed: it is
    slow where all logits are equal, as those of dead tokens may be."""
    requests, rows, device = graphs.keys.sizes.at_start[-1], step.state.sampling, step.state.device
    plain = graphs.keys.shortened(GraphKey(requests, requests, 0, False))
    full = replace(plain, sampler=SamplerForm.FULL) if step.has_sampler_kernels else plain
    before = [field[NULL_ROW].clone() for field in (rows.temperature, rows.flags, rows.top_k, rows.top_p)]
    found = []
    for key, asked in ((plain, (0.0, 0, 0, 1.0)), (plain, (1.0, 0, 0, 1.0)), (full, (1.0, TOP_P, 0, 0.9))):
        for field, value in zip((rows.temperature, rows.flags, rows.top_k, rows.top_p), asked, strict=True):
            field[NULL_ROW] = value
        found.append(_replay_seconds(graphs, key, device))
    for field, value in zip((rows.temperature, rows.flags, rows.top_k, rows.top_p), before, strict=True):
        field[NULL_ROW] = value
    greedy, draw, searched = found
    return 0.0, max(0.0, draw - greedy) / requests, max(0.0, searched - greedy) / requests


def _uncaptured(step: DeviceStep, limits: Limits, sizes: Sequence[int],
                has_network: bool) -> tuple[StepCosts, list[DraftCost]]:
    """Measure the seconds of uncaptured steps of these sizes, and of a proposal. All sizes are measured in several
    rounds; small ones are repeated as long as shorter times come up. The shortest time counts, because other work on
    the machine only ever adds time. No step is taken to cost more than a larger one."""
    best = [float("inf")] * len(sizes)
    for sweep in range(MOST_SWEEPS):
        before = best
        best = [min(known, step_seconds(step, limits, None, size, 0, SWEEP_REPEATS))
                if sweep < SWEEPS or size <= SMALL_STEP else known for known, size in zip(before, sizes, strict=True)]
        is_settled = all(now >= SETTLED * known for now, known in zip(best, before, strict=True))
        if sweep + 1 >= SWEEPS and step.ranks.link.decide(partial(bool, is_settled)):  # ranks run equally many steps
            break
    plain = StepCosts(tuple(sizes), tuple(accumulate(reversed(best), min))[::-1])
    return plain, [_uncaptured_drafting(step, limits, plain.step(1))] if has_network else []


def _uncaptured_drafting(step: DeviceStep, limits: Limits, none: float) -> DraftCost:
    """Measure the cost of a proposal on steps of one token. none: the seconds of such a step without a proposal. Steps
    that propose no, one and all drafts are timed right after each other, and the median of the ratios counts: on a busy
    machine the times of two steps can differ by more than a proposal takes."""
    ratios = []
    for _ in range(PROPOSALS):
        alone, *others = (step_seconds(step, limits, None, 1, num_wanted, SWEEP_REPEATS)
                          for num_wanted in (0, 1, limits.max_drafts))
        ratios.append([other / alone - 1 for other in others])
    one, most = (none * statistics.median(each) for each in zip(*ratios, strict=True))
    return _draft_cost(1, one, most, limits.max_drafts)


def _draft_cost(requests: int, one: float, most: float, num_drafts: int) -> DraftCost:
    return DraftCost(requests, max(0.0, one), max(0.0, (most - one) / max(1, num_drafts - 1)))


def _drafting(step: DeviceStep, limits: Limits, graphs: StepGraphs, requests: int, plain: StepCosts) -> DraftCost:
    """Measure the cost of a proposal on captured steps that check as many drafts as they propose. Start-up captures
    these steps for batches, so no graph is captured only for a measurement."""
    def seconds_of(drafts: int) -> float:
        key = graphs.keys.shortened(GraphKey(requests, requests * (1 + drafts), drafts, True))
        return _replay_seconds(graphs, key, step.state.device) - plain.step(key.tokens)

    return _draft_cost(requests, seconds_of(1), seconds_of(limits.max_drafts), limits.max_drafts)


def _replay_seconds(graphs: StepGraphs, key: GraphKey, device: torch.device) -> float:
    with graphs.borrowed(key) as captured:
        return best_seconds(lambda: captured.replay(lambda: None), device)


def read_costs(step: DeviceStep) -> tuple[tuple[ReadCost, ...], float]:
    """Estimate the seconds that a step takes for each token of context that it attends to, and for the recurrent states
    of a request. Both are bytes divided by the measured speed of reading the page pool. Measured on a GPU only: on a
    CPU the tokens of the step itself cost far more."""
    data = step.pool.data
    if data.device.type != "cuda":
        return (), 0.0
    sample = data[: max(1, min(len(data), SAMPLE_BYTES // step.pool.layout.page_bytes))].view(torch.int16)
    seconds = best_seconds(lambda: sample.amax(), data.device) / (sample.numel() * sample.element_size())
    bytes_by_window: dict[int | None, int] = {}
    for group in step.groups:
        window, size = group.spec.visible_tokens, len(group.layers) * group.spec.token_bytes
        bytes_by_window[window] = bytes_by_window.get(window, 0) + size
    row_bytes = step.recurrent.num_bytes / step.recurrent.pending.shape[0]
    reading = tuple(ReadCost(window, size * seconds) for window, size in bytes_by_window.items())
    return reading, 2 * row_bytes * seconds


def step_seconds(step: DeviceStep, limits: Limits, graphs: StepGraphs | None, tokens: int, num_wanted: int,
                 repeats: int = REPEATS) -> float:
    """Measure a step with `tokens` token rows and a proposal of `num_wanted` drafts, and return the seconds of its
    fastest run. repeats: the number of runs of a step that is not captured."""
    requests, device = min(tokens, _most_measured(limits, graphs)), step.state.device
    if graphs is not None:
        tokens = -(-tokens // requests) * requests
        key = graphs.keys.shortened(GraphKey(requests, tokens, num_wanted, tokens > requests))
        return _replay_seconds(graphs, key, device)
    lens = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    batch = dead_batch(lens, max(lens) - 1, limits.max_len, num_pending=limits.max_drafts)
    shape, packed = pack_eager(batch, PaddedSize(requests, tokens))
    ints = to_device(packed, torch.int64, device)
    # Greedy: noise in plain torch is no small part of a step there, and the same with drafts and without.
    plan = StepPlan(StepNeeds(), StepExtras(), False, num_wanted)
    # Ranks must run equally many steps, whatever their clocks say.
    enough = float("inf") if device.type == "cuda" or step.ranks.count > 1 else ENOUGH_SECONDS
    return best_seconds(lambda: step.whole(shape, ints, plan), device, enough, repeats)


def best_seconds(run: Callable[[], object], device: torch.device, enough: float = float("inf"),
                 repeats: int = REPEATS) -> float:
    """Run `run` up to `repeats` times, until the runs have taken `enough` seconds in all, and return the seconds of the
    fastest run."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < enough:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def begin_replay(captured: CapturedStep) -> Callable[[], float]:
    """Begin a replay without waiting for it. The returned function waits for the end of the replay and returns the
    seconds that the device took."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    captured.replay(lambda: None)
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return seconds


def measure_times(step: DeviceStep, graphs: StepGraphs, largest: GraphKey, device_seconds: float) -> LossRates:
    """Measure how long the host takes to launch a small step, and return it with the device's time for each token.
    device_seconds: the device's time for the largest step."""
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
    times = LossRates(min(launches), device_seconds / largest.tokens)
    log.info("a step of %d tokens takes %.1f ms, its launches %.1f ms; from %.0f tokens on they take no extra time",
             largest.tokens, device_seconds * 1e3, times.launch_seconds * 1e3, times.least_own_tokens)
    return times
