"""The bookkeeping of a step on the device: `prepare_step` runs before the forward pass, `commit_step` after the
sampler, `store_drafts` at the end. `share_drafts` runs before all others in captured steps whose token rows the device
shares out among drafts.

This file is plain torch for any device, and the specification: `kernels.gpu.step`, `drafts.entry` and `drafts.share`
compute the same integers in one launch each, and take and return the types declared here. This file does not depend on
models or caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from outrider.core import NULL_ROW
from outrider.core.draft_confidence import (
    CHANCE_BITS,
    GAIN_BITS,
    LEVEL_BITS,
    MOST_CHANCE,
    MOST_PLACES,
    NUM_LEVELS,
    TOP_LEVEL,
    WEIGHT_BITS,
)
from outrider.kernels.accept import Accepted, StopRules, accept
from outrider.kernels.packet import StepPacket

# Columns of a result's counts: run length, finish, computed, drafted, accepted, and these.
PROPOSED, FAULT, FAULT_VALUE, LEVELS = 5, 6, 7, 8
NUM_COUNTS = 9
_MOST_CHANCE = int(MOST_CHANCE * (1 << CHANCE_BITS))


class RowFields(Protocol):
    """The part of the row state that a step reads and writes. All tensors are int64, except `alive` (bool) and page
    tables (int32). Steps write to these tensors and never replace them."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    known: torch.Tensor  # [ROWS]
    computed: torch.Tensor
    alive: torch.Tensor
    drafts: torch.Tensor  # [ROWS, DRAFTS]
    num_drafts: torch.Tensor  # [ROWS]
    levels: torch.Tensor  # [ROWS] how sure the drafter is of its drafts: see `core/draft_confidence.py`

    @property
    def sampling(self) -> StopRules: ...

    @property
    def page_tables(self) -> Sequence[torch.Tensor]: ...  # per group [ROWS, columns]


@dataclass(frozen=True)
class PreparedStep:
    """The tensors of a batch that depend on row state; int64 unless stated otherwise."""

    computed: torch.Tensor  # [requests] when the step begins
    num_known: torch.Tensor  # [requests] live known tokens
    num_drafts: torch.Tensor  # [requests] live drafts
    live: torch.Tensor  # [requests] live tokens
    lengths: torch.Tensor  # [requests] context with the live tokens
    samples: torch.Tensor  # [requests] bool: samples in this step and is alive
    drafts: torch.Tensor  # [requests, max drafts]
    lengths_int32: torch.Tensor
    live_int32: torch.Tensor
    query_starts_int32: torch.Tensor
    first_logit: torch.Tensor  # [requests] first logit row; undefined where the request has none
    page_tables: tuple[torch.Tensor, ...]  # per group [requests, columns] int32
    positions: torch.Tensor  # [tokens]
    token_ids: torch.Tensor  # [tokens]
    slots: tuple[torch.Tensor, ...]  # per group [tokens]
    logit_row: torch.Tensor  # [logit rows] row of its request; the null row past the live drafts
    logit_position: torch.Tensor  # [logit rows] of the token being chosen


class VerifiedStep(NamedTuple):
    """The tensors of a batch that `commit_step` needs; [requests]."""

    rows: torch.Tensor
    num_known: torch.Tensor  # live
    num_drafts: torch.Tensor  # live
    samples: torch.Tensor  # bool
    first_logit: torch.Tensor
    drafts: torch.Tensor  # [requests, max drafts]


@dataclass(frozen=True)
class CommittedStep:
    """The results of a step for its requests, padded ones included, after the rows were updated."""

    accepted: Accepted
    num_computed: torch.Tensor  # [requests] known tokens computed and drafts accepted
    goes_on: torch.Tensor  # [requests] bool: got a run and has not ended
    counts: torch.Tensor  # [requests, NUM_COUNTS]; nothing proposed yet


class Proposal(NamedTuple):
    """The drafts of one drafter, int64. Types, shapes and devices have been checked, but values have not: a drafter
    written by a user may have made them."""

    tokens: torch.Tensor  # [requests, num_wanted]
    counts: torch.Tensor  # [requests] how many of the tokens are drafts
    levels: torch.Tensor | None = None  # [requests] how sure the drafter is of them, if it says


