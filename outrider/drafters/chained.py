"""ChainedDrafter: drafts with several multi-token-prediction modules. Module i makes draft i + 1.

Module 0 consumes the target's hidden states, every other module the output of the module before it, one slot earlier:

    slot p of module 0 = f(target's hidden state of p - 1, token p)
    slot p of module i = f(output of module i - 1 at slot p - 1, token p), which exists from slot i + 1 on

So slots depend on tokens up to p, as for one module. The first drafting pass runs all modules over the step's token
rows, which fills their caches with known tokens. Pass s runs module s at the token of draft s. It also runs the modules
after it, because their later passes attend to that slot. The last module makes all further drafts, each from its
previous output.

A row keeps the modules' outputs at its last filled slot, for its next step; a page keeps those at its last slot, for a
prefix hit. Where module 0 is valid from slot v on, module i is from v + i on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.cache.groups import LayerCache
from outrider.core import Axis, Limits
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafts, Step
from outrider.drafters.batches import committed_requests, drafting_rows
from outrider.kernels import ops
from outrider.kernels.drafting import DraftPasses
from outrider.layers import GivenRows, LayeredModule, StepContext
from outrider.mixers import BatchView, CachedLayers, KeysFrom
from outrider.models.mtp import MTPHead


class ChainedDrafter(AutoregressiveDrafter):
    def __init__(self, name: str, modules: Sequence[MTPHead], max_drafts: int) -> None:
        super().__init__(name, modules[0], max_drafts)
        self._modules = list(modules)
        self._last = self._num_chained = len(modules) - 1
        self._tail_shape = (len(modules), self.network.hidden_size)
        self.attention_layers = tuple(layer for module in modules for layer in module.attention_layers)

    def modules(self) -> list[LayeredModule]:
        return list(self._modules)

    def _own_claims(self) -> list[LayerCache]:
        return [layer for module in self._modules for layer in module.cache_layers()]

    def weight_bytes(self) -> int:
        return sum(module.weight_bytes() for module in self._modules)

    def bind(self, cached: CachedLayers, limits: Limits, device: torch.device) -> None:
        super().bind(cached, limits, device)
        self._state = replace(self._state, first_position=len(self._modules))  # from here on all modules have slots
        size, dtype = self.network.hidden_size, self._modules[0].dtype
        # The hidden states that each module but the first consumes at the next slot of a row.
        self._carried = torch.zeros(limits.extent(Axis.ROWS), self._last, size, dtype=dtype, device=device)

    def propose(self, step: Step) -> Drafts:
        hidden = self.network.consume(step.hidden)
        assert hidden is not None
        self._note_gaps(step)
        passes = ops.plan_draft_passes(committed_requests(step), drafting_rows(step),
                                       self._batches.tables(step.batch.padded), self._state, num_wanted=step.num_wanted)
        drafts, levels = torch.empty_like(passes.keys.positions), torch.empty_like(passes.keys.counts)
        latest = self._run_known(step, passes, hidden)
        self._draw(step, passes.keys, latest[0], 0, drafts, levels)
        for index in range(1, step.num_wanted):
            view = self._batches.further(step, passes, index, drafts[index - 1])
            own = min(index, self._last)
            before = latest
            for module in range(own, min(step.num_wanted, len(self._modules))):
                consumed = before[module] if index > self._last else before[module - 1]
                latest = {**latest, module: self._run(module, view, consumed)}
            self._draw(step, passes.keys, latest[own], index, drafts, levels)
        return Drafts(drafts.t(), passes.keys.counts, levels)

    def _run_known(self, step: Step, passes: DraftPasses, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Run all modules over the step's token rows. Returns the output of each module at the requests' last
        tokens."""
        view, latest = self._batches.first(step, passes), {}
        index = torch.arange(view.num_tokens, device=self._device)
        is_first = (index == view.query_starts[view.request_of])[:, None]
        carried = self._carried[view.rows]  # [requests, modules - 1, hidden]
        given_rows = self._fitting(step.given_rows)
        for module in range(len(self._modules)):
            # Before the forward, which may write into the hidden states.
            self._tails[:, module].index_put_((passes.tail_page,), hidden)
            output = self._run(module, view, hidden, given_rows)
            latest[module] = output[passes.keys.last]
            if module < self._last:
                hidden = torch.where(is_first, carried[view.request_of, module], output.roll(1, dims=0))
        kept = torch.stack([latest[module] for module in range(self._last)], dim=1)
        fills = (step.num_computed > 0)[:, None, None]
        self._carried.index_copy_(0, view.rows, torch.where(fills, kept, carried))
        return latest

    def _run_first_slot(self, view: BatchView, hidden: torch.Tensor | None, given_rows: GivenRows | None,
                        components: torch.Tensor | None) -> None:
        assert hidden is not None
        outputs = [self._run(module, view, hidden[:, module], given_rows) for module in range(len(self._modules))]
        self._carried.index_copy_(0, view.rows, torch.stack(outputs[:-1], dim=1))

    def _run(self, module: int, view: BatchView, hidden: torch.Tensor,
             given_rows: GivenRows | None = None) -> torch.Tensor:
        """Run one module over the token rows of a view. The view's keys begin at the slot from which all modules are
        valid; the module's own keys begin earlier."""
        assert isinstance(view.visible, KeysFrom)
        starts = view.visible.starts - (self._last - module)
        attend = self._cached.bind(replace(view, visible=KeysFrom(starts, starts.int())))
        # A module counts positions from its own first slot on.
        positions = (view.positions - module).clamp_min(0)
        context = StepContext(attend, positions, given_rows=given_rows)
        return self._modules[module].forward(view.token_ids, hidden, context)[1]

    def _note_gaps(self, step: Step) -> None:
        """Move the first valid slot of rows that have missed steps. Valid slots then begin with this step's tokens, one
        slot later for each further module."""
        at, begin, own = step.batch.padded.rows, step.computed_before + 1, self._state
        filled, valid_from = own.filled[at], own.valid_from[at]
        is_gap = (step.num_computed > 0) & (filled < begin)
        own.valid_from.index_copy_(0, at, torch.where(is_gap, begin + self._num_chained, valid_from))
        own.filled.index_copy_(0, at, torch.where(is_gap, begin, filled))
