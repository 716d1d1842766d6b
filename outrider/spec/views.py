"""Where a drafter's token rows lie: the batch of a committed step, moved to the slots of every drafting pass.

Slots, lengths and noise keys do not depend on what is drafted, so all passes of a proposal are laid out at once, before
the first: spelled out in torch here, in one launch on a GPU. What the passes compute is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from outrider.cache.groups import Group
from outrider.core import NULL_PAGE, Axis, Limits
from outrider.kernels import ops
from outrider.mixers.batch import BatchView
from outrider.spec.base import Step


@dataclass(frozen=True)
class Filled:
    """What a drafter has filled, of rows and of pages. The tensors move on with the steps."""

    groups: tuple[Group, ...]
    tail_group: Group  # whose pages keep hidden states
    least: int  # the first slot there is
    max_len: int
    valid_from: torch.Tensor  # [ROWS] slots before it were never filled
    filled: torch.Tensor  # [ROWS] slots before it are
    page_valid: torch.Tensor  # [pages] bool


@dataclass(frozen=True)
class PassRows:
    """One pass: its token rows, and what its requests see."""

    slots: torch.Tensor  # [tokens]
    cells: tuple[torch.Tensor, ...]  # per group of the drafter [tokens], -1 for dead token rows
    lengths: torch.Tensor  # [requests]
    live: torch.Tensor  # [requests]
    key_starts: torch.Tensor | None = None  # [requests]
    int32_copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # as in BatchView

    @property
    def in_view(self) -> dict[str, Any]:
        """What a view of the pass has in place of the batch's own, but for the cells."""
        return {"positions": self.slots, "lengths": self.lengths, "live": self.live, "key_starts": self.key_starts}


@dataclass(frozen=True)
class Choosing:
    """By what drafts are chosen and counted."""

    temperature: torch.Tensor  # [requests]
    seed: torch.Tensor  # [requests]
    sample_index: torch.Tensor  # [requests]
    positions: torch.Tensor  # [drafts, requests]
    counts: torch.Tensor  # [requests] drafts there is room for
    last: torch.Tensor  # [requests] token row of the last computed token


@dataclass(frozen=True)
class Passes:
    """All passes of a proposal. Further ones have one token row per request, and tokens that are not known yet."""

    choosing: Choosing
    tokens: torch.Tensor  # [tokens] of the first pass
    first: PassRows
    further: list[PassRows]
    tail_page: torch.Tensor  # [tokens] page of the tail group whose last token it is; the null page where none