class WrongValue(NamedTuple):
    """An invalid value in a proposal, as `store_drafts` reports it to the host."""

    drafter: int  # index of the proposal
    is_token: bool  # a token id outside the vocabulary; else a count out of range
    value: int

    @classmethod
    def from_code(cls, code: int, value: int) -> WrongValue:
        """Decode a fault: `code` is 1 + 2 * drafter for a count, 2 + 2 * drafter for a token id."""
        return cls((code - 1) // 2, code % 2 == 0, value)


def prepare_step(packet: StepPacket, state: RowFields, *, max_drafts: int, page_tokens: tuple[int, ...],
                 max_len: int) -> PreparedStep:
    """Build the tensors of a batch from row state. `page_tokens` is per group; positions stay below `max_len`."""
    rows, request_of, offset = packet.rows, packet.request_of, packet.offset
    known, computed = state.known[rows], state.computed[rows]
    alive = state.alive[rows] & (rows != NULL_ROW)
    samples = alive & (packet.samples > 0)
    num_known = torch.where(alive, packet.num_known, 0)
    room = (state.sampling.end_len[rows] - known - 1).clamp_min(0)  # drafts past the end could never be accepted
    num_drafts = torch.minimum(torch.minimum(packet.num_drafts, state.num_drafts[rows]), room)
    num_drafts = torch.where(samples, num_drafts, 0)
    live = num_known + num_drafts
    lengths = torch.where(alive, computed + live, 0)

    # Token rows: known tokens first, then drafts; dead ones repeat a valid position and write nothing.
    token_live, token_known = live[request_of], num_known[request_of]
    is_live = offset < token_live
    positions = (computed[request_of] + torch.minimum(offset, (token_live - 1).clamp_min(0))).clamp_max(max_len - 1)
    token_row = rows[request_of]
    token_ids = state.tokens[token_row, positions]
    if max_drafts:
        draft_index = (offset - token_known).clamp(0, max_drafts - 1)
        token_ids = torch.where(offset < token_known, token_ids, state.drafts[token_row, draft_index])
    tables = tuple(table[rows] for table in state.page_tables)
    logit_request = packet.logit_request
    is_asked = samples[logit_request] & (packet.logit_draft <= num_drafts[logit_request])
    return PreparedStep(
        computed, num_known, num_drafts, live, lengths, samples, state.drafts[rows][:, :max_drafts], lengths.int(),
        live.int(), packet.query_starts.int(), _first_logits(packet), tables, positions,
        torch.where(is_live, token_ids, 0),
        tuple(_slots(table, size, request_of, positions, is_live)
              for table, size in zip(tables, page_tokens, strict=True)),
        torch.where(is_asked, rows[logit_request], NULL_ROW), known[logit_request] + packet.logit_draft,
    )


def share_drafts(packet: StepPacket, state: RowFields, *, max_drafts: int) -> None:
    """Share `packet.num_shared` token rows out among the drafts that wait in the rows, likeliest first, and lay out the
    batch again: this overwrites the packet's numbers of drafts, owners of token rows, offsets and logit rows. A request
    gets at most its previous `num_drafts`. Does nothing if num_shared is 0. All requests of the batch decode: each has
    one known token.

    The gain of a draft is the chance that it is reached and accepted: the product of the chances of the drafts up to
    it, which follow from the drafter's confidence levels and the request's weight. Gains never rise along a request's
    drafts, so its likeliest drafts are its first ones; of equal gains the first are taken. Gains are integers, so that
    every kernel and rank agrees.
    """
    rows, (requests,), (tokens,) = packet.rows, packet.rows.shape, packet.request_of.shape
    is_shared = packet.num_shared > 0  # [1]
    room = (state.sampling.end_len[rows] - state.known[rows] - 1).clamp_min(0)
    most = torch.minimum(torch.minimum(packet.num_drafts, state.num_drafts[rows]), room)
    most = torch.where(state.alive[rows] & (rows != NULL_ROW) & (packet.samples > 0), most, 0)
    reached, columns = torch.full_like(rows, 1 << GAIN_BITS), []
    for place in range(max_drafts):
        level = state.levels[rows] >> LEVEL_BITS * min(place, MOST_PLACES) & TOP_LEVEL
        level = level if place < MOST_PLACES else torch.zeros_like(level)
        chance = packet.chances[place * NUM_LEVELS + level] * packet.weights >> WEIGHT_BITS
        reached = reached * chance.clamp(0, _MOST_CHANCE) >> CHANCE_BITS
        columns.append(torch.where(place < most, reached, -1))
    gains = torch.stack(columns, dim=1).flatten()
    order = gains.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=rows.device))
    is_taken = (rank < packet.num_shared) & (gains >= 0)
    counts = torch.where(is_shared, is_taken.view(requests, max_drafts).sum(dim=1), packet.num_drafts)

    ends = (packet.num_known + counts).cumsum(0)
    at = torch.arange(tokens, device=rows.device)
    owner = torch.searchsorted(ends, at, right=True).clamp_max(requests - 1)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    is_padding = at >= ends[-1]
    offset = torch.where(is_padding, tokens, at - starts[owner])
    made = {"num_drafts": counts, "query_starts": starts, "request_of": owner, "offset": offset,
            "logit_request": owner, "logit_draft": torch.where(is_padding, max_drafts + 1, offset),
            "logit_token": torch.where(is_padding, 0, at)}
    for name, values in made.items():
        own: torch.Tensor = getattr(packet, name)
        own.copy_(torch.where(is_shared, values, own))


