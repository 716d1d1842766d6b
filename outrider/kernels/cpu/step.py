"""The bookkeeping of a step by the C code: integers of row state, before the forward pass and after the sampler.

Plain torch needs about forty operations on a few integers each, which takes a noticeable share of a step with one token
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.core import NULL_ROW
from outrider.kernels.accept import Accepted
from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.structures import (
    COMMITTED,
    PAGE_TABLE,
    PREPARED_REQUESTS,
    PREPARED_TOKENS,
    PROPOSAL,
    ROW_STATE,
    SAMPLED_STEP,
    STEP_INPUTS,
    STORED_DRAFTS,
)
from outrider.kernels.packet import StepPacket
from outrider.kernels.step import (
    NUM_COUNTS,
    CommittedStep,
    PreparedStep,
    Proposal,
    RowFields,
    VerifiedStep,
)

_PREPARE_ERRORS = {1: "a row, a request or a logit row is out of range", 2: "a page table is too short"}


def takes_prepare_step(packet: StepPacket, state: RowFields, *, max_drafts: int, page_tokens: tuple[int, ...],
                       max_len: int) -> bool:
    return (
        all(map(_is_packed, packet)) and _packed_state(state) is not None and max_drafts <= state.drafts.shape[1]
        and max_len <= state.tokens.shape[1] and len(page_tokens) == len(state.page_tables)
        and all(table.is_cpu and table.dtype is torch.int32 and table.stride(1) == 1 for table in state.page_tables)
    )


def takes_commit_step(sampled: Tensor, bad: Tensor, batch: VerifiedStep, state: RowFields) -> bool:
    rows, num_known, num_drafts, samples, first_logit, drafts = batch
    return (
        all(map(_is_packed, (sampled, rows, num_known, num_drafts, first_logit))) and _packed_state(state) is not None
        and samples.dtype is bad.dtype is torch.bool and samples.stride(0) == bad.stride(0) == 1
        and bad.shape == sampled.shape and drafts.dtype is torch.int64 and drafts.stride(1) == 1
    )


def takes_store_drafts(rows: Tensor, proposals: Sequence[Proposal], goes_on: Tensor, is_on: Tensor, *, vocab_size: int,
                       fills: bool, drafts: Tensor, num_drafts: Tensor, levels: Tensor, counts: Tensor) -> bool:
    num_requests, num_wanted = rows.shape[0], proposals[0].tokens.shape[1]
    return (
        all(map(_is_packed, (rows, is_on, num_drafts, levels, *(proposal.counts for proposal in proposals))))
        and all(map(_is_packed, [p.levels for p in proposals if p.levels is not None]))
        and all(wide.is_cpu and wide.dtype is torch.int64 for wide in (drafts, counts, *(p.tokens for p in proposals)))
        and all(tuple(p.tokens.shape) == (num_requests, num_wanted) and p.counts.shape == rows.shape
                and (p.levels is None or p.levels.shape == rows.shape) for p in proposals)
        and goes_on.dtype is torch.bool and goes_on.stride(0) == drafts.stride(1) == counts.stride(1) == 1
        and num_wanted <= drafts.shape[1] and counts.shape == (num_requests, NUM_COUNTS)
        and is_on.shape[0] == len(proposals)
    )


def _is_packed(x: Tensor) -> bool:
    return x.is_cpu and x.dtype is torch.int64 and x.stride(0) == 1


def _takes_state(state: RowFields) -> bool:
    rules = state.sampling
    single = state.known, state.computed, state.num_drafts, rules.end_len, rules.num_stop_ids
    wide = state.tokens, state.drafts, rules.stop_ids
    return (
        all(map(_is_packed, single)) and all(x.is_cpu and x.dtype is torch.int64 and x.stride(1) == 1 for x in wide)
        and state.alive.dtype is torch.bool and state.alive.stride(0) == 1
    )


_states: WeakKeyDictionary[RowFields, bytes | None] = WeakKeyDictionary()


def _packed_state(state: RowFields) -> bytes | None:
    """Pack the row state for the C code, once. Returns None if the C code does not take it."""
    try:
        return _states[state]
    except KeyError:
        packed = _states[state] = _pack_state(state) if _takes_state(state) else None
        return packed


def _pack_state(state: RowFields) -> bytes:
    rules, tokens, drafts = state.sampling, state.tokens, state.drafts
    return ROW_STATE.pack(
        tokens=tokens.data_ptr(), known=state.known.data_ptr(), computed=state.computed.data_ptr(),
        drafts=drafts.data_ptr(), num_drafts=state.num_drafts.data_ptr(), alive=state.alive.data_ptr(),
        end_len=rules.end_len.data_ptr(), num_stop_ids=rules.num_stop_ids.data_ptr(),
        stop_ids=rules.stop_ids.data_ptr(), rows=tokens.shape[0], length=tokens.shape[1],
        token_stride=tokens.stride(0), draft_stride=drafts.stride(0), stop_stride=rules.stop_ids.stride(0),
        stop_width=rules.stop_ids.shape[1],
    )


def prepare_step(packet: StepPacket, state: RowFields, *, max_drafts: int, page_tokens: tuple[int, ...],
                 max_len: int) -> PreparedStep:
    requests, tokens, logit_rows = (x.shape[0] for x in (packet.rows, packet.request_of, packet.logit_request))
    groups = len(page_tokens)
    sizes = [requests] * 6 + [requests * max_drafts] + [tokens] * (2 + groups) + [logit_rows] * 2
    parts = torch.empty(sum(sizes), dtype=torch.int64).split(sizes)
    computed, num_known, num_drafts, live, lengths, first_logit, flat_drafts, positions, token_ids = parts[:9]
    slots, (logit_row, logit_position) = parts[9 : 9 + groups], parts[9 + groups :]
    widths = [table.shape[1] for table in state.page_tables]
    narrow = [requests, requests, requests + 1, *(requests * width for width in widths)]
    lengths_int32, live_int32, starts_int32, *flat = torch.empty(sum(narrow), dtype=torch.int32).split(narrow)
    own_tables = tuple(table.view(requests, width) for table, width in zip(flat, widths, strict=True))
    samples, drafts = torch.empty(requests, dtype=torch.bool), flat_drafts.view(requests, max_drafts)
    inputs = STEP_INPUTS.pack(
        **{name: getattr(packet, name).data_ptr() for name in _PACKET_FIELDS}, requests=requests, tokens=tokens,
        logit_rows=logit_rows, max_drafts=max_drafts, max_len=max_len, groups=groups, null_row=NULL_ROW,
    )
    tables = b"".join(
        PAGE_TABLE.pack(**{"from": table.data_ptr()}, to=own.data_ptr(), slots=slot.data_ptr(), stride=table.stride(0),
                        width=table.shape[1], page_tokens=size)
        for table, own, slot, size in zip(state.page_tables, own_tables, slots, page_tokens, strict=True)
    )
    error = library().prepare_step(
        _packed_state(state), inputs, tables,
        PREPARED_REQUESTS.pack(
            computed=computed.data_ptr(), num_known=num_known.data_ptr(), num_drafts=num_drafts.data_ptr(),
            live=live.data_ptr(), lengths=lengths.data_ptr(), first_logit=first_logit.data_ptr(),
            drafts=drafts.data_ptr(), samples=samples.data_ptr(), lengths32=lengths_int32.data_ptr(),
            live32=live_int32.data_ptr(), starts32=starts_int32.data_ptr(),
        ),
        PREPARED_TOKENS.pack(positions=positions.data_ptr(), token_ids=token_ids.data_ptr(),
                             logit_row=logit_row.data_ptr(), logit_position=logit_position.data_ptr()),
    )
    if error:
        raise IndexError(f"prepare_step: {_PREPARE_ERRORS[error]}")
    return PreparedStep(
        computed, num_known, num_drafts, live, lengths, samples, drafts, lengths_int32, live_int32, starts_int32,
        first_logit, own_tables, positions, token_ids, tuple(slots), logit_row, logit_position,
    )


_PACKET_FIELDS = ("rows", "num_known", "num_drafts", "samples", "query_starts", "request_of", "offset",
                  "logit_request", "logit_draft")


def commit_step(sampled: Tensor, bad: Tensor, batch: VerifiedStep, state: RowFields) -> CommittedStep:
    requests, max_drafts = batch.drafts.shape
    sizes = [requests, requests, requests, requests, requests * NUM_COUNTS, requests * (max_drafts + 1)]
    run_len, finish, num_computed, num_accepted, counts, run = torch.empty(sum(sizes), dtype=torch.int64).split(sizes)
    counts, run = counts.view(requests, NUM_COUNTS), run.view(requests, max_drafts + 1)
    goes_on = torch.empty(requests, dtype=torch.bool)
    inputs = SAMPLED_STEP.pack(
        sampled=sampled.data_ptr(), rows=batch.rows.data_ptr(), num_known=batch.num_known.data_ptr(),
        num_drafts=batch.num_drafts.data_ptr(), first_logit=batch.first_logit.data_ptr(),
        drafts=batch.drafts.data_ptr(), bad=bad.data_ptr(), samples=batch.samples.data_ptr(), requests=requests,
        logit_rows=sampled.shape[0], max_drafts=max_drafts, draft_stride=batch.drafts.stride(0),
    )
    outputs = COMMITTED.pack(
        run=run.data_ptr(), run_len=run_len.data_ptr(), finish=finish.data_ptr(),
        num_computed=num_computed.data_ptr(), num_accepted=num_accepted.data_ptr(), counts=counts.data_ptr(),
        goes_on=goes_on.data_ptr(),
    )
    if library().commit_step(_packed_state(state), inputs, outputs):
        raise IndexError("commit_step: a row is out of range")
    return CommittedStep(Accepted(run, run_len, num_accepted, finish), num_computed, goes_on, counts)


def store_drafts(rows: Tensor, proposals: Sequence[Proposal], goes_on: Tensor, is_on: Tensor, *, vocab_size: int,
                 fills: bool, drafts: Tensor, num_drafts: Tensor, levels: Tensor, counts: Tensor) -> None:
    offered = b"".join(
        PROPOSAL.pack(tokens=tokens.data_ptr(), counts=own.data_ptr(), request_stride=tokens.stride(0),
                      index_stride=tokens.stride(1), levels=0 if own_levels is None else own_levels.data_ptr())
        for tokens, own, own_levels in proposals
    )
    stored = STORED_DRAFTS.pack(
        rows=rows.data_ptr(), is_on=is_on.data_ptr(), goes_on=goes_on.data_ptr(), drafts=drafts.data_ptr(),
        num_drafts=num_drafts.data_ptr(), levels=levels.data_ptr(), counts=counts.data_ptr(), requests=rows.shape[0],
        num_proposals=len(proposals), num_wanted=proposals[0].tokens.shape[1], num_rows=drafts.shape[0],
        draft_stride=drafts.stride(0), counts_stride=counts.stride(0), vocab_size=vocab_size, fills=int(fills),
    )
    if library().store_drafts(stored, offered):
        raise IndexError("store_drafts: a row is out of range")