class OneEach:
    """Views of one token per request, whose query starts are the same for every batch."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self._starts = torch.arange(limits.extent(Axis.STARTS), device=device)
        self._narrow = self._starts.int()

    def of(self, view: BatchView) -> BatchView:
        count = view.num_requests
        if count < len(self._starts):
            starts, narrow = self._starts[: count + 1], self._narrow[: count + 1]
        else:  # padded beyond what can run
            starts = torch.arange(count + 1, device=self._starts.device)
            narrow = starts.int()
        return replace(view, num_tokens=count, query_lens=(1,) * count, query_starts=starts, request_of=starts[:-1],
                       int32_copies=((starts, narrow),), longest_short=None)


def draft_kernels(device: torch.device) -> ModuleType | None:
    """Kernels that lay out a proposal in one launch."""
    if device.type != "cuda" or ops.triton_kernels() is None:
        return None
    from outrider.kernels.triton import draft

    return draft


def cells_of(view: BatchView, groups: tuple[Group, ...], slots: torch.Tensor,
             is_live: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Per group the cells of slots [..., tokens]; page tables are the batch's own."""
    cells = []
    for group in groups:
        page = view.page_tables[group.index][view.request_of, slots // group.page_tokens].long()
        cells.append(torch.where(is_live, page * group.page_tokens + slots % group.page_tokens, -1))
    return tuple(cells)


def lay_out_passes(step: Step, own: Filled, one_each: OneEach) -> Passes:
    """Moves `own` on: rows by what the first pass fills, and pages whose last token the step computed."""
    kernels = draft_kernels(own.filled.device)
    if kernels is not None:
        return _passes_by(kernels, step, own)
    view, rows = step.batch.padded, step.batch.padded.rows
    count, begin = step.num_computed, step.computed_before + 1
    fills, filled, valid = count > 0, own.filled[rows], own.valid_from[rows]
    # A gap since the last fill (cold steps) leaves only what is filled from here on.
    key_starts = torch.where(fills & (filled < begin), begin, valid)
    own.valid_from.index_copy_(0, rows, key_starts)
    own.filled.index_copy_(0, rows, torch.where(fills, begin + count, filled))
    # Every group's pages for themselves: a hit may join pages of several requests, evicted one by one.
    ends = {group.index: _page_ends(step, group) for group in own.groups}
    for page, first_slot in ends.values():
        is_valid = key_starts[view.request_of] <= first_slot.clamp_min(own.least)
        own.page_valid.index_put_((page,), is_valid)

    offset = torch.arange(view.num_tokens, device=rows.device) - view.query_starts[view.request_of]
    is_live = offset < count[view.request_of]
    slots = begin[view.request_of] + torch.minimum(offset, (count - 1).clamp_min(0)[view.request_of])
    slots = slots.clamp_max(own.max_len - 1)
    tokens = torch.where(is_live, step.tokens[rows[view.request_of], slots], 0)
    lengths = torch.where(fills, begin + count, 0)
    first = PassRows(slots, cells_of(view, own.groups, slots, is_live), lengths, count, key_starts)
    choosing = _choosing(step, own.max_len)
    further = _further(step, own, one_each.of(view), choosing.positions[:-1], key_starts)
    return Passes(choosing, tokens, first, further, ends[own.tail_group.index][0])


def _further(step: Step, own: Filled, view: BatchView, slots: torch.Tensor, key_starts: torch.Tensor) -> list[PassRows]:
    """Of slots [drafts - 1, requests], where the drafts stand that are not the last. Rows that have no room left run on
    a clamped slot and are dead."""
    is_live = step.guesses & (slots < own.max_len)
    slots = slots.clamp(0, own.max_len - 1)
    lengths, live = torch.where(is_live, slots + 1, 0), is_live.long()
    cells = cells_of(view, own.groups, slots, is_live)
    return [PassRows(slots[i], tuple(cell[i] for cell in cells), lengths[i], live[i], key_starts)
            for i in range(len(slots))]  # fmt: skip


def _page_ends(step: Step, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens] each: the page whose last token it is (the null page where none), and that page's first slot."""
    view, size = step.batch.padded, group.page_tokens
    request = view.request_of
    offset = torch.arange(view.num_tokens, device=request.device) - view.query_starts[request]
    position = step.computed_before[request] + offset
    ends = (offset < step.num_computed[request]) & (position % size == size - 1)
    column = (position // size).clamp_max(view.page_tables[group.index].shape[1] - 1)
    page = view.page_tables[group.index][request, column].long()
    return torch.where(ends, page, NULL_PAGE), column * size


def forget_pages(step: Step, own: Filled) -> None:
    """Pages whose last token the step computed are not valid for a hit."""
    kernels = draft_kernels(own.filled.device)
    if kernels is not None:
        kernels.forget_pages(_batch(kernels, step), own.page_valid, _pages(kernels, step, own))
        return
    for group in own.groups:
        own.page_valid.index_fill_(0, _page_ends(step, group)[0], False)


def _choosing(step: Step, max_len: int) -> Choosing:
    view, rows, sampling = step.batch.padded, step.batch.padded.rows, step.sampling
    known = step.known[rows]
    positions = known + torch.arange(step.most, device=rows.device)[:, None]
    counts = (max_len - known).clamp(0, step.most)
    last = (view.query_starts[:-1] + step.num_computed - 1).clamp_min(0)
    return Choosing(sampling.temperature[rows], sampling.seed[rows], sampling.sample_index[rows], positions, counts,
                    last)


@dataclass(frozen=True)
class Reading:
    """A pass that stands at the last computed token of each request that guesses, with the known token after it, and
    writes nothing: its one tensor of cells serves every group."""

    choosing: Choosing
    tokens: torch.Tensor  # [requests]
    rope_positions: torch.Tensor  # [requests]
    rows: PassRows


def reading_pass(step: Step, max_len: int, behind: int) -> Reading:
    """Rope positions are `behind` the number of known tokens."""
    kernels = draft_kernels(step.known.device)
    if kernels is not None:
        made = kernels.reading_pass(_batch(kernels, step), _rows(kernels, step), most=step.most, max_len=max_len,
                                    behind=behind)
        tokens, slots, lengths, live, nowhere, rope_positions = made.requests
        own = PassRows(slots, (nowhere,), lengths, live, None, _pairs((lengths, live), made.narrow))
        return Reading(_unpacked(made.choosing, made.temperature), tokens, rope_positions, own)
    rows, computed = step.batch.padded.rows, step.computed_before + step.num_computed
    tokens = torch.where(step.guesses, step.tokens[rows, computed.clamp_max(max_len - 1)], 0)
    lengths = torch.where(step.guesses, computed, 0)
    own = PassRows((computed - 1).clamp_min(0), (torch.full_like(rows, -1),), lengths, step.guesses.long())
    return Reading(_choosing(step, max_len), tokens, (step.known[rows] - behind).clamp_min(0), own)


# By kernels (`kernels.triton.draft`)


def _passes_by(kernels: Any, step: Step, own: Filled) -> Passes:
    made = kernels.draft_passes(
        _batch(kernels, step), _rows(kernels, step), kernels.Filled(own.valid_from, own.filled, own.page_valid),
        _pages(kernels, step, own), num_tokens=step.batch.padded.num_tokens, most=step.most, max_len=own.max_len,
        least=own.least,
    )  # fmt: skip
    tokens, slots, tail_page, *cells = made.tokens
    (lengths, key_starts), live = made.requests, step.num_computed
    first = PassRows(slots, tuple(cells), lengths, live, key_starts, _pairs((lengths, live, key_starts), made.narrow))
    further = []
    for ints, narrow in zip(made.further.unbind(1), made.narrow_further.unbind(1), strict=True):
        slots, lengths, live, *cells = ints
        copies = _pairs((lengths, live, key_starts), (*narrow, made.narrow[2]))
        further.append(PassRows(slots, tuple(cells), lengths, live, key_starts, copies))
    return Passes(_unpacked(made.choosing, made.temperature), tokens, first, further, tail_page)


def _batch(kernels: Any, step: Step) -> Any:
    view = step.batch.padded
    return kernels.Batch(view.rows, view.query_starts, step.computed_before, step.num_computed, step.guesses)


def _rows(kernels: Any, step: Step) -> Any:
    sampling = step.sampling
    return kernels.Rows(step.tokens, step.known, sampling.seed, sampling.sample_index, sampling.temperature)


def _pages(kernels: Any, step: Step, own: Filled) -> Any:
    tables = tuple(step.batch.padded.page_tables[group.index] for group in own.groups)
    return kernels.Pages(tables, tuple(group.page_tokens for group in own.groups), own.groups.index(own.tail_group))


def _unpacked(choosing: torch.Tensor, temperature: torch.Tensor) -> Choosing:
    seed, sample_index, counts, last = choosing[:4]
    return Choosing(temperature, seed, sample_index, choosing[4:], counts, last)


def _pairs(fields: Sequence[torch.Tensor], copies: Iterable[torch.Tensor]) -> Any:
    return tuple(zip(fields, copies, strict=True))
