"""The bookkeeping of a proposal: positions, slots and lengths of the token rows of each drafting pass, and the keys
with which drafts are sampled.

A position is a token's index in the text. A slot is the cell, in the pages of one cache group, where that token is
cached. Positions, slots, lengths and noise keys do not depend on which tokens are drafted, so all passes are planned at
once, before the first one runs. This file is plain torch for any device, and the specification: `kernels.gpu.drafts`
and, on a CPU, `kernels.cpu.draft_plan` compute the same integers in one call, and take and return the types declared
here. The plan does not depend on what the passes compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from outrider.core import NULL_PAGE

Tables = tuple[torch.Tensor, ...]  # page tables of the drafter's groups, [requests, columns] int32 each


class CommittedRequests(NamedTuple):
    """The requests of a step after its commit, padded; int64 except `goes_on`."""

    rows: torch.Tensor  # [requests]
    query_starts: torch.Tensor  # [requests + 1]
    request_of: torch.Tensor  # [tokens]
    computed_before: torch.Tensor  # [requests] computed tokens when the step began
    num_computed: torch.Tensor  # [requests] tokens it computed
    goes_on: torch.Tensor  # [requests] bool: got a run and has not ended


class DraftingRows(NamedTuple):
    """The row state that drafting reads and does not change. All tensors are int64 except `temperature`."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    known: torch.Tensor  # [ROWS]
    seed: torch.Tensor
    sample_index: torch.Tensor
    temperature: torch.Tensor  # float32


@dataclass(frozen=True)
class DrafterCacheState:
    """The slots and pages of a drafter's cache that the drafter has filled. Every step updates the tensors."""

    page_tokens: tuple[int, ...]  # tokens of a page, by group of the drafter
    tail_group: int  # index of the group whose pages keep hidden states
    first_position: int  # the first position with a slot in every layer; a head has none for position 0
    max_len: int  # positions of the drafter, of which a short draft model has fewer than the rows
    valid_from: torch.Tensor  # [ROWS] slots of positions before it were never filled
    filled: torch.Tensor  # [ROWS] the position after the last one whose slot is filled
    page_valid: torch.Tensor  # [pages] bool, a part of each page: any stride


class DraftSamplingKeys(NamedTuple):
    """The keys with which each request's drafts are sampled, and how many drafts it has room for."""

    temperature: torch.Tensor  # [requests]
    seed: torch.Tensor  # [requests]
    sample_index: torch.Tensor  # [requests]
    positions: torch.Tensor  # [drafts, requests]
    counts: torch.Tensor  # [requests] drafts there is room for
    last: torch.Tensor  # [requests] token row of the last computed token


class DraftVerdicts(NamedTuple):
    """The logit rows where another rule than equality with the sampled token decides whether a draft is accepted;
    int64."""

    request: torch.Tensor  # [logit rows]
    row: torch.Tensor  # [logit rows]
    draft_index: torch.Tensor  # [logit rows]
    position: torch.Tensor  # [logit rows]
    drafts: torch.Tensor  # [requests, max drafts]


class DraftPass(NamedTuple):
    """The token rows of one drafting pass, and the context lengths of its requests."""

    positions: torch.Tensor  # [tokens]
    slots: tuple[torch.Tensor, ...]  # per group of the drafter [tokens], -1 for dead token rows
    lengths: torch.Tensor  # [requests]
    live: torch.Tensor  # [requests]
    lengths_int32: torch.Tensor
    live_int32: torch.Tensor


class DraftPasses(NamedTuple):
    """All passes of a proposal. Passes after the first have one token row per request, whose tokens are not known
    yet."""

    keys: DraftSamplingKeys
    tokens: torch.Tensor  # [tokens] of the first pass
    first: DraftPass
    further: list[DraftPass]
    key_starts: torch.Tensor  # [requests] first position that may be seen, in every pass
    key_starts_int32: torch.Tensor
    tail_page: torch.Tensor  # [tokens] page of the tail group whose last token it is; the null page where none


class AdmittedRows(NamedTuple):
    """Rows that were just admitted, padded. Each has one token row: the first token that the request has to compute.
    int64."""

    rows: torch.Tensor  # [requests]
    begin: torch.Tensor  # [requests] position of that token: tokens before it come from a prefix hit
    live: torch.Tensor  # [requests] 0 of padding, else 1
    needed: torch.Tensor  # [groups, requests] first column of the page table that later tokens may still see


