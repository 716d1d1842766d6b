"""Runs whole steps of dead tokens at start-up: to measure the memory of the largest step, and to compile kernels before
requests need them.

A dead token has the null row, so a step of dead tokens computes everything and changes nothing. The sizes that need
different kernels are listed here: long and short queries, few requests and several, short contexts and long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from outrider import layers
from outrider.core import NULL_ROW, Axis, Limits, ScheduledBatch
from outrider.core.lazy_exports import LateModule
from outrider.core.step_messages import CacheOrders, DeltaReach
from outrider.kernels import compiling
from outrider.kernels.buffers import to_device
from outrider.runner.batch import PaddedSize, pack_eager
from outrider.runner.graphs.sizes import GraphSizes
from outrider.runner.memory import MIB, StepMemory, enough_memory
from outrider.runner.plan import NoCheckpoints, RowAdditions, RowCheckpoints, StepPlan
from outrider.runner.step import DeviceStep
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.logprobs import KERNEL_MAX_LOGPROBS

if TYPE_CHECKING:
    from outrider.runner.graphs import captures
else:
    captures = LateModule("outrider.runner.graphs.captures")

GRAPH_MIB = 3  # memory of one captured step's nodes, as seen with some 400 kernels
LATER_GRAPHS = 100  # graphs captured after start-up that memory is planned for
LONG_QUERY = 40  # a prompt, in tiles
LONG_RUN = 160  # a prompt whose chunks recurrent layers compute side by side
FEW_REQUESTS, SEVERAL_REQUESTS, MANY_REQUESTS = 1, 3, 32
SHORT_CONTEXT = 48  # keys that no kernel splits
_LARGEST_WITHOUT_KERNELS = StepNeeds(any_sampled=True, any_top_p=True, any_top_p_alone=True)
ADVICE = "lower max_num_batched_tokens, max_num_seqs or max_model_len, or choose a smaller model"


def dead_batch(lens: list[int], drafts: int, bound: int, num_pending: int = 0) -> ScheduledBatch:
    """Make a batch of dead requests that all sample. `lens`: the number of tokens of each request; the last `drafts` of
    them are drafts. `bound`: the upper bound of every request's length."""
    count = len(lens)
    return ScheduledBatch(
        step=0, request_ids=[0] * count, epochs=[0] * count, rows=[NULL_ROW] * count,
        num_known=[max(1, n - drafts) for n in lens], num_drafts=[min(drafts, n - 1) for n in lens],
        samples=[True] * count, bounds=[bound] * count, cache=CacheOrders(num_pending=[num_pending] * count),
    )


@torch.inference_mode()
def run_dead(step: DeviceStep, lens: list[int], *, drafts: int = 0, num_wanted: int = 0, bound: int,
             needs: StepNeeds | None = None, saves: bool = False,
             deltas: DeltaReach = DeltaReach.NOTHING) -> None:
    """Run a step of dead tokens. saves: whether requests may write checkpoints. deltas: the parts of the model that row
    deltas (low-rank changes of the weights) may change."""
    shape, ints = pack_eager(dead_batch(lens, drafts, bound), PaddedSize(len(lens), sum(lens)))
    needs = needs or StepNeeds()
    checkpoints = RowCheckpoints() if saves else NoCheckpoints()
    plan = StepPlan(needs, StepExtras(), needs.any_sampled, num_wanted, checkpoints,
                    additions=RowAdditions(deltas=deltas))
    step.whole(shape, to_device(ints, torch.int64, step.state.device), plan)


