"""Builds the ForwardBatch of a step from the batch that the host scheduled and the state of its rows on the device.

The host packs its part into one packet of integers, which is copied once. The device then runs tensor operations of
fixed shape on it, which can be captured. Batches are padded only here: padded requests have the null row, no tokens and
length 0. Only the device knows which of the scheduled tokens are live, since a request may have ended in a step that
the host has not read yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, NamedTuple

import torch

from outrider.cache.groups import Group
from outrider.core import ScheduledBatch
from outrider.core.draft_confidence import DraftSharing
from outrider.core.lazy_exports import LateModule
from outrider.kernels import ops
from outrider.kernels.packet import StepExtents, StepPacket, pack, unpack
from outrider.kernels.step import PreparedStep
from outrider.mixers.batch import (
    BatchView,
    DecodeQueries,
    ExactQueries,
    ForwardBatch,
    LengthBound,
    MixedQueries,
)
from outrider.runner.row_state import RowState
from outrider.sample.sampling_batch import LogitRows

if TYPE_CHECKING:
    from outrider.drafters.view_of import ViewOf
    from outrider.runner import admitted_rows as admitted
else:
    admitted = LateModule("outrider.runner.admitted_rows")


@dataclass(frozen=True)
class PaddedSize:
    """The numbers of requests and tokens that an uncaptured batch is padded to."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class EagerShape(StepExtents):
    """The sizes of an uncaptured step. They are exact, because the step is made for one known batch."""

    scheduled_requests: int
    scheduled_tokens: int
    queries: ExactQueries  # tokens of each padded request; their sum is the scheduled tokens
    known: ExactQueries  # known tokens of each padded request
    logit_counts: tuple[int, ...]  # logit rows of each scheduled request
    max_length: LengthBound
    max_pending: int  # accepted drafts that a row may have to fold

    @cached_property
    def logit_rows_are_tokens(self) -> bool:
        """Whether logit row l comes from token row l. This holds if every request samples and has one known token."""
        lens, known = self.queries.lens, self.known.lens[: self.scheduled_requests]
        return set(known) <= {1} and all(n == m for n, m in zip(self.logit_counts, lens, strict=False))


@dataclass(frozen=True)
class CapturedShape(StepExtents):
    """The sizes of a captured step, which serves every batch that fits into them. A captured step is made without its
    batches, so its context lengths are bounded by the longest possible one."""

    queries: DecodeQueries | MixedQueries
    known: DecodeQueries | MixedQueries  # the host's knowledge of the known tokens alone
    max_length: LengthBound
    max_pending: int  # accepted drafts that a row may have to fold
    takes_checkpoints: bool  # every request may write one checkpoint

    @classmethod
    def decoding(cls, requests: int, tokens: int, max_drafts: int, *, window: int, max_len: int,
                 takes_checkpoints: bool = False, shares_pages: bool = False) -> CapturedShape:
        """Make the shape of a decode step: every request has one known token and samples. window: the most accepted
        drafts that a row may have to fold into its recurrent state."""
        return cls(requests, tokens, tokens, max_drafts, DecodeQueries(1 + max_drafts, shares_pages), DecodeQueries(1),
                   LengthBound(max_len), window, takes_checkpoints)

    @classmethod
    def with_prompts(cls, requests: int, tokens: int, max_drafts: int, *, window: int, max_len: int,
                     takes_checkpoints: bool = False) -> CapturedShape:
        """Make the shape of a step in which requests have any number of known tokens."""
        queries = MixedQueries(1 + max_drafts)
        return cls(requests, tokens, requests * (1 + max_drafts), max_drafts, queries, queries, LengthBound(max_len),
                   window, takes_checkpoints)

    @property
    def logit_rows_are_tokens(self) -> bool:
        """Whether logit row l comes from token row l, as in decode steps. Logit rows of padding may come from any token
        row."""
        return isinstance(self.queries, DecodeQueries)


StepShape = EagerShape | CapturedShape


def shares_drafts(shape: StepShape) -> bool:
    """Whether a step of this shape can choose each request's number of drafts on the device, if the batch asks for it.
    Other steps check the number of drafts that was scheduled for each request."""
    return isinstance(shape, CapturedShape) and shape.logit_rows_are_tokens and shape.max_drafts > 0


