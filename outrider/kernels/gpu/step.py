"""The bookkeeping of a step in two launches: `prepare_step` before the forward pass, `commit_step` after the sampler.

`kernels.step` is the specification, integer for integer. Scheduled integers and row state come in, tensors of the batch
go out. This file does not depend on models or caches. No program reads what another program of the launch writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.core import NULL_ROW, Axis, Finish
from outrider.kernels.accept import Accepted
from outrider.kernels.gpu.common import cdiv, next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.packet import StepPacket, packet_axes
from outrider.kernels.step import NUM_COUNTS, CommittedStep, PreparedStep, RowFields, VerifiedStep

_BLOCK = 128  # requests, token rows or logit rows of one program
_COLUMNS = 1024  # columns of a page table that one program copies
_NULL_ROW = tl.constexpr(NULL_ROW)
_NO, _STOP = tl.constexpr(int(Finish.NO)), tl.constexpr(int(Finish.STOP))
_LENGTH, _ERROR = tl.constexpr(int(Finish.LENGTH)), tl.constexpr(int(Finish.ERROR))


class _State(NamedTuple):
    tokens: torch.Tensor
    known: torch.Tensor
    computed: torch.Tensor
    alive: torch.Tensor
    drafts: torch.Tensor
    num_drafts: torch.Tensor
    end_len: torch.Tensor
    num_stop_ids: torch.Tensor
    stop_ids: torch.Tensor


class _Out(NamedTuple):
    ints: torch.Tensor  # [5, requests] computed, num_known, num_drafts, live, lengths
    narrow: torch.Tensor  # [3 * requests + 1] int32: lengths, live, query starts
    samples: torch.Tensor
    drafts: torch.Tensor
    first_logit: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    logit_row: torch.Tensor
    logit_position: torch.Tensor


@triton.jit
def _live_counts(packet, state, request, valid):
    """Return (row, known, alive, samples, live known tokens, live drafts) of requests. Every token row computes them
    again, because these loads are cheaper than a second launch."""
    row = tl.load(packet.rows + request, mask=valid, other=_NULL_ROW)
    known = tl.load(state.known + row, mask=valid, other=0)
    alive = (tl.load(state.alive + row, mask=valid, other=0) != 0) & (row != _NULL_ROW)
    samples = alive & (tl.load(packet.samples + request, mask=valid, other=0) > 0)
    num_known = tl.where(alive, tl.load(packet.num_known + request, mask=valid, other=0), 0)
    # Drafts past the end could never be accepted.
    room = tl.maximum(tl.load(state.end_len + row, mask=valid, other=0) - known - 1, 0)
    drafts = tl.load(packet.num_drafts + request, mask=valid, other=0)
    drafts = tl.minimum(tl.minimum(drafts, tl.load(state.num_drafts + row, mask=valid, other=0)), room)
    return row, known, alive, samples, num_known, tl.where(samples, drafts, 0)


@triton.jit
def _prepare_requests(
    block, packet, state, out, requests, max_drafts, draft_stride, BLOCK: tl.constexpr, DRAFTS: tl.constexpr
):
    request = block * BLOCK + tl.arange(0, BLOCK)
    valid = request < requests
    row, known, alive, samples, num_known, num_drafts = _live_counts(packet, state, request, valid)
    computed = tl.load(state.computed + row, mask=valid, other=0)
    live = num_known + num_drafts
    length = tl.where(alive, computed + live, 0)
    tl.store(out.ints + request, computed, mask=valid)
    tl.store(out.ints + requests + request, num_known, mask=valid)
    tl.store(out.ints + 2 * requests + request, num_drafts, mask=valid)
    tl.store(out.ints + 3 * requests + request, live, mask=valid)
    tl.store(out.ints + 4 * requests + request, length, mask=valid)
    tl.store(out.samples + request, samples, mask=valid)
    tl.store(out.narrow + request, length.to(tl.int32), mask=valid)
    tl.store(out.narrow + requests + request, live.to(tl.int32), mask=valid)
    is_start = request <= requests
    start = tl.load(packet.query_starts + request, mask=is_start, other=0)
    tl.store(out.narrow + 2 * requests + request, start.to(tl.int32), mask=is_start)
    index = tl.arange(0, DRAFTS)[None, :]
    is_draft = valid[:, None] & (index < max_drafts)
    draft = tl.load(state.drafts + row[:, None] * draft_stride + index, mask=is_draft, other=0)
    tl.store(out.drafts + request[:, None] * max_drafts + index, draft, mask=is_draft)


@triton.jit
def _prepare_tokens(
    block, packet, state, tables, slots, out, tokens, max_len, token_stride, draft_stride, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Prepare one block of token rows: a request's known tokens first, then its drafts. Dead token rows repeat a valid
    position and write nothing."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    valid = at < tokens
    request = tl.load(packet.request_of + at, mask=valid, other=0)
    offset = tl.load(packet.offset + at, mask=valid, other=0)
    row, known, alive, samples, num_known, num_drafts = _live_counts(packet, state, request, valid)
    live = num_known + num_drafts
    is_live = valid & (offset < live)
    is_known = offset < num_known
    computed = tl.load(state.computed + row, mask=valid, other=0)
    position = tl.minimum(computed + tl.minimum(offset, tl.maximum(live - 1, 0)), max_len - 1)
    token = tl.load(state.tokens + row * token_stride + position, mask=is_live & is_known, other=0)
    index = offset - num_known
    draft = tl.load(state.drafts + row * draft_stride + index, mask=is_live & (index >= 0), other=0)
    tl.store(out.positions + at, position, mask=valid)
    tl.store(out.token_ids + at, tl.where(is_known, token, draft), mask=valid)
    for group in tl.static_range(GROUPS):
        page = tl.load(tables[group] + row * table_strides[group] + position // PAGES[group], mask=is_live, other=0)
        slot = page.to(tl.int64) * PAGES[group] + position % PAGES[group]
        tl.store(slots[group] + at, tl.where(is_live, slot, -1), mask=valid)


@triton.jit
def _prepare_logit_rows(block, packet, state, out, logit_rows, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    valid = at < logit_rows
    request = tl.load(packet.logit_request + at, mask=valid, other=0)
    draft = tl.load(packet.logit_draft + at, mask=valid, other=0)
    row, known, alive, samples, num_known, num_drafts = _live_counts(packet, state, request, valid)
    # The sampler does as little as it can for rows whose results are not read.
    tl.store(out.logit_row + at, tl.where(samples & (draft <= num_drafts), row, _NULL_ROW), mask=valid)
    tl.store(out.logit_position + at, known + draft, mask=valid)
    tl.store(out.first_logit + request, at.to(tl.int64), mask=valid & (draft == 0))


@triton.jit
def _copy_tables(
    request, tile, packet, tables, own_tables, widths, table_strides, GROUPS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.load(packet.rows + request)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    for group in tl.static_range(GROUPS):
        valid = column < widths[group]
        page = tl.load(tables[group] + row * table_strides[group] + column, mask=valid, other=0)
        tl.store(own_tables[group] + request.to(tl.int64) * widths[group] + column, page, mask=valid)


# Sizes of a batch, and tensors that may begin anywhere in a buffer: no reason to compile anew.
_VARYING = ["requests", "tokens", "logit_rows", "max_drafts", "first_token_block", "first_logit_block", "first_copy"]
_SLICES = [*StepPacket._fields, "sampled", "bad"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _prepare_kernel(
    rows, num_known, num_drafts, samples, query_starts, request_of, offset, logit_request, logit_draft, logit_token,
    boundaries, num_shared, weights, chances, state, tables, out, slots, own_tables, requests, tokens, logit_rows,
    max_drafts, first_token_block, first_logit_block, first_copy, tiles, max_len, token_stride, draft_stride, widths,
    table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """The grid has, one after the other, programs for blocks of requests, token rows, logit rows and tiles of page
    tables."""
    packet = StepPacket(
        rows, num_known, num_drafts, samples, query_starts, request_of, offset, logit_request, logit_draft, logit_token,
        boundaries, num_shared, weights, chances,
    )
    program = tl.program_id(0)
    if program < first_token_block:
        _prepare_requests(program, packet, state, out, requests, max_drafts, draft_stride, BLOCK, DRAFTS)
    elif program < first_logit_block:
        _prepare_tokens(
            program - first_token_block, packet, state, tables, slots, out, tokens, max_len, token_stride,
            draft_stride, table_strides, PAGES, GROUPS, BLOCK,
        )
    elif program < first_copy:
        _prepare_logit_rows(program - first_logit_block, packet, state, out, logit_rows, BLOCK)
    else:
        copy = program - first_copy
        _copy_tables(copy // tiles, copy % tiles, packet, tables, own_tables, widths, table_strides, GROUPS, COLUMNS)


@triton.jit
def _first(found, index, NONE: tl.constexpr):
    return tl.min(tl.where(found, index, NONE), axis=0)


@triton.jit
def _compare_drafts(
    sampled, bad, first_logit, drafts, state, request, row, num_drafts, samples, max_drafts, stop_width, stop_stride,
    RUN: tl.constexpr, STOPS: tl.constexpr,
):
    """Return (sampled tokens [RUN], index of the first token without an equal draft, index of the first stop id, index
    of the first bad logit row). An index is RUN if there is none."""
    index = tl.arange(0, RUN).to(tl.int64)
    # Logit rows past the live drafts are never reached, and a request that does not sample may have none.
    reached = samples & (index <= num_drafts)
    logit_row = tl.load(first_logit + request, mask=samples, other=0) + index
    chosen = tl.load(sampled + logit_row, mask=reached, other=0)
    is_bad = reached & (tl.load(bad + logit_row, mask=reached, other=0) != 0)
    draft = tl.load(drafts + request * max_drafts + index, mask=index < num_drafts, other=0)
    stop_index = tl.arange(0, STOPS)
    is_id = stop_index < tl.minimum(tl.load(state.num_stop_ids + row), stop_width)
    stop_id = tl.load(state.stop_ids + row * stop_stride + stop_index, mask=is_id, other=0)
    hits = (chosen[:, None] == stop_id[None, :]) & is_id[None, :]
    accepted = _first((draft != chosen) | (index >= num_drafts), index, RUN)
    first_stop = _first(tl.max(hits.to(tl.int32), axis=1) > 0, index, RUN)
    return chosen, accepted, first_stop, _first(is_bad, index, RUN)


@triton.jit
def _end_run(accepted, first_stop, first_bad, room, samples):
    """Return (length of the run, how it finishes, accepted drafts in it). room: number of tokens up to the request's
    end."""
    run_len = tl.minimum(tl.minimum(accepted, first_stop) + 1, room)
    finish = tl.where(run_len >= room, _LENGTH, _NO)
    finish = tl.where(first_bad < run_len, _ERROR, finish)
    run_len = tl.minimum(run_len, first_bad)
    finish = tl.where(first_stop < run_len, _STOP, finish)
    run_len = tl.where(samples, run_len, 0)
    finish = tl.where(samples, finish, _NO)
    return run_len, finish, tl.minimum(accepted, tl.maximum(run_len - 1, 0))


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _commit_kernel(
    sampled, bad, rows, num_known, num_drafts, samples, first_logit, drafts, state, out, counts, run, goes_on,
    requests, max_drafts, length, stop_width, token_stride, stop_stride,
    RUN: tl.constexpr, STOPS: tl.constexpr, COUNTS: tl.constexpr,
):
    """Each program accepts drafts and commits for one request. It has one warp, because a second warp could read
    lengths that the first has already changed. Only the null row has several requests: padded ones, without tokens or
    sampling."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    num_known = tl.load(num_known + request)
    num_drafts = tl.load(num_drafts + request)
    samples = tl.load(samples + request) != 0
    known = tl.load(state.known + row)
    room = tl.maximum(tl.load(state.end_len + row) - known, 0)
    chosen, accepted, first_stop, first_bad = _compare_drafts(
        sampled, bad, first_logit, drafts, state, request, row, num_drafts, samples, max_drafts, stop_width,
        stop_stride, RUN, STOPS,
    )
    run_len, finish, num_accepted = _end_run(accepted, first_stop, first_bad, room, samples)
    num_computed = num_known + num_accepted

    index = tl.arange(0, RUN).to(tl.int64)
    in_run = index < run_len
    tl.store(run + request * (max_drafts + 1) + index, tl.where(in_run, chosen, 0), mask=index <= max_drafts)
    tl.store(out + request, run_len)
    tl.store(out + requests + request, finish)
    tl.store(out + 2 * requests + request, num_computed)
    tl.store(out + 3 * requests + request, num_accepted)
    tl.store(goes_on + request, (run_len > 0) & (finish == _NO))
    tl.store(counts + request * COUNTS, run_len)
    tl.store(counts + request * COUNTS + 1, finish)
    tl.store(counts + request * COUNTS + 2, num_computed)
    tl.store(counts + request * COUNTS + 3, num_drafts)
    tl.store(counts + request * COUNTS + 4, num_accepted)
    for column in tl.static_range(5, COUNTS):  # of drafts, which are not proposed yet
        tl.store(counts + request * COUNTS + column, 0)

    is_row = row != _NULL_ROW
    tl.store(state.tokens + row * token_stride + known + index, chosen, mask=in_run & (known + index < length))
    tl.store(state.known + row, known + run_len, mask=is_row)
    tl.store(state.computed + row, tl.load(state.computed + row) + num_computed, mask=is_row)
    tl.store(state.alive + row, finish == _NO, mask=is_row & samples)
    tl.store(state.num_drafts + row, 0)  # consumed, or stale


