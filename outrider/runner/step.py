"""One step on the device: forward, finish (sample, accept, commit), draft. Fixed-shape tensor operations on row state.

Nothing in here waits for the device or reads it, so that the sequence can be captured and the host can run ahead. The
result stays on the device until `results.read_result` is asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.attention.base import Backend, BatchView
from outrider.attention.cached import CachedLayers
from outrider.cache.pool import DevicePool
from outrider.core import ScheduledBatch
from outrider.kernels.buffers import to_device
from outrider.models.base import Hidden, Model
from outrider.runner.inputs import BatchShape, Inputs, PaddedSize, build_inputs, pack_host
from outrider.runner.prompts import PromptLogprobs, prompt_logprobs
from outrider.runner.state import RowState
from outrider.sample.accept import Accepted, accept
from outrider.sample.batch import History
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.logprobs import LogprobRows
from outrider.sample.sampler import LogprobsMode, sample
from outrider.spec.base import Drafter, Step
from outrider.spec.scripted import SyntheticAcceptance


@dataclass(frozen=True)
class StepPlan:
    """What the host decides about a step beside its shape."""

    needs: StepNeeds
    extras: StepExtras
    any_sampled: bool  # also for drafters
    propose: int


@dataclass(frozen=True)
class DeviceResult:
    """A step's outcome as device tensors, over the padded requests."""

    counts: torch.Tensor  # [requests, 6] run length, finish, computed, drafted, accepted, proposed
    run: torch.Tensor  # [requests, most drafts + 1]
    logprobs: LogprobRows | None
    prompt_logprobs: PromptLogprobs | None


class DeviceStep:
    """The model, its cache and its rows, and how one step advances them."""

    def __init__(self, model: Model, pool: DevicePool, state: RowState, backend: Backend, max_len: int, *,
                 drafter: Drafter | None = None, synthetic: SyntheticAcceptance | None = None,
                 logprobs_mode: LogprobsMode = "raw") -> None:
        self.model = model
        self.pool = pool
        self.state = state
        self.backend = backend
        self.drafter = drafter
        self.synthetic = synthetic
        self.groups = pool.layout.groups
        self.max_len = max_len
        self._logprobs_mode = logprobs_mode
        self._cached = CachedLayers(model.attention_layers, pool, backend)

    def apply_host_writes(self, scheduled: ScheduledBatch) -> None:
        """Everything the host tells the device, before the step begins."""
        if scheduled.clear_pages:
            self.pool.clear(to_device(scheduled.clear_pages, torch.int64, self.state.device))
        self.state.admit(scheduled.admissions)
        self.state.write_pages(scheduled.page_writes)
        self.state.take_host_drafts(scheduled.host_drafts)
        if self.drafter is not None:
            self.drafter.admit(scheduled.admissions)

    def plan(self, scheduled: ScheduledBatch, shape: BatchShape) -> StepPlan:
        counts = list(shape.logit_counts)
        needs = StepNeeds.of(scheduled.params, counts)
        extras = StepExtras.of(scheduled.params, counts, self.model.vocab_size, self.state.device)
        any_sampled = any(not params.is_greedy for params in scheduled.params)
        return StepPlan(needs, extras, any_sampled, scheduled.propose)

    def run(self, scheduled: ScheduledBatch, padded: PaddedSize | None = None) -> DeviceResult:
        shape, ints = pack_host(scheduled, padded)
        device_ints = to_device(ints, torch.int64, self.state.device)
        inputs, hidden, result = self.body(shape, device_ints, self.plan(scheduled, shape))
        prompts = prompt_logprobs(self.model, scheduled, inputs, hidden, self.state)
        return result if prompts is None else DeviceResult(result.counts, result.run, result.logprobs, prompts)

    def body(self, shape: BatchShape, ints: torch.Tensor, plan: StepPlan) -> tuple[Inputs, Hidden, DeviceResult]:
        """The part that can be captured: no host data but the shape and the plan."""
        inputs = build_inputs(shape, ints, self.state, self.groups, self.max_len)
        hidden = self.forward(inputs.batch.padded)
        logprobs, accepted = self.finish(inputs, hidden, plan)
        computed = self.commit(inputs, accepted)
        if self.drafter is not None:
            self.draft(self.drafter, inputs, hidden, accepted, computed, plan)
        counts = torch.stack([
            accepted.run_len, accepted.finish, computed, inputs.num_drafts, accepted.num_accepted,
            self.state.num_drafts[inputs.batch.padded.rows],
        ], dim=1)  # fmt: skip
        return inputs, hidden, DeviceResult(counts, accepted.run, logprobs, None)

    def forward(self, view: BatchView) -> Hidden:
        taps = () if self.drafter is None else self.drafter.taps
        return self.model.forward(view.token_ids, view.positions, self._cached.on(view), taps)

    def finish(self, inputs: Inputs, hidden: Hidden, plan: StepPlan) -> tuple[LogprobRows | None, Accepted]:
        state, rows, logit_rows = self.state, inputs.batch.padded.rows, inputs.logit_rows
        logits = self.model.logits(hidden.final[inputs.logit_token_rows])
        history = History(state.tokens, state.known, state.drafts, inputs.batch.padded.max_length.tokens)
        sampled = sample(logits, logit_rows, state.sampling, history, plan.needs, plan.extras,
                         logprobs=self._logprobs_mode)
        tokens = sampled.tokens
        if self.synthetic is not None:
            seed = state.sampling.seed[logit_rows.row]
            tokens = self.synthetic.apply(tokens, logit_rows, inputs.drafts, seed, logits.shape[1])
        accepted = accept(tokens, logit_rows, inputs.drafts, inputs.num_drafts, inputs.samples, state.known[rows],
                          state.sampling, rows, bad=sampled.bad)
        return sampled.logprobs, accepted

    def commit(self, inputs: Inputs, accepted: Accepted) -> torch.Tensor:
        """The run becomes known, its accepted part computed. Returns tokens computed [requests]."""
        state, rows = self.state, inputs.batch.padded.rows
        known = state.known[rows]
        index = torch.arange(accepted.run.shape[1], device=rows.device)
        columns = (known[:, None] + index).clamp_max(state.tokens.shape[1] - 1)
        # Cells beyond the run keep what they hold. Only the null row can be written twice, with what it holds.
        kept = state.tokens[rows[:, None], columns]
        values = torch.where(index < accepted.run_len[:, None], accepted.run, kept)
        state.tokens.index_put_((rows[:, None], columns), values)
        computed = inputs.num_known + accepted.num_accepted
        state.known.index_add_(0, rows, accepted.run_len)
        state.computed.index_add_(0, rows, computed)
        state.alive.index_copy_(0, rows, state.alive[rows] & (accepted.finish == 0))
        state.num_drafts.index_fill_(0, rows, 0)  # consumed, or stale
        return computed

    def draft(self, drafter: Drafter, inputs: Inputs, hidden: Hidden, accepted: Accepted, computed: torch.Tensor,
              plan: StepPlan) -> None:
        state, rows = self.state, inputs.batch.padded.rows
        guesses = (accepted.run_len > 0) & state.alive[rows]
        step = Step(inputs.batch, hidden, accepted, inputs.computed_before, computed, guesses, state.tokens, state.known,
                    state.sampling, plan.any_sampled, plan.propose)
        if plan.propose == 0:
            drafter.skip(step)
            return
        drafts = drafter.propose(step)
        columns = torch.arange(drafts.tokens.shape[1], device=rows.device)
        state.drafts.index_put_((rows[:, None], columns), drafts.tokens)
        state.num_drafts.index_copy_(0, rows, torch.where(guesses, drafts.counts, 0))
