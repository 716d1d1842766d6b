"""One step on the device: forward, finish (sample, accept, commit), draft. Fixed-shape tensor operations on row state.

No function here waits for the device or reads it, so that a step can be captured and the host can queue further steps.
The result stays on the device until `results.read_result` is asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from outrider.core import NO_ADMISSION, DeltaReach, SamplingParams, ScheduledBatch, StepForm, StepPart
from outrider.core.lazy_exports import LateModule
from outrider.drafters.base import Drafter, HiddenReads, Step
from outrider.drafters.guard import DrafterGuards
from outrider.kernels import ops
from outrider.kernels.buffers import to_device
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.kernels.step import CommittedStep, VerifiedStep
from outrider.layers import NO_DELTAS, DeltaSource, RowDeltas, StepContext, TokenHistory
from outrider.mixers import (
    BatchView,
    CachedLayers,
    ExtraKeys,
    NoRecurrentStep,
    RecurrentRows,
    RecurrentStep,
    WantedRows,
)
from outrider.mixers.paged.backend import Backend
from outrider.mixers.pool import DevicePool
from outrider.models.base import Hidden, Model
from outrider.runner.batch import (
    CapturedShape,
    Inputs,
    PackedBatch,
    PaddedSize,
    StepShape,
    build_inputs,
    dead_first_rows,
    first_token_rows,
    logit_view,
    pack_eager,
    shares_drafts,
)
from outrider.runner.clock import NO_CLOCK, NoClock
from outrider.runner.host_turn import HostTurn, HostTurns
from outrider.runner.logits_part import LogitsPart
from outrider.runner.plan import (
    CheckpointPlan,
    ListedCheckpoints,
    NoCheckpoints,
    RowCheckpoints,
    StepPlan,
    StepPlanner,
    make_ropes,
)
from outrider.runner.row_state import RowState
from outrider.runner.worker_ranks import ONE_RANK, WorkerRanks
from outrider.sample import History, LogprobRows
from outrider.sample.sampler import LogprobsMode, sample, sample_chunk

if TYPE_CHECKING:
    from outrider.runner import prompt_reports
else:
    prompt_reports = LateModule("outrider.runner.prompt_reports")


@dataclass(frozen=True)
class DeviceResult:
    """The outcome of a step as device tensors, padded to the step's number of requests."""

    counts: torch.Tensor  # [requests, NUM_COUNTS] columns as in kernels/step.py
    run: torch.Tensor  # [requests, max drafts + 1]
    logprobs: LogprobRows | None
    prompt_logprobs: prompt_reports.PromptLogprobs | None
    checkpoints: CheckpointPlan
    written: torch.Tensor  # bool, which checkpoints were: [requests] of row checkpoints, [checkpoints] of listed ones
    folded: torch.Tensor  # [folds] bool, which of the rows that ended reached their checkpoint
    params: Sequence[SamplingParams] = ()  # those of the scheduled requests, if any reports log-probabilities
    hidden: prompt_reports.HiddenRows | None = None
    drafting: DrafterGuards | None = None  # the drafters whose faults the counts report
    shares_drafts: bool = False  # counts of drafts may be the device's: those of a batch that has a `DraftSharing`
    failures: Mapping[int, str] = field(default_factory=dict)  # of edited logits, by the scheduled request's index


@dataclass(frozen=True)
class ForwardHalf:
    """The results of the forward half of a step that the finish half needs. All tensors stay on the device."""

    inputs: Inputs
    recurrent: RecurrentStep | NoRecurrentStep
    hidden: Hidden