@dataclass(frozen=True)
class Inputs:
    """The inputs of a step: the batch, and data of each request for sampling and for the drafter. Request tensors are
    padded."""

    shape: StepShape
    batch: ForwardBatch
    computed_before: torch.Tensor  # [requests]
    num_known: torch.Tensor  # [requests] live known tokens
    num_drafts: torch.Tensor  # [requests] live drafts
    drafts: torch.Tensor  # [requests, max drafts]
    samples: torch.Tensor  # [requests] samples in this step and is alive
    logit_token_rows: torch.Tensor  # [logit rows] token row whose hidden state makes the logit row
    logit_rows: LogitRows
    first_logit: torch.Tensor  # [requests] first logit row; undefined where the request has none
    boundaries: torch.Tensor  # [requests] of the checkpoint it may write, or -1; the row lists its pages


class PackedBatch(NamedTuple):
    """The shape of an uncaptured step, and the integers that the host packed for it. This is all that can be prepared
    before the step reads its rows."""

    shape: EagerShape
    ints: torch.Tensor  # on the device, as `pack_eager` made them


def pack_eager(scheduled: ScheduledBatch, padded: PaddedSize) -> tuple[EagerShape, list[int]]:
    """Make the shape and the packed integers of a batch that runs uncaptured. The integers do not include recurrent
    checkpoints, which the step's plan lists."""
    if padded.requests < scheduled.num_requests or padded.tokens < scheduled.num_tokens:
        raise ValueError(f"a batch was padded to {padded.requests} requests and {padded.tokens} tokens, and has more "
                         f"({scheduled.num_requests} and {scheduled.num_tokens}). This is a bug: please report it")
    query_lens, logit_counts = _lens(scheduled)
    extra = (0,) * (padded.requests - scheduled.num_requests)
    shape = EagerShape(
        padded.requests, padded.tokens, sum(logit_counts), max(scheduled.num_drafts, default=0),
        scheduled.num_requests, sum(query_lens), ExactQueries((*query_lens, *extra)),
        ExactQueries((*scheduled.num_known, *extra)), tuple(logit_counts),
        LengthBound(max(scheduled.bounds, default=0)), max(scheduled.cache.num_pending, default=0),
    )
    return shape, _packed(scheduled, shape, query_lens, logit_counts, [])


def pack_captured(scheduled: ScheduledBatch, shape: CapturedShape) -> list[int]:
    """Pack the integers of a batch for the captured step of this shape."""
    boundaries: list[int] = []
    if shape.takes_checkpoints:
        by_row = {write.row: write.boundary for write in scheduled.cache.checkpoints}
        if len(by_row) < len(scheduled.cache.checkpoints):
            raise ValueError("a request has several checkpoints in one step, and a captured step has room for one for "
                             "each request. This is a bug: please report it")
        boundaries = [by_row.get(row, -1) for row in scheduled.rows]
    sharing = scheduled.drafting.sharing if shares_drafts(shape) else None
    if sharing is None:
        return _packed(scheduled, shape, *_lens(scheduled), boundaries)
    # The device lays out the token rows of drafts (`share_drafts`).
    return _packed(scheduled, shape, scheduled.num_known, scheduled.num_known, boundaries, sharing)


def _lens(scheduled: ScheduledBatch) -> tuple[list[int], list[int]]:
    """Return the number of tokens, and the number of logit rows, of each scheduled request."""
    query_lens = [k + d for k, d in zip(scheduled.num_known, scheduled.num_drafts, strict=True)]
    return query_lens, [1 + d if s else 0 for d, s in zip(scheduled.num_drafts, scheduled.samples, strict=True)]


def _packed(scheduled: ScheduledBatch, extents: StepExtents, query_lens: list[int], logit_counts: list[int],
            boundaries: list[int], sharing: DraftSharing | None = None) -> list[int]:
    starts = [0, *accumulate(query_lens)]
    num_tokens = starts[-1]
    request_of, offset = _spread(query_lens)
    logit_request, logit_draft = (request_of, offset) if logit_counts == query_lens else _spread(logit_counts)
    if num_tokens == len(logit_request):  # all tokens sample: known ones are one each
        logit_token = list(range(num_tokens))
    else:
        first = [start + known - 1 for start, known in zip(starts, scheduled.num_known, strict=False)]
        logit_token = [first[request] + draft for request, draft in zip(logit_request, logit_draft, strict=True)]
    starts += [num_tokens] * (extents.requests - scheduled.num_requests)
    shared = ([sharing.total], sharing.weights, sharing.chances) if sharing is not None else ([0], [], [])
    return pack(extents, (scheduled.rows, scheduled.num_known, scheduled.num_drafts, [*map(int, scheduled.samples)],
                          starts, request_of, offset, logit_request, logit_draft, logit_token, boundaries, *shared))


