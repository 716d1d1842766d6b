"""Drafters that draft token by token with a network: draft models, and heads that consume the target's hidden states.

Slot p is the place in the drafter's cache for position p of the text. Its content is a function of tokens up to p: a
draft model computes token p there, a head token p with the target's hidden state of p - 1 (slot 0 stays unwritten). So
a page's hash identifies the drafter's content too, and drafter and target share pages.

    target computed in this step     c   c+1  ...  c+m-1
    the drafter then fills slot         c+1  ...  c+m-1   c+m      (c+m is the last known token)
    and proposes from slot c+m, then drafts at c+m+1, c+m+2, ...

After an admission, slot c is missing too. It is filled first, with the hidden state that was stored with the last page
of the prefix hit. Slots before `valid_from[row]` were never filled (the drafter skipped a step) or have been evicted
(only the target's pages decide on a hit), and are not attended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from outrider.cache.groups import LayerCache
from outrider.cache.kinds import Part
from outrider.core import Admission, Axis, Limits
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.batches import DraftingBatches, committed_requests, drafting_rows
from outrider.drafters.draw import draw_drafts
from outrider.drafters.native_chain import NativeChain
from outrider.drafters.view_of import ViewOf
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, to_device
from outrider.kernels.drafting import AdmittedRows, DrafterCacheState, DraftPasses, DraftSamplingKeys
from outrider.layers import GivenRows, LayeredModule, NothingAttends, StepContext
from outrider.mixers import AttentionLayer, BatchView, CachedLayers, WantedRows
from outrider.mixers.batch import MixedQueries
from outrider.models.base import Hidden


class DraftNetwork(Protocol):
    """The network of a drafter: a whole model, or a head. It turns token rows into hidden states, and hidden states
    into logits over the drafter's vocabulary."""

    hidden_size: int  # size of the hidden states it consumes; 0 for a whole model
    num_outputs: int  # size of its vocabulary
    target_ids: torch.Tensor | None  # its tokens as the target's ids; None if they are the same
    attention_layers: list[AttentionLayer]
    follows_components: bool  # its rope rotates by the components of the target's positions

    def cache_layers(self) -> list[LayerCache]: ...

    def consume(self, hidden: Hidden) -> torch.Tensor | None:
        """Return the target's hidden states of a step's token rows, as `forward` takes them; None for a whole model."""

    def forward(self, tokens: torch.Tensor, hidden: Any, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the token rows of the context. hidden: the result of `consume`. Returns (the input of `logits`, the
        hidden states for the next draft), for these token rows or for all. May overwrite `hidden`, because sums are
        made in place."""

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor: ...

    def module(self) -> LayeredModule:
        """Return the model or head that the network runs."""

    def weight_bytes(self) -> int: ...


class NetworkDrafter(Drafter):
    """A drafter with a network. It samples drafts from the network's logits."""

    skip_reads_aux = False

    def __init__(self, name: str, network: DraftNetwork, max_drafts: int, aux_layers: tuple[int, ...] = ()) -> None:
        self.name, self.network, self.max_drafts, self.aux_layers = name, network, max_drafts, aux_layers
        self.attention_layers = tuple(network.attention_layers)

    def modules(self) -> list[LayeredModule]:
        return [self.network.module()]

    def cache_layers(self) -> list[LayerCache]:
        return self.network.cache_layers()

    def weight_bytes(self) -> int:
        return self.network.weight_bytes()

    def _draw(self, step: Step, keys: DraftSamplingKeys, hidden: torch.Tensor, index: int,
              drafts: torch.Tensor, levels: torch.Tensor) -> None:
        """Draw draft `index` of every request into drafts[index], and add its confidence level to levels [requests]."""
        context = StepContext(NothingAttends(), keys.positions[index])
        draw_drafts(self.network.logits(hidden, context), keys, index, target_ids=self.network.target_ids,
                    any_sampled=step.any_sampled, out=drafts[index], levels=levels)


class AutoregressiveDrafter(NetworkDrafter):
    """A drafter with a network that writes a cache slot for every token, drafts included."""

    _num_chained = 0  # slots from the first valid input to the first slot that is valid in every module

    def __init__(self, name: str, network: DraftNetwork, max_drafts: int, aux_layers: tuple[int, ...] = (),
                 max_positions: int | None = None) -> None:
        """max_positions: the longest text, in tokens, that the network can compute; longer texts get no drafts. None if
        the target sets the limit."""
        super().__init__(name, network, max_drafts, aux_layers)
        self._max_positions = max_positions
        self.lookahead = max_drafts
        self._is_head = network.hidden_size > 0  # else a whole model, which needs nothing but tokens
        self._first_position = 1 if self._is_head else 0  # a head has no slot for position 0
        self._tail_shape: tuple[int, ...] = (network.hidden_size,)

    def cache_layers(self) -> list[LayerCache]:
        """Return the cache of the drafter's layers. Each page also keeps "tail", the hidden states that the network
        consumes at the slot after the page's last one (size 0 for a whole model), and "valid": whether the drafter has
        filled all slots of the page."""
        first, *others = self._own_claims()
        dtype = self.network.module().dtype
        tail = Part("tail", self._tail_shape, dtype.itemsize, str(dtype).removeprefix("torch."))
        return [replace(first, page_parts=(tail, Part("valid", (), 1, "bool"))), *others]

    def _own_claims(self) -> list[LayerCache]:
        return self.network.cache_layers()

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        self._cached, self._device = cached, device
        self._batches = DraftingBatches(cached.groups, limits, device)
        parts = cached.page_parts(self._own_claims()[0].layer)
        # Tails lie with the pages of one group, a full one if there is one: a sliding group may lack a hit's last page.
        is_full = [index for index, group in enumerate(cached.groups) if group.spec.visible_tokens is None]
        self._state = DrafterCacheState(
            page_tokens=tuple(group.page_tokens for group in cached.groups), tail_group=(*is_full, 0)[0],
            first_position=self._first_position, max_len=min(limits.max_len, self._max_positions or limits.max_len),
            valid_from=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            filled=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            page_valid=parts["valid"],
        )
        self._tails = parts["tail"]
        self._chain: NativeChain | None = None  # all passes in one call, where that can be
        self._has_sought_chain = False
        self._admitted: list[Admission] = []

    def admit(self, admissions: list[Admission]) -> None:
        """Remember the rows whose first slot must be filled once their page tables are known. A head without a prefix
        hit has nothing to fill."""
        fresh = [a.row for a in admissions if self._is_head and a.computed == 0]
        self._admitted += [a for a in admissions if not self._is_head or a.computed]
        if fresh:
            rows = to_device(fresh, torch.int64, self._device)
            self._state.valid_from.index_fill_(0, rows, self._state.first_position)
            self._state.filled.index_fill_(0, rows, self._first_position)

    def reset(self) -> None:
        self._admitted = []

    def skip(self, step: Step) -> None:
        """Note that the drafter has not computed the tokens of this step. Its cache then has a gap, so pages completed
        now cannot serve a prefix hit."""
        ops.forget_pages(committed_requests(step), self._batches.tables(step.batch.padded), self._state)

    def propose(self, step: Step) -> Drafts:
        tables = self._batches.tables(step.batch.padded)
        requests, rows = committed_requests(step), drafting_rows(step)
        if self._chain is not None:
            proposed = self._chain.propose(step, requests, rows, tables[0], self._state)
            if proposed is not None:
                return proposed
        passes = ops.plan_draft_passes(requests, rows, tables, self._state, num_wanted=step.num_wanted)
        return self._propose_by_passes(step, passes)

    def _propose_by_passes(self, step: Step, passes: DraftPasses) -> Drafts:
        hidden = self.network.consume(step.hidden)
        if hidden is not None:  # before the forward, which may write into the hidden states
            self._tails.index_put_((passes.tail_page,), hidden)
        view = self._batches.first(step, passes)
        first, last = self._cached.bind(view), passes.keys.last
        if self._chain is None and not self._has_sought_chain:  # the layer is bound for the first time
            self._has_sought_chain = True
            layer = first.mixer(self.network.attention_layers[0].index)
            self._chain = NativeChain.try_build(self.network, layer, self._tails)
        target, shift = step.hidden.context, None
        context = StepContext(first, view.positions, given_rows=self._fitting(step.given_rows))
        if self.network.follows_components:
            shift = (target.rope_positions - target.positions)[last]  # of each request
            context = StepContext(first, view.positions, rope_positions=target.rope_positions + 1,
                                  rope_components=target.rope_components, given_rows=context.given_rows)
        if isinstance(view.queries, MixedQueries):  # only the caches need the other tokens of prompts
            rows = WantedRows(last, lambda: self._cached.bind_rows(self._batches.last_tokens(view, last)))
            output, feedback = self.network.forward(view.token_ids, hidden, context, rows)
        else:
            output, feedback = self.network.forward(view.token_ids, hidden, context)
            output, feedback = ops.take_rows(output, feedback, last)
        drafts, levels = torch.empty_like(passes.keys.positions), torch.empty_like(passes.keys.counts)
        self._draw(step, passes.keys, output, 0, drafts, levels)
        for index in range(1, step.num_wanted):
            view = self._batches.further(step, passes, index, drafts[index - 1])
            attend = self._cached.bind_after(first, passes.keys.last, view)
            rope = view.positions if shift is None else (view.positions + shift).clamp_min(0)
            context = StepContext(attend, view.positions, rope_positions=rope)
            output, feedback = self.network.forward(view.token_ids, feedback, context)
            self._draw(step, passes.keys, output, index, drafts, levels)
        return Drafts(drafts.t(), passes.keys.counts, levels)

    # Admission: the slot before the first one that a step fills

    def fill_slots(self, view_of: ViewOf, *, is_cold: bool) -> None:
        admitted, self._admitted = self._admitted, []
        if not admitted:
            return
        view, groups = view_of(admitted), self._batches.groups
        computed = [a.computed for a in admitted] + [0] * (view.num_requests - len(admitted))
        needed = to_device([[group.kind.first_needed(count) for count in computed] for group in groups], torch.int64,
                           self._device)
        planned = ops.plan_first_slots(AdmittedRows(view.rows, view.positions, view.live, needed),
                                       self._batches.tables(view), self._state, needs_tail=self._is_head,
                                       num_chained=self._num_chained, is_filled=not is_cold)
        if not is_cold:
            hidden = self._tails[planned.tail_page] if self._is_head else None
            given_rows = self._fitting(view_of.given_rows(admitted))
            components = view_of.components_before(admitted) if self.network.follows_components else None
            self._run_first_slot(self._batches.first_slots(view, planned), hidden, given_rows, components)

    def _fitting(self, given_rows: GivenRows | None) -> GivenRows | None:
        """Return the request's prompt embeddings, if they have the network's width. Otherwise return None, and the
        network embeds the token ids: a draft model's embeddings may have another width than the target's."""
        fits = given_rows is not None and given_rows.values.shape[1] == self.network.hidden_size
        return given_rows if fits else None

    def _run_first_slot(self, view: BatchView, hidden: torch.Tensor | None, given_rows: GivenRows | None,
                        components: torch.Tensor | None) -> None:
        """Run one token row for each row just admitted, which fills the slot that its steps will not fill. hidden: the
        hidden states that were stored with the page before that slot. components: the components of the position before
        the slot."""
        context = StepContext(self._cached.bind(view), view.positions, given_rows=given_rows,
                              rope_components=components)
        self.network.forward(view.token_ids, hidden, context)