class FirstSlots(NamedTuple):
    """The pass that fills, for each admitted row, the drafter's slot of the first token that the row computes."""

    only: DraftPass
    key_starts: torch.Tensor  # [requests] first position that may be seen
    key_starts_int32: torch.Tensor
    tail_page: torch.Tensor  # [requests] page with the hidden state of the token before; the null page if there is none


class ReadingPass(NamedTuple):
    """A drafting pass that only reads the cache: one token row for each request, with the known token after the last
    computed one. Because nothing is written, one tensor of slots serves every group."""

    keys: DraftSamplingKeys
    tokens: torch.Tensor  # [requests]
    rope_positions: torch.Tensor  # [requests]
    only: DraftPass


class BlockRows(NamedTuple):
    """The token rows of the blocks, equally many for each request: the last known token, then one row for each draft
    after it. Depending on the layer, a row sees the rows before it in its block, or the whole block."""

    positions: torch.Tensor  # [requests * rows]
    slots: tuple[torch.Tensor, ...]  # per group of the drafter [requests * rows], -1 for dead rows
    live: torch.Tensor  # [requests] rows that have a place in the text
    lengths: torch.Tensor  # [requests] tokens up to the end of the block; 0 for requests without one
    row_live: torch.Tensor  # [requests * rows] 1, or 0 for dead rows
    row_lengths: torch.Tensor  # [requests * rows] tokens that a row sees of its whole block; 0 for dead rows
    key_starts: torch.Tensor  # [requests] first position that may be seen


class BlockPasses(NamedTuple):
    """The two passes of a block drafter: the first stores the context of the tokens that the step computed, the second
    runs the blocks."""

    keys: DraftSamplingKeys
    context: DraftPass  # the step's own token rows
    anchors: torch.Tensor  # [requests] the last known token
    block: BlockRows


def plan_draft_passes(requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *,
                      num_wanted: int) -> DraftPasses:
    """Plan every pass of a proposal of `num_wanted` drafts. The first pass has the token rows of the step itself.
    Updates `own`: the slots that the first pass fills, and whether pages that the step completed are valid."""
    at, request_of = requests.rows, requests.request_of
    count, begin = requests.num_computed, requests.computed_before + 1
    fills, filled, valid = count > 0, own.filled[at], own.valid_from[at]
    # A gap since the last fill (cold steps) leaves only what is filled from here on.
    key_starts = torch.where(fills & (filled < begin), begin, valid)
    own.valid_from.index_copy_(0, at, key_starts)
    own.filled.index_copy_(0, at, torch.where(fills, begin + count, filled))
    # Every group's pages for themselves: a hit may join pages of several requests, evicted one by one.
    ends = [_page_ends(requests, table, size) for table, size in zip(tables, own.page_tokens, strict=True)]
    for page, page_start in ends:
        own.page_valid.index_put_((page,), key_starts[request_of] <= page_start.clamp_min(own.first_position))

    offset = torch.arange(request_of.shape[0], device=at.device) - requests.query_starts[request_of]
    live = torch.minimum(count, (own.max_len - begin).clamp_min(0))  # a drafter has no slots past its length
    is_live = offset < live[request_of]
    positions = begin[request_of] + torch.minimum(offset, (live - 1).clamp_min(0)[request_of])
    positions = positions.clamp_max(own.max_len - 1)
    tokens = torch.where(is_live, rows.tokens[at[request_of], positions], 0)
    lengths = torch.where(live > 0, begin + live, 0)
    slots = find_slots(tables, own.page_tokens, request_of, positions, is_live)
    first = DraftPass(positions, slots, lengths, live, lengths.int(), live.int())
    keys = _sampling_keys(requests, rows, num_wanted, own.max_len)
    further = _further(requests, tables, own, keys.positions[:-1])
    return DraftPasses(keys, tokens, first, further, key_starts, key_starts.int(), ends[own.tail_group][0])


