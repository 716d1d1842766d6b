"""A step's bookkeeping: `prepare_step` before the forward, `commit_step` after the sampler, `store_drafts` at the end.

Plain torch, any device, the specification: `kernels.triton.step` does the same in one launch each, integer for integer,
and takes and returns the types declared here. Nothing here knows models or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from outrider.core import NULL_ROW
from outrider.kernels.accept import Accepted, StopRules, accept
from outrider.kernels.packet import StepPacket

PROPOSED = 5  # column of a result's counts


class RowFields(Protocol):
    """The part of the row state that a step reads and writes; int64 but for `alive` (bool) and page tables (int32). The
    tensors are written to, and never replaced by others."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    known: torch.Tensor  # [ROWS]
    computed: torch.Tensor
    alive: torch.Tensor
    drafts: torch.Tensor  # [ROWS, DRAFTS]
    num_drafts: torch.Tensor  # [ROWS]

    @property
    def sampling(self) -> StopRules: ...

    @property
    def page_tables(self) -> Sequence[torch.Tensor]: ...  # per group [ROWS, columns]


@dataclass(frozen=True)
class PreparedStep:
    """All tensors of a batch that depend on row state; int64 unless stated otherwise."""

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
    logit_row: torch.Tensor  # [logit rows] row of its request; the null row past the live drafts, where nobody looks
    logit_position: torch.Tensor  # [logit rows] of the token being chosen


class VerifiedStep(NamedTuple):
    """The tensors of a batch that a commit needs, [requests]."""

    rows: torch.Tensor
    num_known: torch.Tensor  # live
    num_drafts: torch.Tensor  # live
    samples: torch.Tensor  # bool
    first_logit: torch.Tensor
    drafts: torch.Tensor  # [requests, max drafts]


@dataclass(frozen=True)
class CommittedStep:
    """A step's results for its requests, padded ones included, after the rows were updated."""

    accepted: Accepted
    num_computed: torch.Tensor  # [requests] known tokens computed and drafts accepted
    goes_on: torch.Tensor  # [requests] bool: got a run and has not ended
    counts: torch.Tensor  # [requests, 6] run length, finish, computed, drafted, accepted; nothing proposed yet


def prepare_step(packet: StepPacket, state: RowFields, *, max_drafts: int, page_tokens: tuple[int, ...],
                 max_len: int) -> PreparedStep:
    """Prepare a batch from row state. `page_tokens` is per group; positions stay below `max_len`."""
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
    )  # fmt: skip


def _first_logits(packet: StepPacket) -> torch.Tensor:
    """[requests] each request's first logit row. Other logit rows are written to a cell past the requests."""
    requests, logit_rows = packet.rows.shape[0], packet.logit_request.shape[0]
    first = torch.zeros(requests + 1, dtype=torch.int64, device=packet.rows.device)
    cell = torch.where(packet.logit_draft == 0, packet.logit_request, requests)
    return first.scatter_(0, cell, torch.arange(logit_rows, device=first.device))[:-1]


def _slots(table: torch.Tensor, page_tokens: int, request_of: torch.Tensor, positions: torch.Tensor,
           is_live: torch.Tensor) -> torch.Tensor:
    pages = table[request_of, positions // page_tokens].long()
    return torch.where(is_live, pages * page_tokens + positions % page_tokens, -1)


def commit_step(sampled: torch.Tensor, bad: torch.Tensor, batch: VerifiedStep, state: RowFields) -> CommittedStep:
    """Accept drafts that equal the tokens `sampled` [logit rows], decide how each request ends, and update the rows:
    the run becomes known, its accepted part computed."""
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
    counts = torch.stack([accepted.run_len, accepted.finish, computed, batch.num_drafts, accepted.num_accepted,
                          torch.zeros_like(computed)], dim=1)  # fmt: skip
    return CommittedStep(accepted, computed, goes_on, counts)


def store_drafts(rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, goes_on: torch.Tensor, *,
                 drafts: torch.Tensor, num_drafts: torch.Tensor, proposed: torch.Tensor) -> None:
    """Store drafts [requests, num_wanted] in their rows: counts [requests] of them for a request that goes on, none
    for the others. The number stored is written to `proposed` [requests] too."""
    columns = torch.arange(tokens.shape[1], device=rows.device)
    drafts.index_put_((rows[:, None], columns), tokens)
    proposed.copy_(torch.where(goes_on, counts, 0))
    num_drafts.index_copy_(0, rows, proposed)
