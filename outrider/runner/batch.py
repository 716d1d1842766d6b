"""Builds the ForwardBatch of a step from what the host scheduled and what the rows hold. The only place that does.

The host's part is one array of integers, copied once; the device's part is fixed-shape tensor operations on it, so that
it can be captured. Padding happens here, once, after the plan is final: padded requests have the null row, no tokens
and length 0. Which scheduled tokens are live is known on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from outrider.cache.groups import Group
from outrider.core import NULL_ROW, ScheduledBatch
from outrider.kernels import ops
from outrider.mixers.batch import BatchView, ForwardBatch, LengthBound
from outrider.runner.rows import RowState
from outrider.sample.batch import LogitRows


@dataclass(frozen=True)
class PaddedSize:
    requests: int
    tokens: int
    logit_rows: int | None = None  # as scheduled
    drafts: int | None = None  # most drafts of a request; as scheduled
    has_targets: bool = False  # the integers say which checkpoint each request may write, one at most


@dataclass(frozen=True)
class BatchShape:
    """The host's view of a batch's extents: padded ones, and the scheduled ones inside them."""

    requests: int
    tokens: int
    logit_rows: int
    most_drafts: int
    scheduled_requests: int
    scheduled_tokens: int
    query_lens: tuple[int, ...]  # scheduled tokens per padded request; in a captured batch the most it can be
    logit_counts: tuple[int, ...]  # logit rows per scheduled request
    max_length: LengthBound
    known_lens: tuple[int, ...] = ()  # of query_lens, the known ones; in a captured batch one each
    most_pending: int | None = None  # accepted drafts a row may have to fold; in a captured batch all there may be
    has_targets: bool = False  # see PaddedSize
    longest_short: int | None = None  # a captured batch with prompts: see BatchView

    @property
    def logit_rows_are_tokens(self) -> bool:
        """Logit row l comes from token row l: all requests sample, with one known token each. In a captured batch they
        do; padded logit rows may come from any."""
        counts = zip(self.logit_counts, self.query_lens, strict=False)
        known = self.known_lens[: self.scheduled_requests]
        fits = self.longest_short is None and self.logit_rows <= self.tokens
        return fits and set(known) <= {1} and all(n == length for n, length in counts)

    @property
    def num_ints(self) -> int:
        return 5 * self.requests + 1 + 2 * self.tokens + 3 * self.logit_rows + self.has_targets * self.requests


@dataclass(frozen=True)
class Inputs:
    """The batch, and per request what finish and the drafter need beside it. Request tensors are padded."""

    shape: BatchShape
    batch: ForwardBatch
    computed_before: torch.Tensor  # [requests]
    num_known: torch.Tensor  # [requests] live known tokens
    num_drafts: torch.Tensor  # [requests] live drafts
    drafts: torch.Tensor  # [requests, most drafts]
    samples: torch.Tensor  # [requests] samples in this step and is alive
    logit_token_rows: torch.Tensor  # [logit rows] token row whose hidden state makes the logit row
    logit_rows: LogitRows
    first_logit: torch.Tensor | None = None  # [requests] first logit row of those that sample, where kernels commit
    boundaries: torch.Tensor | None = None  # [requests] of the checkpoint it may write, or -1; the row lists its pages


def step_kernels(device: torch.device) -> ModuleType | None:
    """Kernels that do in two launches what `build_inputs` and `DeviceStep.commit` spell out in torch."""
    return ops.triton_kernels() if device.type == "cuda" else None


def pack_host(scheduled: ScheduledBatch, padded: PaddedSize | None = None) -> tuple[BatchShape, list[int]]:
    """The integers of a batch, in the order that `build_inputs` takes them apart."""
    size = padded or PaddedSize(scheduled.num_requests, scheduled.num_tokens)
    if size.requests < scheduled.num_requests or size.tokens < scheduled.num_tokens:
        raise ValueError(f"padded size {size} is below the scheduled {scheduled.num_requests}, {scheduled.num_tokens}")
    extra = size.requests - scheduled.num_requests
    num_known, num_drafts = scheduled.num_known, scheduled.num_drafts
    query_lens = [k + d for k, d in zip(num_known, num_drafts, strict=True)] + [0] * extra
    starts = [0, *accumulate(query_lens)]
    most_drafts = max(num_drafts, default=0) if size.drafts is None else size.drafts
    counts = [1 + d if s else 0 for d, s in zip(num_drafts, scheduled.samples, strict=True)]
    request_of, offset = _spread(query_lens)
    # Padded tokens belong to no request; they borrow the last one's index and are dead by their offset.
    tail = size.tokens - starts[-1]
    request_of += [size.requests - 1] * tail
    offset += [size.tokens] * tail
    logit_request, logit_draft = _spread(counts)
    if scheduled.num_tokens == len(logit_request):  # all tokens sample: known ones are one each
        logit_token = list(range(len(logit_request)))
    else:
        first = [start + known - 1 for start, known in zip(starts, num_known, strict=False)]
        logit_token = [first[request] + draft for request, draft in zip(logit_request, logit_draft, strict=True)]
    # Padded logit rows go to the cell past the last one (see `accept`).
    tail = (size.logit_rows or len(logit_request)) - len(logit_request)
    logit_request += [size.requests - 1] * tail
    logit_draft += [most_drafts + 1] * tail
    logit_token += [0] * tail
    shape = BatchShape(
        size.requests, size.tokens, len(logit_request), most_drafts, scheduled.num_requests, scheduled.num_tokens,
        tuple(query_lens), tuple(counts), LengthBound(max(scheduled.bounds)), (*num_known, *[0] * extra),
        max(scheduled.num_pending, default=None), size.has_targets,
    )  # fmt: skip
    ints = [
        *scheduled.rows, *[NULL_ROW] * extra, *num_known, *[0] * extra, *num_drafts, *[0] * extra,
        *map(int, scheduled.samples), *[0] * extra, *starts, *request_of, *offset, *logit_request, *logit_draft,
        *logit_token,
    ]  # fmt: skip
    return shape, ints + _boundaries(scheduled, extra) if size.has_targets else ints


def _spread(lens: list[int]) -> tuple[list[int], list[int]]:
    """(owner, offset) of every item, where owner i has lens[i] of them."""
    if sum(lens) == len(lens) and all(lens):  # one each: decoding
        return list(range(len(lens))), [0] * len(lens)
    owner: list[int] = []
    offset: list[int] = []
    for index, length in enumerate(lens):
        owner += [index] * length
        offset += range(length)
    return owner, offset


def _boundaries(scheduled: ScheduledBatch, extra: int) -> list[int]:
    by_row = {write.row: write.boundary for write in scheduled.checkpoints}
    if len(by_row) < len(scheduled.checkpoints):
        raise ValueError("a request has several checkpoints, and a batch of this shape has room for one each")
    return [by_row.get(row, -1) for row in scheduled.rows] + [-1] * extra


def build_inputs(shape: BatchShape, ints: torch.Tensor, state: RowState, groups: tuple[Group, ...],
                 max_len: int) -> Inputs:
    """`ints` [shape.num_ints] on the device, as `pack_host` made them."""
    assert ints.shape == (shape.num_ints,)
    requests, tokens, logits = shape.requests, shape.tokens, shape.logit_rows
    rows, num_known_sched, num_drafts_sched, samples_sched = ints[: 4 * requests].view(4, requests)
    query_starts = ints[4 * requests : 5 * requests + 1]
    request_of, offset = ints[5 * requests + 1 : 5 * requests + 1 + 2 * tokens].view(2, tokens)
    first = 5 * requests + 1 + 2 * tokens
    logit_request, logit_draft, logit_token_rows = ints[first : first + 3 * logits].view(3, logits)
    boundaries = ints[first + 3 * logits :] if shape.has_targets else None
    kernels = step_kernels(ints.device)
    if kernels is not None:
        scheduled = kernels.Scheduled(rows, num_known_sched, num_drafts_sched, samples_sched, query_starts, request_of,
                                      offset, logit_request, logit_draft)
        made = kernels.prepare_step(scheduled, state, most_drafts=shape.most_drafts, max_len=max_len,
                                    page_tokens=tuple(group.page_tokens for group in groups))
        return _from_kernels(shape, scheduled, made, logit_token_rows, boundaries)

    known, computed = state.known[rows], state.computed[rows]
    alive = state.alive[rows] & (rows != NULL_ROW)
    samples = alive & (samples_sched > 0)
    num_known = torch.where(alive, num_known_sched, 0)
    room = (state.sampling.end_len[rows] - known - 1).clamp_min(0)  # drafts past the end could never be accepted
    num_drafts = torch.minimum(torch.minimum(num_drafts_sched, state.num_drafts[rows]), room)
    num_drafts = torch.where(samples, num_drafts, 0)
    live = num_known + num_drafts
    drafts = state.drafts[rows][:, : shape.most_drafts]

    # Token rows: known tokens first, then drafts; dead ones repeat a valid position and write nothing.
    token_live, token_known = live[request_of], num_known[request_of]
    is_live = offset < token_live
    positions = (computed[request_of] + torch.minimum(offset, (token_live - 1).clamp_min(0))).clamp_max(max_len - 1)
    token_row = rows[request_of]
    token_ids = state.tokens[token_row, positions]
    if shape.most_drafts:
        draft_index = (offset - token_known).clamp(0, shape.most_drafts - 1)
        token_ids = torch.where(offset < token_known, token_ids, state.drafts[token_row, draft_index])
    tables = tuple(table[rows] for table in state.page_tables)
    view = BatchView(
        num_requests=requests, num_tokens=tokens, query_lens=shape.query_lens, max_length=shape.max_length, rows=rows,
        query_starts=query_starts, lengths=torch.where(alive, computed + live, 0), live=live,
        token_ids=torch.where(is_live, token_ids, 0), positions=positions, request_of=request_of, page_tables=tables,
        token_slots=tuple(_slots(table, group, request_of, positions, is_live)
                          for table, group in zip(tables, groups, strict=True)),
    )  # fmt: skip
    batch = ForwardBatch(view, _cut(view, shape.scheduled_requests, shape.scheduled_tokens))
    logit_rows = LogitRows(logit_request, rows[logit_request], logit_draft, known[logit_request] + logit_draft,
                           list(shape.logit_counts))
    return Inputs(shape, batch, computed, num_known, num_drafts, drafts, samples, logit_token_rows, logit_rows,
                  boundaries=boundaries)


def _from_kernels(shape: BatchShape, scheduled: Any, made: Any, logit_token_rows: torch.Tensor,
                  boundaries: torch.Tensor | None) -> Inputs:
    """Of what the kernels were given and what they made (`kernels.triton.step`)."""
    view = BatchView(
        num_requests=shape.requests, num_tokens=shape.tokens, query_lens=shape.query_lens, max_length=shape.max_length,
        rows=scheduled.row, query_starts=scheduled.query_starts, lengths=made.lengths, live=made.live,
        token_ids=made.token_ids, positions=made.positions, request_of=scheduled.request_of,
        page_tables=made.page_tables, token_slots=made.slots,
        int32_copies=tuple(zip((made.lengths, made.live, scheduled.query_starts), made.narrow, strict=True)),
        longest_short=shape.longest_short,
    )  # fmt: skip
    batch = ForwardBatch(view, _cut(view, shape.scheduled_requests, shape.scheduled_tokens))
    logit_rows = LogitRows(scheduled.logit_request, made.logit_row, scheduled.logit_draft, made.logit_position,
                           list(shape.logit_counts))
    return Inputs(shape, batch, made.computed, made.num_known, made.num_drafts, made.drafts, made.samples,
                  logit_token_rows, logit_rows, made.first_logit, boundaries)


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
