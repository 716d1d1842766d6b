"""One step on the device: forward, finish (sample, accept, commit), draft. Fixed-shape tensor operations on row state.

Nothing in here waits for the device or reads it, so that the sequence can be captured and the host can run ahead. The
result stays on the device until `results.read_result` is asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.attention.base import AttentionLayer, Backend, BatchView, LayerCacheView
from outrider.cache.groups import Group
from outrider.cache.pool import DevicePool
from outrider.core import ScheduledBatch
from outrider.models.base import Hidden, Model
from outrider.runner.inputs import Inputs, PaddedSize, build_inputs
from outrider.runner.prompts import PromptLogprobs, prompt_logprobs
from outrider.runner.state import RowState
from outrider.sample.accept import Accepted, accept
from outrider.sample.batch import History
from outrider.sample.extras import StepExtras, StepNeeds
from outrider.sample.logprobs import LogprobRows
from outrider.sample.sampler import LogprobsMode, sample
from outrider.spec.base import Drafter, Step


@dataclass(frozen=True)
class DeviceResult:
    """A step's outcome as device tensors, over the padded requests."""

    counts: torch.Tensor  # [requests, 5] run length, finish, computed, drafted, accepted
    run: torch.Tensor  # [requests, most drafts + 1]
    logprobs: LogprobRows | None
    prompt_logprobs: PromptLogprobs | None


class CachedAttention:
    """What a model's layers call: finds the layer's part of the pool and its group's plan of this step."""

    def __init__(self, layers: dict[int, AttentionLayer], caches: dict[int, LayerCacheView], group_of: dict[int, int],
                 backend: Backend, view: BatchView, groups: tuple[Group, ...]) -> None:
        self._layers, self._caches, self._group_of, self._backend = layers, caches, group_of, backend
        self._plans = [backend.plan(view, group) for group in groups]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        plan = self._plans[self._group_of[layer]]
        return self._backend.run(self._layers[layer], self._caches[layer], q, k, v, plan)


class DeviceStep:
    """The model, its cache and its rows, and how one step advances them."""

    def __init__(self, model: Model, pool: DevicePool, state: RowState, backend: Backend, max_len: int, *,
                 drafter: Drafter | None = None, logprobs_mode: LogprobsMode = "raw") -> None:
        self.model = model
        self.pool = pool
        self.state = state
        self.backend = backend
        self.drafter = drafter
        self.groups = pool.layout.groups
        self._max_len = max_len
        self._logprobs_mode = logprobs_mode
        self._layers = {layer.index: layer for layer in model.attention_layers}
        self._caches = {index: LayerCacheView(*pool.layer(index)) for index in self._layers}
        self._group_of = {index: pool.layout.places[index][0] for index in self._layers}

    def apply_host_writes(self, scheduled: ScheduledBatch) -> None:
        """Everything the host tells the device, before the step begins."""
        if scheduled.clear_pages:
            pages = torch.tensor(scheduled.clear_pages, dtype=torch.int64)
            self.pool.clear(pages.to(self.state.device, non_blocking=True))
        self.state.admit(scheduled.admissions)
        self.state.write_pages(scheduled.page_writes)

    def run(self, scheduled: ScheduledBatch, padded: PaddedSize | None = None) -> DeviceResult:
        inputs = build_inputs(scheduled, self.state, self.groups, self._max_len, padded)
        hidden = self.forward(inputs.batch.padded)
        logprobs, accepted = self.finish(scheduled, inputs, hidden)
        prompts = prompt_logprobs(self.model, scheduled, inputs, hidden, self.state)
        computed = self.commit(inputs, accepted)
        if self.drafter is not None:
            self.draft(self.drafter, scheduled, inputs, hidden, accepted)
        counts = torch.stack(
            [accepted.run_len, accepted.finish, computed, inputs.num_drafts, accepted.num_accepted], dim=1
        )
        return DeviceResult(counts, accepted.run, logprobs, prompts)

    def forward(self, view: BatchView) -> Hidden:
        attend = CachedAttention(self._layers, self._caches, self._group_of, self.backend, view, self.groups)
        taps = () if self.drafter is None else self.drafter.taps
        return self.model.forward(view.token_ids, view.positions, attend, taps)

    def finish(self, scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden) -> tuple[LogprobRows | None, Accepted]:
        state, rows = self.state, inputs.batch.padded.rows
        logits = self.model.logits(hidden.final[inputs.logit_token_rows])
        counts = inputs.logit_rows.counts
        history = History(state.tokens, state.known, state.drafts, inputs.batch.padded.max_length.tokens)
        needs = StepNeeds.of(scheduled.params, counts)
        extras = StepExtras.of(scheduled.params, counts, logits.shape[1], state.device)
        sampled = sample(logits, inputs.logit_rows, state.sampling, history, needs, extras, logprobs=self._logprobs_mode)
        accepted = accept(sampled.tokens, inputs.logit_rows, inputs.drafts, inputs.num_drafts, inputs.samples,
                          state.known[rows], state.sampling, rows, bad=sampled.bad)
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

    def draft(self, drafter: Drafter, scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden,
              accepted: Accepted) -> None:
        if scheduled.propose == 0:
            return
        state, rows = self.state, inputs.batch.padded.rows
        step = Step(inputs.batch, hidden, accepted, inputs.num_known, state.tokens, state.known, scheduled.propose)
        drafts = drafter.propose(step)
        columns = torch.arange(drafts.tokens.shape[1], device=rows.device)
        state.drafts.index_put_((rows[:, None], columns), drafts.tokens)
        guesses = (accepted.run_len > 0) & state.alive[rows]
        state.num_drafts.index_copy_(0, rows, torch.where(guesses, drafts.counts, 0))