def _first_logits(packet: StepPacket) -> torch.Tensor:
    """Return each request's first logit row: [requests]. Other logit rows are written to a cell after the last
    request."""
    requests, logit_rows = packet.rows.shape[0], packet.logit_request.shape[0]
    first = torch.zeros(requests + 1, dtype=torch.int64, device=packet.rows.device)
    cell = torch.where(packet.logit_draft == 0, packet.logit_request, requests)
    return first.scatter_(0, cell, torch.arange(logit_rows, device=first.device))[:-1]


def _slots(table: torch.Tensor, page_tokens: int, request_of: torch.Tensor, positions: torch.Tensor,
           is_live: torch.Tensor) -> torch.Tensor:
    pages = table[request_of, positions // page_tokens].long()
    return torch.where(is_live, pages * page_tokens + positions % page_tokens, -1)


def commit_step(sampled: torch.Tensor, bad: torch.Tensor, batch: VerifiedStep, state: RowFields) -> CommittedStep:
    """Accept the drafts that equal the `sampled` tokens [logit rows], decide how each request ends, and update the
    rows: the tokens gained become known, and those of them that were accepted drafts count as computed."""
    rows = batch.rows
    known = state.known[rows]
    accepted = accept(sampled, bad, batch.first_logit, batch.drafts, batch.num_drafts, batch.samples, known,
                      state.sampling, rows)
    index = torch.arange(accepted.run.shape[1], device=rows.device)
    columns = (known[:, None] + index).clamp_max(state.tokens.shape[1] - 1)
    # Cells beyond the run keep what they hold. Only the null row can be written twice, with what it holds.
    kept = state.tokens[rows[:, None], columns]
    values = torch.where(index < accepted.run_len[:, None], accepted.run, kept)
    state.tokens.index_put_((rows[:, None], columns), values)
    computed = batch.num_known + accepted.num_accepted
    state.known.index_add_(0, rows, accepted.run_len)
    state.computed.index_add_(0, rows, computed)
    state.alive.index_copy_(0, rows, state.alive[rows] & (accepted.finish == 0))
    state.num_drafts.index_fill_(0, rows, 0)  # consumed, or stale
    goes_on = (accepted.run_len > 0) & (accepted.finish == 0)
    nothing = torch.zeros_like(computed)
    counts = torch.stack([accepted.run_len, accepted.finish, computed, batch.num_drafts, accepted.num_accepted, nothing,
                          nothing, nothing, nothing], dim=1)
    return CommittedStep(accepted, computed, goes_on, counts)


def store_drafts(rows: torch.Tensor, proposals: Sequence[Proposal], goes_on: torch.Tensor, is_on: torch.Tensor, *,
                 vocab_size: int, fills: bool, drafts: torch.Tensor, num_drafts: torch.Tensor, levels: torch.Tensor,
                 counts: torch.Tensor) -> None:
    """Store proposals in their rows: a request that goes on gets the drafts of the first drafter that has any for it.

    Invalid values are caught here. A count outside of 0 to num_wanted, or a draft outside of the vocabulary, is a
    fault: the request gets nothing from that drafter, and the first fault of every request is written to its columns
    FAULT and FAULT_VALUE of `counts`. is_on [proposals]: 0 for a drafter that is switched off. The confidence levels of
    the stored drafts go to the rows and to the column LEVELS; 0 if the drafter gave none. fills: requests that go on
    always get num_wanted drafts, with token 0 where no drafter had one.
    """
    num_wanted = proposals[0].tokens.shape[1]
    columns, nothing = torch.arange(num_wanted, device=rows.device), torch.zeros_like(rows)
    count, code, value, level = nothing, nothing, nothing, nothing
    chosen = torch.zeros_like(proposals[0].tokens)
    for index, (tokens, offered, own_levels) in enumerate(proposals):
        is_asked = goes_on & (is_on[index] > 0)
        is_count = (offered >= 0) & (offered <= num_wanted)
        is_draft = (columns < offered[:, None]) & is_count[:, None]
        is_wrong = is_draft & ((tokens < 0) | (tokens >= vocab_size))
        has_wrong = is_wrong.any(dim=1)
        first_wrong = tokens.gather(1, is_wrong.long().argmax(dim=1, keepdim=True)).squeeze(1)
        own_code = torch.where(is_count, torch.where(has_wrong, 2 + 2 * index, 0), 1 + 2 * index)
        is_first = is_asked & (code == 0) & (own_code > 0)
        code = torch.where(is_first, own_code, code)
        value = torch.where(is_first, torch.where(is_count, first_wrong, offered), value)
        is_taken = is_asked & (own_code == 0) & (count == 0)
        count = torch.where(is_taken, offered, count)
        chosen = torch.where(is_taken[:, None] & is_draft, tokens, chosen)
        if own_levels is not None:
            level = torch.where(is_taken & (offered > 0), own_levels, level)
    if fills:
        count = torch.where(goes_on, num_wanted, 0)
    drafts.index_put_((rows[:, None], columns), chosen)
    num_drafts.index_copy_(0, rows, count)
    levels.index_copy_(0, rows, level)
    counts[:, PROPOSED], counts[:, FAULT], counts[:, FAULT_VALUE], counts[:, LEVELS] = count, code, value, level
