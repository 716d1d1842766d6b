"""Drafters that run a model of their own, token by token: draft models and heads that consume hidden states.

The drafter's slot p is a function of tokens up to p: a draft model computes token p there, a head token p with the
target's hidden state of p - 1 (slot 0 stays unwritten). So its pages depend on what their hash says and are shared
with the target's.

    target computed in this step     c   c+1  ...  c+m-1
    the drafter then fills slot         c+1  ...  c+m-1   c+m      (c+m is the last known token)
    and proposes from slot c+m, then drafts at c+m+1, c+m+2, ...

After admission slot c itself is missing; it is filled first, with the hidden state that was stored with the hit's
last page. Slots before `valid_from[row]` were never filled (a step passed cold) and are not attended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.attention.base import Attend, AttentionLayer, BatchView
from outrider.attention.cached import CachedLayers
from outrider.cache.groups import Group
from outrider.cache.spec import LayerCache, SlidingSpec
from outrider.core import NULL_PAGE, Admission, Axis, Limits
from outrider.kernels import ops
from outrider.kernels.buffers import buffer, to_device
from outrider.sample.philox import gumbel
from outrider.spec.base import Drafter, Drafts, Step


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

    def weight_bytes(self) -> int: ...


@dataclass(frozen=True)
class _PageEnds:
    """Per token row: the page whose last token it is."""

    page: torch.Tensor  # the null page where it is not
    first_slot: torch.Tensor
    row: torch.Tensor


class AutoregressiveDrafter(Drafter):
    def __init__(self, name: str, network: DraftNetwork, max_drafts: int, taps: tuple[int, ...] = ()) -> None:
        self.name, self.network, self.max_drafts, self.taps = name, network, max_drafts, taps
        self.attention_layers = tuple(network.attention_layers)
        self.lookahead = max_drafts
        self._least = 1 if network.hidden_size else 0  # a head's slot 0 does not exist

    def cache_layers(self) -> list[LayerCache]:
        return self.network.cache_layers()

    def weight_bytes(self) -> int:
        return self.network.weight_bytes()

    def bind(self, cached: CachedLayers, limits: Limits, num_pages: int, device: torch.device) -> None:
        self._cached, self._max_len, self._device = cached, limits.max_len, device
        self._valid_from = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)
        self._filled = buffer(limits, Axis.ROWS, dtype=torch.int64, device=device)  # slots before this are filled
        self._page_valid = torch.zeros(num_pages, dtype=torch.bool, device=device)
        self._tails: torch.Tensor | None = None  # [pages, hidden] of each page's last token
        self._num_pages = num_pages
        # Tails lie with the pages of one group; a sliding one may not hold a hit's last page.
        is_full = [group for group in cached.groups if not isinstance(group.spec, SlidingSpec)]
        self._tail_group = (is_full or cached.groups)[0]
        self._admitted: list[Admission] = []

    def admit(self, admissions: list[Admission]) -> None:
        self._admitted += admissions

    def skip(self, step: Step) -> None:
        """Cold: what the target computes now is missing here, and pages completed now are not valid for a hit."""
        self._settle_admissions(step, is_cold=True)
        for group in self._cached.groups:
            self._page_valid.index_fill_(0, self._page_ends(step, group).page, False)

    def propose(self, step: Step) -> Drafts:
        hidden = self.network.consume(step)
        if hidden is not None and self._tails is None:
            self._tails = torch.zeros(self._num_pages, hidden.shape[1], dtype=hidden.dtype, device=self._device)
        self._settle_admissions(step, is_cold=False)
        view = self._first_view(step)
        self._remember_pages(step, hidden)  # before the forward, which may write into the hidden states
        output, feedback = self.network.forward(view.token_ids, view.positions, hidden, self._cached.on(view))
        last = (view.query_starts[:-1] + view.live - 1).clamp_min(0)
        output, feedback = output[last], feedback[last]
        chosen = [self._choose(step, output, 0)]
        for index in range(1, step.most):
            view = self._next_view(step, index, chosen[-1])
            # Rows that have no room left run on a clamped slot and are cut by their count.
            output, feedback = self.network.forward(view.token_ids, view.positions, feedback, self._cached.on(view))
            chosen.append(self._choose(step, output, index))
        rows = step.batch.padded.rows
        room = (self._max_len - step.known[rows]).clamp_min(0)
        return Drafts(torch.stack(chosen, dim=1), room.clamp_max(step.most))

    # Views: the target's batch, moved to the drafter's slots

    def _first_view(self, step: Step) -> BatchView:
        view, rows = step.batch.padded, step.batch.padded.rows
        count = step.num_computed
        begin = step.computed_before + 1
        # A gap since the last fill (cold steps) leaves only what is filled from here on.
        gap = self._filled[rows] < begin
        valid = torch.where(gap, begin, self._valid_from[rows])
        self._valid_from.index_copy_(0, rows, torch.where(count > 0, valid, self._valid_from[rows]))
        self._filled.index_copy_(0, rows, torch.where(count > 0, begin + count, self._filled[rows]))
        offset = torch.arange(view.num_tokens, device=rows.device) - view.query_starts[view.request_of]
        is_live = offset < count[view.request_of]
        slots = (begin[view.request_of] + torch.minimum(offset, (count - 1).clamp_min(0)[view.request_of]))
        slots = slots.clamp_max(self._max_len - 1)
        tokens = torch.where(is_live, step.tokens[rows[view.request_of], slots], 0)
        lengths = torch.where(count > 0, begin + count, 0)
        return self._moved(view, step, 1, tokens, slots, is_live, lengths, count)

    def _next_view(self, step: Step, index: int, tokens: torch.Tensor) -> BatchView:
        """One token per request: draft `index` at the slot after the last."""
        batch, rows = step.batch.padded, step.batch.padded.rows
        slot = step.known[rows] - 1 + index
        is_live = step.guesses & (slot < self._max_len)
        slot = slot.clamp(0, self._max_len - 1)
        requests = torch.arange(batch.num_requests + 1, device=rows.device)
        single = replace(
            batch, num_tokens=batch.num_requests, query_lens=(1,) * batch.num_requests, query_starts=requests,
            request_of=requests[:-1],
        )  # fmt: skip
        live = is_live.long()
        lengths = torch.where(is_live, slot + 1, 0)
        return self._moved(single, step, 1 + index, torch.where(is_live, tokens, 0), slot, is_live, lengths, live)

    def _moved(self, view: BatchView, step: Step, ahead: int, tokens: torch.Tensor, slots: torch.Tensor,
               is_live: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor) -> BatchView:
        """The view with other token rows; page tables stay the batch's own."""
        cells = list(view.token_slots)
        for group in self._cached.groups:
            page = view.page_tables[group.index][view.request_of, slots // group.page_tokens].long()
            cells[group.index] = torch.where(is_live, page * group.page_tokens + slots % group.page_tokens, -1)
        return replace(
            view, token_ids=tokens, positions=slots, lengths=lengths, live=live, token_slots=tuple(cells),
            key_starts=self._valid_from[view.rows], max_length=step.batch.padded.max_length.after(ahead, self._max_len),
        )  # fmt: skip

    # Choosing

    def _choose(self, step: Step, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """The likeliest token, or at a temperature the one that the target's own noise favours."""
        logits, target_ids = self.network.logits(hidden), self.network.target_ids
        rows, sampling = step.batch.padded.rows, step.sampling
        temperature = sampling.temperature[rows]
        key = (sampling.seed[rows], sampling.sample_index[rows], step.known[rows] + index)
        if step.any_sampled:
            heat = temperature[:, None].to(logits.dtype)
            logits = torch.where(heat > 0, logits / heat.clamp_min(1e-6), logits)
        if target_ids is None or not step.any_sampled:
            best = ops.choose(logits, temperature if step.any_sampled else torch.zeros_like(temperature), *key)
            if best is not None:
                return best if target_ids is None else target_ids[best]
        if step.any_sampled:
            noise = gumbel(*key, target_ids, logits.shape[1], logits.dtype)
            logits = torch.where(temperature[:, None] > 0, logits + noise, logits)
        best = logits.argmax(dim=1)
        return best if target_ids is None else target_ids[best]

    # Pages: what a later hit finds

    def _page_ends(self, step: Step, group: Group) -> _PageEnds:
        view, size = step.batch.padded, group.page_tokens
        request = view.request_of
        offset = torch.arange(view.num_tokens, device=self._device) - view.query_starts[request]
        position = step.computed_before[request] + offset
        ends = (offset < step.num_computed[request]) & (position % size == size - 1)
        column = (position // size).clamp_max(view.page_tables[group.index].shape[1] - 1)
        page = view.page_tables[group.index][request, column].long()
        return _PageEnds(torch.where(ends, page, NULL_PAGE), column * size, view.rows[request])

    def _remember_pages(self, step: Step, hidden: torch.Tensor | None) -> None:
        """Every group's pages for themselves: a hit may join pages of several requests, evicted one by one."""
        for group in self._cached.groups:
            ends = self._page_ends(step, group)
            first = ends.first_slot.clamp_min(self._least)
            self._page_valid.index_put_((ends.page,), self._valid_from[ends.row] <= first)
            if group is self._tail_group and hidden is not None and self._tails is not None:
                self._tails.index_put_((ends.page,), hidden)

    # Admission: the slot before the first one that a step fills

    def _settle_admissions(self, step: Step, *, is_cold: bool) -> None:
        admitted, self._admitted = self._admitted, []
        if not admitted:
            return
        rows, begin = to_device([[a.row for a in admitted], [a.computed for a in admitted]], torch.int64, self._device)
        request_of_row = torch.zeros(self._valid_from.shape[0], dtype=torch.int64, device=self._device)
        view = step.batch.padded
        request_of_row.index_copy_(0, view.rows, torch.arange(view.num_requests, device=self._device))
        requests = request_of_row[rows]
        valid_from = torch.full_like(begin, self._least)
        for group in self._cached.groups:
            valid_from = torch.maximum(valid_from, self._valid_in_hit(view, group, requests, begin))
        tail_page = self._tail_page(view, requests, begin)
        # A head cannot fill the first slot without the hidden state before it.
        can_fill = ((begin > 0) & self._page_valid[tail_page]) if self._least else (begin >= 0)
        valid_from = torch.where(can_fill | (begin == 0), valid_from, begin + 1)
        self._valid_from.index_copy_(0, rows, valid_from)
        self._filled.index_copy_(0, rows, begin)
        if not is_cold:
            self._fill_first_slot(step, requests, rows, begin, can_fill, tail_page)

    def _valid_in_hit(self, view: BatchView, group: Group, requests: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """[requests] the slot after the last page of the hit that this drafter did not fill. Pages that have left a
        window are not missed."""
        table = view.page_tables[group.index][requests].long()
        columns = torch.arange(table.shape[1], device=self._device)
        in_hit = columns < (begin // group.page_tokens)[:, None]
        broken = in_hit & (table != NULL_PAGE) & ~self._page_valid[table]
        return torch.where(broken, columns + 1, 0).amax(dim=1) * group.page_tokens

    def _tail_page(self, view: BatchView, requests: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """[requests] the page with the hidden state of token begin - 1."""
        group = self._tail_group
        column = (begin // group.page_tokens - 1).clamp_min(0)
        return view.page_tables[group.index][requests, column].long()

    def _fill_first_slot(self, step: Step, requests: torch.Tensor, rows: torch.Tensor, begin: torch.Tensor,
                         is_live: torch.Tensor, tail_page: torch.Tensor) -> None:
        """Slot `begin` of rows just admitted. A head has nothing to put into slot 0."""
        batch, count = step.batch.padded, rows.shape[0]
        hidden = None if self._tails is None else self._tails[tail_page]
        starts = torch.arange(count + 1, device=self._device)
        single = replace(
            batch, num_requests=count, num_tokens=count, query_lens=(1,) * count, rows=rows, query_starts=starts,
            request_of=starts[:-1], page_tables=tuple(t[requests] for t in batch.page_tables),
        )  # fmt: skip
        tokens = torch.where(is_live, step.tokens[rows, begin], 0)
        lengths = torch.where(is_live, begin + 1, 0)
        view = self._moved(single, step, 1, tokens, begin, is_live, lengths, is_live.long())
        self.network.forward(view.token_ids, view.positions, hidden, self._cached.on(view))
        self._filled.index_copy_(0, rows, begin + 1)