class DeviceStep:
    """Runs a model's steps on a device. It holds the model, its cache and its rows, and each step advances the rows."""

    def __init__(self, model: Model, pool: DevicePool, state: RowState, backend: Backend, max_len: int, *,
                 recurrent: RecurrentRows, drafter: Drafter | None, drafting: DrafterGuards,
                 logprobs_mode: LogprobsMode, exact: bool, ranks: WorkerRanks = ONE_RANK) -> None:
        self.model = model
        self.pool = pool
        self.state = state
        self.recurrent = recurrent
        self.backend = backend
        self.ranks = ranks
        self.drafter = drafter  # its layers and sizes; steps call it through `drafting` alone
        self.drafting = drafting
        self.drafting.bind([state.tokens, state.known, *state.sampling.tensors()], state.limits, state.device,
                           partial(first_token_rows, state))
        self.deltas: DeltaSource = NO_DELTAS
        self._parts: tuple[StepPart, ...] = (drafting,)
        if model.has_component_ropes:
            self._ropes = make_ropes(state)
            self._parts = (self._ropes, drafting)
        self.turns = HostTurns(runs_ahead=state.device.type == "cuda")
        self.groups = pool.layout.groups
        self.max_len = max_len
        self._logprobs_mode = logprobs_mode
        self._exact = exact
        self._samples_row_by_row = exact and not self.has_sampler_kernels  # then a library samples, and reports
        self.cached = CachedLayers(model.attention_layers, pool, backend, exact=exact)
        self._folded = recurrent.nothing  # whether each row that the last host writes folded reached its checkpoint
        self.planner = StepPlanner(state, recurrent, partial(_has_sampler_kernels, model.dtype, state.device),
                                   lambda rows: self.deltas.reach if self.deltas.serves(rows) else DeltaReach.NOTHING)
        self.clock: NoClock = NO_CLOCK  # times the parts of the running step

    @property
    def has_sampler_kernels(self) -> bool:
        """Whether a kernel samples for all sampling parameters and reads them from the row state."""
        return _has_sampler_kernels(self.model.dtype, self.state.device)

    def add_part(self, part: StepPart) -> None:
        """Add a feature's code to the steps. Parts are called in the order in which they were added."""
        self._parts = (*self._parts, part)

    def take_turns(self, part: HostTurn) -> None:
        """Let a feature act on the host between the halves of split steps. Its part is called before all others, so its
        drafts are stored before those of drafters are used."""
        self.turns.add(part)
        self._parts = (part, *self._parts)

    def edit_logits(self, part: LogitsPart) -> None:
        """Let a feature edit the logits of every step. Only one feature may do so."""
        self.planner.take_edits(part)
        self.add_part(part)

    def take_deltas(self, source: DeltaSource) -> None:
        """Let a feature give rows their deltas (low-rank changes of the weights). Only one feature may do so."""
        if self.deltas is not NO_DELTAS:
            raise ValueError("two features give requests low-rank changes of the weights "
                             f"({type(self.deltas).__name__}, {type(source).__name__}), and only one may: start the "
                             "engine without one of them")
        self.deltas = source
        self.add_part(source)

    def host_turn(self, batch: ScheduledBatch) -> None:
        """Let the features act on the host between the two halves of a split step."""
        self.state.sampling.masks.begin_step()
        self.turns.take(batch, self.clock)

    @property
    def fills_drafts(self) -> bool:
        """Whether a request that got fewer drafts than it wanted is filled up with drafts of token 0."""
        return False

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget the state of all rows, because it is unknown after a failed step."""
        self.state.reset()
        self.recurrent.reset()
        for part in self._parts:
            part.reset()

    def close(self) -> None:
        """Free the memory of the features' parts. No step may run afterwards."""
        for part in self._parts:
            part.close()

    def apply_host_writes(self, scheduled: ScheduledBatch) -> None:
        """Write the host's decisions for this step to the device, before the step begins: admissions, pages and host
        drafts."""
        for part in self._parts:
            part.begin(scheduled)
        self._folded = self.recurrent.fold(scheduled.cache.folds, self.state.computed)  # their rows may be taken below
        self.pool.apply(scheduled.cache.pages)
        self.state.admit(scheduled.admissions)
        self.recurrent.admit(scheduled.admissions)
        self.recurrent.give_pages(scheduled.cache.checkpoints)
        for part in self._parts:
            part.admit(scheduled.admissions)
        self.state.take_host_drafts(scheduled.drafting.from_host)
        self.state.write_pages(scheduled.cache.pages.table_writes)  # last for the rows: see RowState.admit
        for part in self._parts:
            part.prepare(scheduled)

    @torch.inference_mode()
    def load_filling(self, count: int) -> None:
        """Load the kernels that fill the drafter's cache slots for `count` admitted rows, by running them with dead
        rows."""
        self.drafting.load_filling([NO_ADMISSION] * count, dead_first_rows(self.state))

    def _deltas_of(self, view: BatchView, reach: DeltaReach) -> RowDeltas | None:
        return self.deltas.of_step(view.rows, view.request_of).within(reach) if reach else None

    def _history_of(self, view: BatchView) -> TokenHistory:
        index = torch.arange(view.num_tokens, device=view.token_ids.device)
        return TokenHistory(self.state.tokens, view.rows[view.request_of], index - view.query_starts[view.request_of])

    def pack(self, scheduled: ScheduledBatch, padded: PaddedSize | None = None) -> PackedBatch:
        """Pack a batch for `run`. This reads no row, so a batch may be packed while earlier steps run."""
        shape, ints = pack_eager(scheduled, padded or PaddedSize(scheduled.num_requests, scheduled.num_tokens))
        return PackedBatch(shape, to_device(ints, torch.int64, self.state.device))

    def run(self, scheduled: ScheduledBatch, packed: PackedBatch) -> DeviceResult:
        if not scheduled.num_requests:  # there were only rows to fold
            nothing = torch.zeros(0, 0, dtype=torch.int64)
            return DeviceResult(nothing, nothing, None, None, NoCheckpoints(), self.recurrent.nothing, self._folded,
                                drafting=self.drafting)
        plan = self.planner.plan(scheduled, packed.shape)
        half = self.forward_half(packed.shape, packed.ints, plan)
        self.clock.lap("forward")
        if scheduled.mode.form is StepForm.SPLIT:
            self.host_turn(scheduled)
        # Before drafters, which may write to the hidden states.
        params, prompts, hidden = self.state.params, None, None
        if params.report_prompts(scheduled):
            prompts = prompt_reports.prompt_logprobs(self.model, scheduled, half.inputs, half.hidden, self.state,
                                                     row_by_row=self._samples_row_by_row)
        if params.hidden_of(scheduled.rows):
            hidden = prompt_reports.reported_hidden(self.model, scheduled, half.inputs, half.hidden, params,
                                                    exact=self._exact)
        result = self.finish_half(half, plan)
        # Kept with the result: the rows may have other owners when it is read.
        return replace(result, prompt_logprobs=prompts, folded=self._folded, hidden=hidden, failures=plan.failures,
                       params=params.reported(scheduled.rows))

    # The parts that can be captured, in one graph or in two: no host data but the shape and the plan

    def forward_half(self, shape: StepShape, ints: torch.Tensor, plan: StepPlan) -> ForwardHalf:
        inputs = build_inputs(shape, ints, self.state, self.groups, self.max_len)
        view, targets = inputs.batch.padded, None
        match plan.checkpoints:
            case RowCheckpoints():
                targets = self.recurrent.row_targets(view.rows, inputs.boundaries)
            case ListedCheckpoints(listed):
                targets = listed
        recurrent = self.recurrent.begin(view, inputs.computed_before, inputs.num_known, inputs.num_drafts,
                                         known=shape.known, max_drafts=shape.max_drafts, max_pending=shape.max_pending,
                                         targets=targets)
        if isinstance(plan.additions.extra_keys, ExtraKeys):  # for the target alone: drafters see what lies before
            view = replace(view, extra_keys=plan.additions.extra_keys)
        rows = None
        if self._needs_only_logit_rows(shape):
            rows = WantedRows(inputs.logit_token_rows, lambda: self.cached.bind_rows(logit_view(inputs)))
        return ForwardHalf(inputs, recurrent, self.forward(view, plan, recurrent, rows))

    def _needs_only_logit_rows(self, shape: StepShape) -> bool:
        """Whether only the hidden states that make logits are needed after the last layer. A step with an `EagerShape`
        needs all hidden states, since it may report log-probabilities of prompts."""
        reads_all = self.drafting.reads_hidden is HiddenReads.ALL
        return isinstance(shape, CapturedShape) and not shape.logit_rows_are_tokens and not reads_all

    def finish_half(self, half: ForwardHalf, plan: StepPlan) -> DeviceResult:
        """Sample, accept drafts, commit the tokens, and propose the next drafts."""
        inputs, hidden = half.inputs, half.hidden
        logprobs, committed = self.finish(inputs, hidden, plan)
        written = self.recurrent.commit(half.recurrent, committed.accepted.num_accepted)
        self.clock.lap("finish")
        run = committed.accepted.run
        if self.drafting:
            (run,) = self.drafting.keep([run])
            self.draft(inputs, hidden, committed, plan)
            self.clock.lap("draft")
        return DeviceResult(committed.counts, run, logprobs, None, plan.checkpoints, written, self.recurrent.nothing,
                            drafting=self.drafting, shares_drafts=shares_drafts(inputs.shape))

    def whole(self, shape: StepShape, ints: torch.Tensor, plan: StepPlan) -> DeviceResult:
        """Run both halves of a step, one after the other."""
        return self.finish_half(self.forward_half(shape, ints, plan), plan)

    def forward(self, view: BatchView, plan: StepPlan, recurrent: RecurrentStep | NoRecurrentStep,
                rows: WantedRows | None = None) -> Hidden:
        """Run the model. rows: the token rows whose hidden states are wanted, all of them by default."""
        bound = self.cached.bind(view, recurrent.bind())
        given = plan.additions
        rope, components = (self._ropes.of_step(view, given.rope_rows) if self.model.has_component_ropes
                            else (view.positions, None))
        context = StepContext(bound, view.positions, rope_positions=rope, rope_components=components,
                              given_rows=given.given_rows, deltas=self._deltas_of(view, given.deltas),
                              history=self._history_of(view) if self.model.reads_history else None)
        return self.model.forward(view.token_ids, context, self.drafting.aux_layers_for(plan.num_wanted), rows)

    def finish(self, inputs: Inputs, hidden: Hidden, plan: StepPlan) -> tuple[LogprobRows | None, CommittedStep]:
        state, logit_rows = self.state, inputs.logit_rows
        context = hidden.context.of_rows(WantedRows(inputs.logit_token_rows))
        if inputs.shape.logit_rows_are_tokens:
            logits = self.model.logits(hidden.final[: inputs.shape.logit_rows], context)
        else:
            logits = self.model.logits(hidden.final_of(inputs.logit_token_rows), context)
        history = History(state.tokens, state.known, state.drafts, inputs.batch.padded.max_length.tokens)
        sampled = sample(logits, logit_rows, state.sampling, history, plan.needs, plan.extras,
                         logprobs=self._logprobs_mode, row_by_row=self._samples_row_by_row)
        tokens, bad = sampled.tokens, sampled.bad
        if plan.needs.is_edited and self.ranks.count > 1:
            # An editor may differ from rank to rank, or fail on one alone: rank 0's tokens count.
            packed = torch.stack([tokens, bad.to(tokens.dtype)], 1)
            tokens, bad = self.ranks.integers_of_rank_0(packed).unbind(1)
            bad = bad.bool()
        committed = self.commit(inputs, tokens, bad)
        if plan.needs.any_penalties:
            accepted = committed.accepted
            state.sampling.counts.add_runs(inputs.batch.padded.rows, accepted.run, accepted.run_len)
        return sampled.logprobs, committed

    def commit(self, inputs: Inputs, tokens: torch.Tensor, bad: torch.Tensor) -> CommittedStep:
        """Accept the drafts that equal the sampled tokens. The accepted drafts and the token after them become known
        tokens, and the accepted drafts count as computed."""
        verified = VerifiedStep(inputs.batch.padded.rows, inputs.num_known, inputs.num_drafts, inputs.samples,
                                inputs.first_logit, inputs.drafts)
        return ops.commit_step(tokens, bad, verified, self.state)

    def draft(self, inputs: Inputs, hidden: Hidden, committed: CommittedStep, plan: StepPlan) -> None:
        state = self.state
        rows, goes_on = self.drafting.keep([inputs.batch.padded.rows, committed.goes_on])
        tokens, known, *keys = map(self.drafting.lend, (state.tokens, state.known, *state.sampling.keys))
        step = Step(inputs.batch, hidden, committed.accepted, inputs.computed_before, committed.num_computed,
                    committed.goes_on, tokens, known, SamplingKeys(*keys), plan.any_sampled, plan.num_wanted,
                    inputs.first_logit, plan.additions.drafter_given_rows)
        if plan.num_wanted == 0:
            self.drafting.skip(step)
            return
        proposals = self.drafting.propose(step)
        if proposals is None:  # the commit has cleared the rows' drafts
            return
        ops.store_drafts(rows, proposals, goes_on, self.drafting.is_on, vocab_size=self.model.vocab_size,
                         fills=self.fills_drafts, drafts=state.drafts, num_drafts=state.num_drafts,
                         levels=state.levels, counts=committed.counts)


def _has_sampler_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    logits = torch.float64 if dtype == torch.float64 else torch.float32
    return sample_chunk.serves(torch.empty(0, dtype=logits, device=device))