def plan_block_passes(requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *,
                      num_wanted: int, num_rows: int) -> BlockPasses:
    """Plan the passes of a proposal of `num_wanted` drafts by a block drafter, with `num_rows` token rows in a block.
    Slot p holds the context of token p, and is written only for computed tokens: known ones and accepted drafts. The
    slots after them are used by the block and overwritten in later steps. Updates `own` for the slots that the context
    fills."""
    at, request_of = requests.rows, requests.request_of
    count, begin = requests.num_computed, requests.computed_before
    fills, filled, valid = count > 0, own.filled[at], own.valid_from[at]
    # A gap since the last fill (cold steps) leaves only what is filled from here on.
    key_starts = torch.where(fills & (filled < begin), begin, valid)
    own.valid_from.index_copy_(0, at, key_starts)
    own.filled.index_copy_(0, at, torch.where(fills, begin + count, filled))
    for table, size in zip(tables, own.page_tokens, strict=True):
        page, page_start = _page_ends(requests, table, size)
        own.page_valid.index_put_((page,), key_starts[request_of] <= page_start)

    offset = torch.arange(request_of.shape[0], device=at.device) - requests.query_starts[request_of]
    is_live = (offset >= 0) & (offset < count[request_of])
    positions = (begin[request_of] + torch.minimum(offset, (count - 1).clamp_min(0)[request_of])).clamp(
        0, own.max_len - 1)
    lengths = torch.where(fills, begin + count, 0)
    context = DraftPass(positions, find_slots(tables, own.page_tokens, request_of, positions, is_live), lengths, count,
                        lengths.int(), count.int())
    anchor = begin + count
    block = _block_rows(anchor, requests.goes_on, key_starts, tables, own, num_rows)
    anchors = torch.where(requests.goes_on, rows.tokens[at, anchor.clamp_max(own.max_len - 1)], 0)
    return BlockPasses(_sampling_keys(requests, rows, num_wanted, own.max_len), context, anchors, block)


def _block_rows(anchor: torch.Tensor, goes_on: torch.Tensor, key_starts: torch.Tensor, tables: Tables,
                own: DrafterCacheState, num_rows: int) -> BlockRows:
    """Lay out the rows of the blocks. anchor [requests]: position of the last known token. key_starts [requests]: the
    first position that may be seen."""
    positions = anchor[:, None] + torch.arange(num_rows, device=anchor.device)  # [requests, rows]
    is_live = (goes_on[:, None] & (positions < own.max_len)).reshape(-1)
    positions = positions.clamp(0, own.max_len - 1).reshape(-1)
    request = torch.arange(anchor.shape[0], device=anchor.device)[:, None].expand(-1, num_rows).reshape(-1)
    live = torch.where(goes_on, (own.max_len - anchor).clamp(0, num_rows), 0)
    lengths = torch.where(live > 0, anchor + live, 0)
    slots = find_slots(tables, own.page_tokens, request, positions, is_live)
    return BlockRows(positions, slots, live, lengths, is_live.long(), torch.where(is_live, lengths[request], 0),
                     key_starts)