def _state(name: str, rows: RowFields) -> _State:
    sampling, num_rows, device = rows.sampling, rows.known.shape[0], rows.known.device
    state = _State(
        rows.tokens, rows.known, rows.computed, rows.alive, rows.drafts, rows.num_drafts, sampling.end_len,
        sampling.num_stop_ids, sampling.stop_ids,
    )
    for field, tensor in zip(state._fields, state, strict=True):
        shape = (num_rows, None) if field in ("tokens", "drafts", "stop_ids") else (num_rows,)
        require_tensor(name, f"rows.{field}", tensor, shape, device, (torch.bool if field == "alive" else torch.int64,))
    return state


def prepare_step(
    packet: StepPacket, rows: RowFields, *, max_drafts: int, page_tokens: tuple[int, ...], max_len: int
) -> PreparedStep:
    """Build the tensors of a batch from row state in one launch; see `kernels.step.prepare_step` for the arguments."""
    name, device = "prepare_step", packet.rows.device
    requests, tokens, logits = (t.shape[0] for t in (packet.rows, packet.request_of, packet.logit_request))
    extents = {Axis.REQUESTS: requests, Axis.STARTS: requests + 1, Axis.TOKENS: tokens, Axis.LOGIT_ROWS: logits,
               Axis.BATCHES: 1, Axis.CHANCES: packet.chances.shape[0]}
    for field, tensor, axis in zip(packet._fields, packet, packet_axes(), strict=True):
        require_tensor(name, f"packet.{field}", tensor, (extents[axis],), device, (torch.int64,))
    state, tables = _state(name, rows), tuple(rows.page_tables)
    require(len(tables) == len(page_tokens), name, "page_tokens", f"are {len(page_tokens)} for {len(tables)} tables")
    for table in tables:
        require_tensor(name, "rows.page_tables", table, (rows.known.shape[0], None), device, (torch.int32,))
    require(max_drafts <= rows.drafts.shape[1], name, "max_drafts", f"is {max_drafts}, more than the rows hold")
    require(max_len <= rows.tokens.shape[1], name, "max_len", f"is {max_len}, more than the rows hold")

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    widths = tuple(table.shape[1] for table in tables)
    own_tables = tuple(empty(requests, width, dtype=torch.int32) for width in widths)
    slots = tuple(empty(tokens) for _ in tables)
    out = _Out(
        empty(5, requests), empty(3 * requests + 1, dtype=torch.int32), empty(requests, dtype=torch.bool),
        empty(requests, max_drafts), empty(requests), empty(tokens), empty(tokens), empty(logits), empty(logits),
    )
    tiles = cdiv(max(widths, default=0), _COLUMNS)
    first_token_block = cdiv(requests + 1, _BLOCK)
    first_logit_block = first_token_block + cdiv(tokens, _BLOCK)
    first_copy = first_logit_block + cdiv(logits, _BLOCK)
    _prepare_kernel[(first_copy + requests * tiles,)](
        *packet, state, tables, out, slots, own_tables, requests, tokens, logits, max_drafts, first_token_block,
        first_logit_block, first_copy, tiles, max_len, state.tokens.stride(0), state.drafts.stride(0), widths,
        tuple(table.stride(0) for table in tables), PAGES=page_tokens, GROUPS=len(tables),
        DRAFTS=next_power_of_two(state.drafts.shape[1]), BLOCK=_BLOCK, COLUMNS=_COLUMNS, num_warps=4,
    )
    computed, num_known, num_drafts, live, lengths = out.ints
    lengths_int32, live_int32, query_starts_int32 = out.narrow.split((requests, requests, requests + 1))
    return PreparedStep(
        computed, num_known, num_drafts, live, lengths, out.samples, out.drafts, lengths_int32, live_int32,
        query_starts_int32, out.first_logit, own_tables, out.positions, out.token_ids, slots, out.logit_row,
        out.logit_position,
    )


