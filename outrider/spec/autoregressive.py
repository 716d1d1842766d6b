"""Drafters that run a model of their own, token by token: draft models and heads that consume hidden states.

The drafter's slot p is a function of tokens up to p: a draft model computes token p there, a head token p with the
target's hidden state of p - 1 (slot 0 stays unwritten). So its pages depend on what their hash says and are shared
with the target's.

    target computed in this step     c   c+1  ...  c+m-1
    the drafter then fills slot         c+1  ...  c+m-1   c+m      (c+m is the last known token)
    and proposes from slot c+m, then drafts at c+m+1, c+m+2, ...

After admission slot c itself is missing; it is filled first, with the hidden state that was stored with the hit's
last page. Slots before `valid_from[row]` were never filled (a step passed cold) or have been evicted (a hit is the
target's to decide), and are not attended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from outrider.cache.groups import Group, LayerCache
from outrider.core import NULL_PAGE, Admission, Axis, Limits
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, to_device
from outrider.layers.base import LayeredModule
from outrider.mixers.batch import BatchView
from outrider.mixers.cached import Attend, CachedLayers
from outrider.mixers.paged.base import AttentionLayer
from outrider.sample.philox import gumbel
from outrider.spec.base import Drafter, Drafts, Step
from outrider.spec.views import (
    Choosing,
    Filled,
    OneEach,
    Passes,
    PassRows,
    cells_of,
    draft_kernels,
    forget_pages,
    lay_out_passes,
)


class DraftNetwork(Protocol):
    """What drafts: a whole model, or a head. Token rows in, hidden states out, logits over its own vocabulary."""

    hidden_size: int  # of the hidden states it consumes; 0 for a whole model
    num_outputs: int  # of its vocabulary
    target_ids: torch.Tensor | None  # its tokens as the target's ids; None where they are the same
    attention_layers: list[AttentionLayer]

    def cache_layers(self) -> list[LayerCache]: ...

    def consume(self, step: Step) -> torch.Tensor | None:
        """The target's hidden states of the step's token rows in the form `forward` takes."""
        ...

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor | None,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows at slot positions. Returns (what `logits` takes, what the next draft consumes as hidden). May
        overwrite `hidden`, whose sums go on in place."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def module(self) -> LayeredModule:
        """The model or head that it runs."""
        ...

    def weight_bytes(self) -> int: ...


class AutoregressiveDrafter(Drafter):
    def __init__(self, name: str, network: DraftNetwork, max_drafts: int, taps: tuple[int, ...] = ()) -> None:
        self.name, self.network, self.max_drafts, self.taps = name, network, max_drafts, taps
        self.attention_layers = tuple(network.attention_layers)
        self.lookahead = max_drafts
        self._least = 1 if network.hidden_size else 0  # a head's slot 0 does not exist

    def modules(self) -> list[LayeredModule]:
        return [self.network.module()]

    def cache_layers(self) -> list[LayerCache]:
        return self.network.cache_layers()

    def weight_bytes(self) -> int:
        return self.network.weight_bytes()

    def page_bytes(self, itemsize: int) -> int:
        return self.network.hidden_size * itemsize

    def bind(self, cached: CachedLayers, limits: Limits, num_pages: int, device: torch.device) -> None:
        self._cached, self._device = cached, device
        self._one_each = OneEach(limits, device)
        # Tails lie with the pages of one group; a sliding one may not hold a hit's last page.
        is_full = [group for group in cached.groups if group.spec.visible_tokens is None]
        self._filled = Filled(
            groups=cached.groups, tail_group=(is_full or cached.groups)[0], least=self._least, max_len=limits.max_len,
            valid_from=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            filled=buffer(limits, Axis.ROWS, dtype=torch.int64, device=device),
            page_valid=torch.zeros(num_pages, dtype=torch.bool, device=device),
        )  # fmt: skip
        self._tails: torch.Tensor | None = None  # [pages, hidden] of each page's last token
        self._admitted: list[Admission] = []

    def admit(self, admissions: list[Admission]) -> None:
        """A head without a hit has nothing to fill before its first step; the others wait for its page tables."""
        fresh = [a.row for a in admissions if self._least and a.computed == 0]
        self._admitted += [a for a in admissions if not self._least or a.computed]
        if fresh:
            rows = to_device(fresh, torch.int64, self._device)
            for tensor in (self._filled.valid_from, self._filled.filled):
                tensor.index_fill_(0, rows, self._least)

    @property
    def is_settled(self) -> bool:
        return not self._admitted

    def skip(self, step: Step) -> None:
        """Cold: what the target computes now is missing here, and pages completed now are not valid for a hit."""
        self._settle_admissions(step, is_cold=True)
        forget_pages(step, self._filled)

    def propose(self, step: Step) -> Drafts:
        hidden = self.network.consume(step)
        if hidden is not None and self._tails is None:
            size = (self._filled.page_valid.shape[0], hidden.shape[1])
            self._tails = torch.zeros(size, dtype=hidden.dtype, device=self._device)
        self._settle_admissions(step, is_cold=False)
        passes = lay_out_passes(step, self._filled, self._one_each)
        if hidden is not None and self._tails is not None:  # before the forward, which may write into the hidden states
            self._tails.index_put_((passes.tail_page,), hidden)
        view = self._first_view(step, passes)
        output, feedback = self.network.forward(view.token_ids, view.positions, hidden, self._cached.bind(view))
        output, feedback = ops.take_rows(output, feedback, passes.choosing.last)
        drafts = torch.empty_like(passes.choosing.positions)
        self._choose(step, passes.choosing, output, 0, drafts)
        for index in range(1, step.most):
            view = self._next_view(step, passes, index, drafts[index - 1])
            output, feedback = self.network.forward(view.token_ids, view.positions, feedback, self._cached.bind(view))
            self._choose(step, passes.choosing, output, index, drafts)
        return Drafts(drafts.t(), passes.choosing.counts)

    # Views: the target's batch, moved to the drafter's slots

    def _first_view(self, step: Step, passes: Passes) -> BatchView:
        return self._moved(step.batch.padded, step, 1, passes.tokens, passes.first)

    def _next_view(self, step: Step, passes: Passes, index: int, tokens: torch.Tensor) -> BatchView:
        """One token per request: the draft before draft `index`. Requests that do not guess have any token."""
        return self._moved(self._one_each.of(step.batch.padded), step, 1 + index, tokens, passes.further[index - 1])

    def _moved(self, view: BatchView, step: Step, ahead: int, tokens: torch.Tensor, rows: PassRows) -> BatchView:
        """The view with other token rows; page tables stay the batch's own."""
        cells = list(view.token_slots)
        for group, own in zip(self._filled.groups, rows.cells, strict=True):
            cells[group.index] = own
        return replace(
            view, token_ids=tokens, token_slots=tuple(cells), **rows.in_view,
            int32_copies=(*view.int32_copies, *rows.int32_copies),
            max_length=step.batch.padded.max_length.after(ahead, self._filled.max_len),
        )  # fmt: skip

    # Choosing

    def _choose(self, step: Step, by: Choosing, hidden: torch.Tensor, index: int, drafts: torch.Tensor) -> None:
        """Into drafts[index] the likeliest tokens, or at a temperature those that the target's own noise favours."""
        logits, target_ids = self.network.logits(hidden), self.network.target_ids
        key = (by.seed, by.sample_index, by.positions[index])
        kernels = draft_kernels(logits.device) if logits.dtype == torch.float32 else None
        if kernels is not None:
            kernels.sample_logits(logits, by.temperature, *key, ids=target_ids, out=drafts[index])
            return
        if step.any_sampled:
            heat = by.temperature[:, None].to(logits.dtype)
            noise = gumbel(*key, target_ids, logits.shape[1], logits.dtype)
            logits = torch.where(heat > 0, logits / heat + noise, logits)
        best = logits.argmax(dim=1)
        drafts[index].copy_(best if target_ids is None else target_ids[best])

    # Admission: the slot before the first one that a step fills

    def _settle_admissions(self, step: Step, *, is_cold: bool) -> None:
        admitted, self._admitted = self._admitted, []
        if not admitted:
            return
        view, own = step.batch.padded, self._filled
        needed = [[group.kind.first_needed(a.computed) for a in admitted] for group in own.groups]
        rows, begin, *first_needed = to_device(
            [[a.row for a in admitted], [a.computed for a in admitted], *needed], torch.int64, self._device
        )
        request_of_row = torch.zeros_like(own.filled)
        request_of_row.index_copy_(0, view.rows, torch.arange(view.num_requests, device=self._device))
        requests = request_of_row[rows]
        valid_from = torch.full_like(begin, self._least)
        for group, first in zip(own.groups, first_needed, strict=True):
            valid_from = torch.maximum(valid_from, self._valid_in_hit(view, group, requests, begin, first))
        tail_page = self._tail_page(view, requests, begin)
        # A head cannot fill the first slot without the hidden state before it.
        can_fill = ((tail_page != NULL_PAGE) & own.page_valid[tail_page]) if self._least else (begin >= 0)
        valid_from = torch.where(can_fill | (begin == 0), valid_from, begin + 1)
        own.valid_from.index_copy_(0, rows, valid_from)
        own.filled.index_copy_(0, rows, begin)
        if not is_cold:
            self._fill_first_slot(step, requests, rows, begin, can_fill, tail_page)

    def _valid_in_hit(self, view: BatchView, group: Group, requests: torch.Tensor, begin: torch.Tensor,
                      first_needed: torch.Tensor) -> torch.Tensor:
        """[requests] the slot after the last one of the hit that this drafter did not fill or that was evicted. Pages
        that have left a window are not missed; a hit within a page of this group leaves that page's slots missing."""
        table = view.page_tables[group.index][requests].long()
        columns = torch.arange(table.shape[1], device=self._device)
        in_hit = (columns >= first_needed[:, None]) & (columns < (begin // group.page_tokens)[:, None])
        broken = in_hit & ((table == NULL_PAGE) | ~self._filled.page_valid[table])
        after = torch.where(broken, columns + 1, 0).amax(dim=1) * group.page_tokens
        return torch.where(begin % group.page_tokens == 0, after, begin)

    def _tail_page(self, view: BatchView, requests: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """[requests] the page with the hidden state of token begin - 1; the null page where there is none."""
        group = self._filled.tail_group
        column = (begin // group.page_tokens - 1).clamp_min(0)
        page = view.page_tables[group.index][requests, column].long()
        return torch.where((begin > 0) & (begin % group.page_tokens == 0), page, NULL_PAGE)

    def _fill_first_slot(self, step: Step, requests: torch.Tensor, rows: torch.Tensor, begin: torch.Tensor,
                         is_live: torch.Tensor, tail_page: torch.Tensor) -> None:
        """Slot `begin` of rows just admitted. A head has nothing to put into slot 0."""
        batch, own = step.batch.padded, self._filled
        hidden = None if self._tails is None else self._tails[tail_page]
        single = self._one_each.of(replace(
            batch, num_requests=rows.shape[0], rows=rows,
            page_tables=tuple(table[requests] for table in batch.page_tables),
        ))  # fmt: skip
        tokens = torch.where(is_live, step.tokens[rows, begin], 0)
        cells = cells_of(single, own.groups, begin, is_live)
        alone = PassRows(begin, cells, torch.where(is_live, begin + 1, 0), is_live.long(), own.valid_from[rows])
        view = self._moved(single, step, 1, tokens, alone)
        self.network.forward(view.token_ids, view.positions, hidden, self._cached.bind(view))
        own.filled.index_copy_(0, rows, begin + 1)