def find_slots(tables: Tables, page_tokens: tuple[int, ...], request_of: torch.Tensor, positions: torch.Tensor,
               is_live: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the slots of positions [..., tokens], one tensor for each group; -1 for dead token rows."""
    slots = []
    for table, size in zip(tables, page_tokens, strict=True):
        page = table[request_of, positions // size].long()
        slots.append(torch.where(is_live, page * size + positions % size, -1))
    return tuple(slots)


def _further(requests: CommittedRequests, tables: Tables, own: DrafterCacheState,
             positions: torch.Tensor) -> list[DraftPass]:
    """Plan the passes after the first, one for each draft except the last, at positions [drafts - 1, requests]. A row
    without room for more tokens is dead there, at a clamped position."""
    is_live = requests.goes_on & (positions < own.max_len)
    positions = positions.clamp(0, own.max_len - 1)
    lengths, live = torch.where(is_live, positions + 1, 0), is_live.long()
    index = torch.arange(positions.shape[1], device=positions.device)
    slots = find_slots(tables, own.page_tokens, index, positions, is_live)
    lengths_int32, live_int32 = lengths.int(), live.int()
    return [DraftPass(positions[i], tuple(own_slots[i] for own_slots in slots), lengths[i], live[i], lengths_int32[i],
                      live_int32[i]) for i in range(len(positions))]


def _page_ends(requests: CommittedRequests, table: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token row, the page whose last token it is (the null page if there is none), and the first position of
    that page: [tokens] each."""
    request = requests.request_of
    offset = torch.arange(request.shape[0], device=request.device) - requests.query_starts[request]
    position = requests.computed_before[request] + offset
    ends = (offset < requests.num_computed[request]) & (position % page_tokens == page_tokens - 1)
    column = (position // page_tokens).clamp_max(table.shape[1] - 1)
    page = table[request, column].long()
    return torch.where(ends, page, NULL_PAGE), column * page_tokens


def forget_pages(requests: CommittedRequests, tables: Tables, own: DrafterCacheState) -> None:
    """Mark the pages that the step completed as not valid: a later prefix hit cannot use them for drafting."""
    for table, size in zip(tables, own.page_tokens, strict=True):
        own.page_valid.index_fill_(0, _page_ends(requests, table, size)[0], False)


def _sampling_keys(requests: CommittedRequests, rows: DraftingRows, num_wanted: int, max_len: int) -> DraftSamplingKeys:
    at = requests.rows
    known = rows.known[at]
    positions = known + torch.arange(num_wanted, device=at.device)[:, None]
    counts = (max_len - known).clamp(0, num_wanted)
    last = (requests.query_starts[:-1] + requests.num_computed - 1).clamp_min(0)
    return DraftSamplingKeys(rows.temperature[at], rows.seed[at], rows.sample_index[at], positions, counts, last)


def plan_first_slots(admitted: AdmittedRows, tables: Tables, own: DrafterCacheState, *, needs_tail: bool,
                     num_chained: int, is_filled: bool) -> FirstSlots:
    """Plan the pass that fills the first slots of admitted rows, and record in `own` which slots of their prefix hits
    are valid. needs_tail: the drafter fills no slot without the hidden state of the token before it. num_chained: with
    chained modules, how many slots after the first module's the last module's slots become valid. is_filled: whether
    the pass will run; in a cold step it does not."""
    at, begin = admitted.rows, admitted.begin
    valid_from = torch.full_like(begin, 1 if needs_tail else 0)  # a head has no slot for position 0
    for table, size, needed in zip(tables, own.page_tokens, admitted.needed, strict=True):
        valid_from = torch.maximum(valid_from, _valid_in_hit(table, size, needed, begin, own.page_valid))
    size, index = own.page_tokens[own.tail_group], torch.arange(at.shape[0], device=at.device)
    page = tables[own.tail_group][index, (begin // size - 1).clamp_min(0)].long()
    tail_page = torch.where((begin > 0) & (begin % size == 0), page, NULL_PAGE)
    can_fill = admitted.live > 0
    if needs_tail:
        can_fill = can_fill & (tail_page != NULL_PAGE) & own.page_valid[tail_page]
    key_starts = torch.where(can_fill | (begin == 0), valid_from, begin + 1) + num_chained
    own.valid_from.index_copy_(0, at, key_starts)
    own.filled.index_copy_(0, at, begin + is_filled)
    is_live = can_fill & (begin < own.max_len)  # past its length a drafter has no slots
    slots = find_slots(tables, own.page_tokens, index, begin, is_live)
    lengths, live = torch.where(is_live, begin + 1, 0), is_live.long()
    only = DraftPass(begin.clamp_max(own.max_len - 1), slots, lengths, live, lengths.int(), live.int())
    return FirstSlots(only, key_starts, key_starts.int(), tail_page)


def _valid_in_hit(table: torch.Tensor, page_tokens: int, needed: torch.Tensor, begin: torch.Tensor,
                  page_valid: torch.Tensor) -> torch.Tensor:
    """Return [requests]: the slot from which on all slots of the prefix hit are valid. Before it some were evicted or
    never filled by the drafter. Pages that have left a window are not needed. If a hit ends within a page of this
    group, the slots in that page are missing."""
    pages, columns = table.long(), torch.arange(table.shape[1], device=table.device)
    in_hit = (columns >= needed[:, None]) & (columns < (begin // page_tokens)[:, None])
    is_broken = in_hit & ((pages == NULL_PAGE) | ~page_valid[pages])
    after = torch.where(is_broken, columns + 1, 0).amax(dim=1) * page_tokens
    return torch.where(begin % page_tokens == 0, after, begin)


def plan_reading_pass(requests: CommittedRequests, rows: DraftingRows, *, num_wanted: int, max_len: int,
                      behind: int) -> ReadingPass:
    """Plan a pass that only reads. A row's rope position is its number of known tokens minus `behind`."""
    at, goes_on = requests.rows, requests.goes_on
    computed = requests.computed_before + requests.num_computed
    tokens = torch.where(goes_on, rows.tokens[at, computed.clamp_max(max_len - 1)], 0)
    lengths, live = torch.where(goes_on, computed, 0), goes_on.long()
    only = DraftPass((computed - 1).clamp_min(0), (torch.full_like(at, -1),), lengths, live, lengths.int(), live.int())
    return ReadingPass(_sampling_keys(requests, rows, num_wanted, max_len), tokens,
                       (rows.known[at] - behind).clamp_min(0), only)