def _spread(lens: list[int]) -> tuple[list[int], list[int]]:
    """Return, for every item, the index of its owner and its offset there. Owner i has lens[i] items, with offsets from
    0 on."""
    if sum(lens) == len(lens) and all(lens):  # one each: decoding
        return list(range(len(lens))), [0] * len(lens)
    return list(chain.from_iterable(map(repeat, range(len(lens)), lens))), list(chain.from_iterable(map(range, lens)))


def build_inputs(shape: StepShape, ints: torch.Tensor, state: RowState, groups: tuple[Group, ...],
                 max_len: int) -> Inputs:
    """Make a step's inputs on the device, from the packed integers of `pack_eager` or `pack_captured`."""
    packet = unpack(shape, ints)
    if shares_drafts(shape):
        ops.share_drafts(packet, state, max_drafts=shape.max_drafts)
    page_tokens = tuple(group.page_tokens for group in groups)
    made = ops.prepare_step(packet, state, max_drafts=shape.max_drafts, page_tokens=page_tokens, max_len=max_len)
    logit_rows = LogitRows(packet.logit_request, made.logit_row, packet.logit_draft, made.logit_position)
    return Inputs(shape, _batch(shape, packet, made), made.computed, made.num_known, made.num_drafts, made.drafts,
                  made.samples, packet.logit_token, logit_rows, made.first_logit, packet.boundaries)


def _batch(shape: StepShape, packet: StepPacket, made: PreparedStep) -> ForwardBatch:
    view = BatchView(
        num_requests=shape.requests, num_tokens=shape.tokens, queries=shape.queries, max_length=shape.max_length,
        rows=packet.rows, query_starts=packet.query_starts, lengths=made.lengths, live=made.live,
        query_starts_int32=made.query_starts_int32, lengths_int32=made.lengths_int32, live_int32=made.live_int32,
        token_ids=made.token_ids, positions=made.positions, request_of=packet.request_of, page_tables=made.page_tables,
        token_slots=made.slots,
    )
    return ForwardBatch(view, _cut(view, shape) if isinstance(shape, EagerShape) else view)


def _cut(view: BatchView, shape: EagerShape) -> BatchView:
    """Cut padding off the view, so that it has only the batch's own requests and tokens."""
    requests, tokens = shape.scheduled_requests, shape.scheduled_tokens
    if (requests, tokens) == (shape.requests, shape.tokens):
        return view
    return BatchView(
        num_requests=requests, num_tokens=tokens, queries=ExactQueries(shape.queries.lens[:requests]),
        max_length=view.max_length, rows=view.rows[:requests], query_starts=view.query_starts[: requests + 1],
        lengths=view.lengths[:requests], live=view.live[:requests],
        query_starts_int32=view.query_starts_int32[: requests + 1], lengths_int32=view.lengths_int32[:requests],
        live_int32=view.live_int32[:requests], token_ids=view.token_ids[:tokens], positions=view.positions[:tokens],
        request_of=view.request_of[:tokens], page_tables=tuple(table[:requests] for table in view.page_tables),
        token_slots=tuple(slots[:tokens] for slots in view.token_slots),
    )


def first_token_rows(state: RowState) -> ViewOf:
    """Make the object that makes batches of admitted rows, for drafters."""
    return admitted.FirstTokenRows(state)


def dead_first_rows(state: RowState) -> ViewOf:
    return admitted.DeadFirstRows(state)


def logit_view(inputs: Inputs) -> BatchView:
    """Make a view with one token row for each logit row of a step. Its cache slots are -1, because the step's own view
    writes the keys and values of these tokens."""
    view, at, shape = inputs.batch.padded, inputs.logit_rows, inputs.shape
    device, requests = view.rows.device, view.num_requests
    owner = torch.where(at.draft_index > shape.max_drafts, requests, at.request)  # padded rows belong to no request
    starts = torch.searchsorted(owner, torch.arange(requests + 1, device=device))
    live = torch.where(inputs.samples, 1 + inputs.num_drafts, 0)
    nowhere = torch.full_like(owner, -1)
    return replace(
        view, num_tokens=shape.logit_rows, queries=DecodeQueries(1 + shape.max_drafts), query_starts=starts,
        query_starts_int32=starts.int(), live=live, live_int32=live.int(), request_of=at.request,
        token_ids=view.token_ids[inputs.logit_token_rows], positions=view.positions[inputs.logit_token_rows],
        token_slots=(nowhere,) * len(view.token_slots),
    )
