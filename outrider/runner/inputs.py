"""Builds the ForwardBatch of a step from what the host scheduled and what the rows hold. The only place that does.

Padding happens here, once, after the plan is final: padded requests have the null row, no tokens and length 0.
Which scheduled tokens are live is known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from outrider.attention.base import BatchView, ForwardBatch, LengthBound
from outrider.cache.groups import Group
from outrider.core import NULL_ROW, ScheduledBatch
from outrider.runner.state import RowState
from outrider.sample.batch import LogitRows


@dataclass(frozen=True)
class PaddedSize:
    requests: int
    tokens: int


@dataclass(frozen=True)
class Inputs:
    """The batch, and per request what finish and the drafter need beside it. Request tensors are padded."""

    batch: ForwardBatch
    num_known: torch.Tensor  # [requests] live known tokens
    num_drafts: torch.Tensor  # [requests] live drafts
    drafts: torch.Tensor  # [requests, most drafts scheduled]
    samples: torch.Tensor  # [requests] samples in this step and is alive
    logit_token_rows: torch.Tensor  # [logit rows] token row whose hidden state makes the logit row
    logit_rows: LogitRows
    most_drafts: int


def build_inputs(scheduled: ScheduledBatch, state: RowState, groups: tuple[Group, ...], max_len: int,
                 padded: PaddedSize | None = None) -> Inputs:
    size = padded or PaddedSize(scheduled.num_requests, scheduled.num_tokens)
    if size.requests < scheduled.num_requests or size.tokens < scheduled.num_tokens:
        raise ValueError(f"padded size {size} is below the scheduled {scheduled.num_requests}, {scheduled.num_tokens}")
    host = _HostCounts.of(scheduled, size)
    rows, num_known_sched, num_drafts_sched, samples_sched, starts = host.requests.to(state.device, non_blocking=True)
    request_of, offset = host.tokens.to(state.device, non_blocking=True)
    known, computed = state.known[rows], state.computed[rows]
    alive = state.alive[rows] & (rows != NULL_ROW)
    samples = alive & (samples_sched > 0)
    num_known = torch.where(alive, num_known_sched, 0)
    room = (state.sampling.end_len[rows] - known - 1).clamp_min(0)  # drafts past the end could never be accepted
    num_drafts = torch.minimum(torch.minimum(num_drafts_sched, state.num_drafts[rows]), room)
    num_drafts = torch.where(samples, num_drafts, 0)
    live = num_known + num_drafts
    lengths = torch.where(alive, computed + live, 0)
    # Token rows: known tokens first, then drafts; dead ones repeat a valid position and write nothing.
    token_live, token_known = live[request_of], num_known[request_of]
    is_live = offset < token_live
    positions = (computed[request_of] + torch.minimum(offset, (token_live - 1).clamp_min(0))).clamp_max(max_len - 1)
    token_row = rows[request_of]
    known_ids = state.tokens[token_row, positions]
    if host.most_drafts:
        draft_index = (offset - token_known).clamp(0, host.most_drafts - 1)
        token_ids = torch.where(offset < token_known, known_ids, state.drafts[token_row, draft_index])
    else:
        token_ids = known_ids
    token_ids = torch.where(is_live, token_ids, 0)
    tables = tuple(table[rows] for table in state.page_tables)
    slots = tuple(_slots(table, group, request_of, positions, is_live) for table, group in zip(tables, groups, strict=True))
    query_starts = torch.cat([starts, host.last_start.to(state.device, non_blocking=True)])
    padded_view = BatchView(
        num_requests=size.requests, num_tokens=size.tokens, query_lens=host.query_lens,
        max_length=LengthBound(max(scheduled.bounds)), rows=rows, query_starts=query_starts, lengths=lengths, live=live,
        token_ids=token_ids, positions=positions, request_of=request_of, page_tables=tables, token_slots=slots,
    )  # fmt: skip
    batch = ForwardBatch(padded_view, _cut(padded_view, scheduled.num_requests, scheduled.num_tokens))
    request, draft_index, token_row_of = host.logits.to(state.device, non_blocking=True)
    logit_rows = LogitRows(
        request=request, row=rows[request], draft_index=draft_index, position=known[request] + draft_index,
        counts=host.logit_counts,
    )  # fmt: skip
    drafts = state.drafts[rows][:, : host.most_drafts]
    return Inputs(batch, num_known, num_drafts, drafts, samples, token_row_of, logit_rows, host.most_drafts)


def _slots(table: torch.Tensor, group: Group, request_of: torch.Tensor, positions: torch.Tensor,
           is_live: torch.Tensor) -> torch.Tensor:
    pages = table[request_of, positions // group.page_tokens].long()
    return torch.where(is_live, pages * group.page_tokens + positions % group.page_tokens, -1)


def _cut(view: BatchView, requests: int, tokens: int) -> BatchView:
    return BatchView(
        num_requests=requests, num_tokens=tokens, query_lens=view.query_lens[:requests], max_length=view.max_length,
        rows=view.rows[:requests], query_starts=view.query_starts[: requests + 1], lengths=view.lengths[:requests],
        live=view.live[:requests], token_ids=view.token_ids[:tokens], positions=view.positions[:tokens],
        request_of=view.request_of[:tokens], page_tables=tuple(table[:requests] for table in view.page_tables),
        token_slots=tuple(slots[:tokens] for slots in view.token_slots),
    )  # fmt: skip


@dataclass(frozen=True)
class _HostCounts:
    """What the host knows of a batch, as integers ready to copy."""

    requests: torch.Tensor  # [5, requests] rows, known, drafts, samples, starts
    last_start: torch.Tensor  # [1]
    tokens: torch.Tensor  # [2, tokens] request of each token, its offset there
    logits: torch.Tensor  # [3, logit rows] request, drafts before it, token row
    logit_counts: list[int]
    query_lens: tuple[int, ...]
    most_drafts: int

    @staticmethod
    def of(scheduled: ScheduledBatch, size: PaddedSize) -> _HostCounts:
        padding = size.requests - scheduled.num_requests
        query_lens = [k + d for k, d in zip(scheduled.num_known, scheduled.num_drafts, strict=True)] + [0] * padding
        starts = [0, *accumulate(query_lens)]
        requests = torch.tensor([
            scheduled.rows + [NULL_ROW] * padding,
            scheduled.num_known + [0] * padding,
            scheduled.num_drafts + [0] * padding,
            scheduled.samples + [False] * padding,
            starts[:-1],
        ])  # fmt: skip
        lens = torch.tensor(query_lens)
        num_tokens = starts[-1]
        request_of = torch.repeat_interleave(torch.arange(size.requests), lens, output_size=num_tokens)
        offset = torch.arange(num_tokens) - requests[4][request_of]
        # Padded tokens belong to no request; they borrow the last one's index and are dead by their offset.
        tail = size.tokens - num_tokens
        tokens = torch.stack([
            torch.cat([request_of, request_of.new_full((tail,), size.requests - 1)]),
            torch.cat([offset, offset.new_full((tail,), size.tokens)]),
        ])  # fmt: skip
        counts = [1 + d if s else 0 for d, s in zip(scheduled.num_drafts, scheduled.samples, strict=True)]
        logits = [
            (r, j, starts[r] + scheduled.num_known[r] - 1 + j) for r, n in enumerate(counts) for j in range(n)
        ]
        return _HostCounts(
            requests, torch.tensor([num_tokens]), tokens, torch.tensor(logits, dtype=torch.int64).reshape(-1, 3).T, counts,
            tuple(query_lens), max(scheduled.num_drafts, default=0),
        )  # fmt: skip