def measure_step_memory(make_step: Callable[[], DeviceStep], limits: Limits, device: torch.device, *,
                        use_graphs: bool) -> StepMemory:
    """Measure the memory that steps take; it is measured on CUDA only. `make_step` makes a step with a pool of a page
    or two, which is dropped afterwards; the compiled kernels are kept."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    with enough_memory("a step of max_num_batched_tokens", ADVICE):
        step = make_step()
        state = torch.cuda.memory_reserved(device) - before
        most = compile_steps(step, limits, captures.StepGraphs(step, limits) if use_graphs else None)
        if step.backend.skips_collected:  # attention, which the backend skipped, takes memory too
            with step.model.one_layer_each():  # layers take memory one after the other
                most = run_largest(step, limits)
    activations = most - before - state
    kept = step.pool.num_bytes + step.recurrent.num_bytes  # counted elsewhere
    graphs = graph_bytes(limits, activations, has_prompts=step.recurrent.needs_no_counts) if use_graphs else 0
    later = step.state.sampling.later_bytes
    del step
    torch.cuda.empty_cache()
    return StepMemory(activations, max(0, state - kept), graphs, later)


@torch.inference_mode()
def compile_steps(step: DeviceStep, limits: Limits, graphs: captures.StepGraphs | None) -> int:
    """Begin to compile everything that steps of any kind launch: first the kernels that take longest, then those that
    captures wait for, in the order of the captures. Returns the bytes that `run_largest` found: a step whose launches
    are only collected allocates the same memory, so its kernels need not be ready."""
    with step.model.one_layer_each(), compiling.precompiling(step.state.device):
        prompt = min(LONG_QUERY, limits.max_batched_tokens, limits.max_len)
        run_dead(step, [prompt], num_wanted=limits.max_drafts, bound=limits.max_len)
        if graphs is not None:
            graphs.run_sizes()
        run_kinds(step, limits)
        step.load_filling(1)
        most = run_largest(step, limits)
        _count_nothing(step, limits)
        if graphs is not None:
            with compiling.postponing(step.state.device):
                graphs.run_sharing()
    return most


def _count_nothing(step: DeviceStep, limits: Limits) -> None:
    """Launch the kernel that adds tokens to the penalty counts, so that it is compiled: once with runs of one token and
    once with runs of the most tokens."""
    device, counts = step.state.device, step.state.sampling.counts
    for width in {1, 1 + limits.max_drafts}:
        row, run = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1,), (1, width)))
        counts.add_runs(row, run, row)


def run_largest(step: DeviceStep, limits: Limits) -> int:
    """Run the largest step. Returns the most bytes that torch had reserved on the device during the step."""
    device = step.state.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    lens, drafts = largest_step(limits)
    needs = _LARGEST_WITHOUT_KERNELS
    if step.has_sampler_kernels:
        needs = StepNeeds.everything(min(limits.max_logprobs, KERNEL_MAX_LOGPROBS))
    for deltas in {DeltaReach.NOTHING, step.deltas.possible_reach}:
        run_dead(step, lens, drafts=drafts, num_wanted=limits.max_drafts, bound=limits.max_len, needs=needs,
                 deltas=deltas)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device)


def largest_step(limits: Limits) -> tuple[list[int], int]:
    """Return the tokens of each request, and the drafts of each, in the largest step: all requests check all their
    drafts, and prompts fill the rest."""
    each = min(1 + limits.max_drafts, limits.max_batched_tokens, limits.max_len)
    count = max(1, min(limits.max_requests, limits.max_batched_tokens // each))
    left = limits.max_batched_tokens - count * each
    lens = []
    for _ in range(count):
        prompt = min(left, limits.max_len - each)
        lens.append(each + prompt)
        left -= prompt
    return lens, each - 1


def graph_bytes(limits: Limits, activations: int, *, has_prompts: bool) -> int:
    """Estimate the memory of captured steps: a shared pool as large as the largest step needs, and the nodes of each
    step's graph. has_prompts: whether steps with prompts are captured too."""
    sizes = GraphSizes.from_limits(limits)
    count = len(sizes.requests) * (2 if limits.max_drafts else 1) + len(sizes.unequal_when_idle(limits.max_drafts))
    if has_prompts:
        return activations + (count + LATER_GRAPHS) * GRAPH_MIB * MIB
    logits = limits.extent(Axis.LOGIT_ROWS)
    of_logits = min(activations, 2 * logits * limits.vocab_size * 4)
    share = min(1.0, logits / limits.max_batched_tokens)
    return int(of_logits + (activations - of_logits) * share) + count * GRAPH_MIB * MIB


def run_kinds(step: DeviceStep, limits: Limits) -> None:
    """Run steps of every kind that captures do not cover, so that no kernel is compiled while requests wait."""
    for lens, bound in _kinds(limits):
        for num_wanted in sorted({0, limits.max_drafts}):
            run_dead(step, lens, num_wanted=num_wanted, bound=bound)
    for lens in _expert_tiles(step, limits):
        run_dead(step, lens, num_wanted=limits.max_drafts, bound=limits.max_len)
    if step.recurrent.layers:
        _run_recurrent(step, limits)
    bound = min(SHORT_CONTEXT, limits.max_len)
    sampled = StepNeeds(any_sampled=True)
    for num_wanted in range(limits.max_drafts + 1):
        run_dead(step, [1], num_wanted=num_wanted, bound=bound, needs=sampled)


def _run_recurrent(step: DeviceStep, limits: Limits) -> None:
    """Run steps of few requests and of many, with runs of tokens that recurrent layers scan and runs that they do not,
    with and without checkpoints."""
    count, bound = min(MANY_REQUESTS, limits.max_requests), min(LONG_RUN, limits.max_len)
    longest = min(limits.max_batched_tokens, limits.max_len)
    for lens in ([1], [1] * count, [min(LONG_QUERY, longest)], [min(LONG_RUN, longest)]):
        for saves in {False, step.recurrent.takes_checkpoints}:
            run_dead(step, lens[: limits.max_batched_tokens], bound=bound, saves=saves)
    if step.recurrent.takes_checkpoints:
        step.recurrent.warm_up()


def _kinds(limits: Limits) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of each request, and the longest context, of steps that run different kernels. Steps with
    prompts come first, because their kernels take longest to compile."""
    fits = min(limits.max_batched_tokens, limits.max_len)
    contexts = sorted({min(SHORT_CONTEXT, limits.max_len), limits.max_len}, reverse=True)
    for bound in contexts:
        if fits >= LONG_QUERY:
            yield [LONG_QUERY], bound
        for count in sorted({min(num, limits.max_requests) for num in (FEW_REQUESTS, SEVERAL_REQUESTS, MANY_REQUESTS)}):
            for query in sorted({1, 1 + limits.max_drafts}):
                beside = min(count, limits.max_requests - 1)
                if LONG_QUERY + beside * query <= fits:
                    yield [LONG_QUERY] + [query] * beside, bound
                if count * query <= fits:
                    yield [query] * count, bound


def _expert_tiles(step: DeviceStep, limits: Limits) -> Iterator[list[int]]:
    """Yield the tokens of each request in steps that run different kernels of experts. The number of token rows chooses
    the kernel's tile."""
    if layers.find_modules([step.model, *([] if step.drafter is None else step.drafter.modules())], layers.Router):
        tokens = 1
        while tokens <= min(limits.max_batched_tokens, limits.max_requests * limits.max_len):
            whole, rest = divmod(tokens, limits.max_len)
            yield [limits.max_len] * whole + [rest] * (rest > 0)
            tokens *= 2