def commit_step(sampled: torch.Tensor, bad: torch.Tensor, batch: VerifiedStep, rows: RowFields) -> CommittedStep:
    """Accept drafts and update the rows in one launch; see `kernels.step.commit_step` for the arguments."""
    name, device, int64 = "commit_step", sampled.device, (torch.int64,)
    requests, max_drafts = batch.drafts.shape
    require_tensor(name, "sampled", sampled, (None,), device, int64)
    require_tensor(name, "bad", bad, tuple(sampled.shape), device, (torch.bool,))
    for field, tensor in zip(batch._fields[:-1], batch[:-1], strict=True):
        dtype = torch.bool if field == "samples" else torch.int64
        require_tensor(name, f"batch.{field}", tensor, (requests,), device, (dtype,))
    require_tensor(name, "batch.drafts", batch.drafts, (requests, max_drafts), device, int64, 2 if max_drafts else 1)
    state = _state(name, rows)
    require(max_drafts <= rows.drafts.shape[1], name, "batch.drafts", f"has {max_drafts} columns, more than the rows")
    out = torch.empty(4, requests, dtype=torch.int64, device=device)
    counts = torch.empty(requests, NUM_COUNTS, dtype=torch.int64, device=device)
    run = torch.empty(requests, max_drafts + 1, dtype=torch.int64, device=device)
    goes_on = torch.empty(requests, dtype=torch.bool, device=device)
    if requests:
        _commit_kernel[(requests,)](
            sampled, bad, *batch, state, out, counts, run, goes_on, requests, max_drafts, state.tokens.shape[1],
            state.stop_ids.shape[1], state.tokens.stride(0), state.stop_ids.stride(0),
            RUN=next_power_of_two(state.drafts.shape[1] + 1), STOPS=next_power_of_two(state.stop_ids.shape[1]),
            COUNTS=NUM_COUNTS, num_warps=1,
        )
    run_len, finish, num_computed, num_accepted = out
    return CommittedStep(Accepted(run, run_len, num_accepted, finish), num_computed, goes_on, counts)
