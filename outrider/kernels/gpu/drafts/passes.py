"""Plans a proposal of drafts in one launch: all passes of a drafter that fills its own cache slots, or the one pass of
a drafter that only reads the target's cache.

`kernels.drafting` is the specification, integer for integer. The inputs are a committed step and row state; the outputs
are the token rows of each pass. Each program, of one warp, serves one request, so that nothing it reads can be changed
by another warp or program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.drafting import (
    CommittedRequests,
    DrafterCacheState,
    DraftingRows,
    DraftPass,
    DraftPasses,
    DraftSamplingKeys,
    ReadingPass,
    Tables,
)
from outrider.kernels.gpu.common import next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.sampling.draw import DraftLevels, sample_logits

BLOCK_ROWS = 256  # token rows, or pages, of a request at a time
NUM_KEYS = tl.constexpr(4)  # seed, sample index, count and last token row, before the positions


class OwnTensors(NamedTuple):
    """The tensors of a `DrafterCacheState`: which slots and pages of its cache the drafter has filled."""

    valid_from: torch.Tensor
    filled: torch.Tensor
    page_valid: torch.Tensor


class _Out(NamedTuple):
    """The output tensors of a kernel that plans every pass of a proposal. They are int64 unless their comment names
    another type."""

    keys: torch.Tensor  # [4 + drafts, requests] seed, sample index, drafts with room, last token row; positions
    temperature: torch.Tensor  # [requests] float32
    requests: torch.Tensor  # [3, requests] of the first pass: lengths and live tokens; of all: key starts
    narrow: torch.Tensor  # [3, requests] int32: lengths and live tokens of the first pass, key starts
    tokens: torch.Tensor  # [3 + groups, tokens] tokens, positions, page of the tail group that ends or null page; slots
    further: torch.Tensor  # [3 + groups, drafts - 1, requests] positions, lengths, live tokens; slots
    narrow_further: torch.Tensor  # [2, drafts - 1, requests] int32: lengths, live tokens


@triton.jit
def store_keys(
    request, row, start, count, state, out, temperature, requests, num_wanted, max_len, DRAFTS: tl.constexpr
):
    known = tl.load(state.known + row)
    tl.store(temperature + request, tl.load(state.temperature + row))
    tl.store(out + request, tl.load(state.seed + row))
    tl.store(out + requests + request, tl.load(state.sample_index + row))
    tl.store(out + 2 * requests + request, tl.minimum(tl.maximum(max_len - known, 0), num_wanted))
    tl.store(out + 3 * requests + request, tl.maximum(start + count - 1, 0))
    index = tl.arange(0, DRAFTS)
    tl.store(out + (NUM_KEYS + index) * requests + request, known + index, mask=index < num_wanted)


@triton.jit
def mark_pages(
    table, page_valid, valid_stride, before, count, valid_from, least, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Mark the pages that the step completed as valid for later prefix hits, if the drafter has filled all their
    slots."""
    end = (before + count) // PAGE
    for first in range(before // PAGE, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        page = tl.load(table + column, mask=column < end, other=0).to(tl.int64)
        tl.store(page_valid + page * valid_stride, valid_from <= tl.maximum(column * PAGE, least), mask=column < end)


@triton.jit
def _store_first(
    request, row, start, end, before, count, live, state, tables, out, tokens, max_len, token_stride, table_strides,
    PAGES: tl.constexpr, TAIL: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the plan of the first pass: the tokens after the computed ones, at their positions. Dead token rows repeat
    a position and write nothing."""
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        valid = at < end
        offset = at - start
        is_live = valid & (offset < live)
        position = tl.minimum(before + 1 + tl.minimum(offset, tl.maximum(live - 1, 0)), max_len - 1)
        token = tl.load(state.tokens + row * token_stride + position, mask=is_live, other=0)
        tl.store(out.tokens + at, token, mask=valid)
        tl.store(out.tokens + tokens + at, position, mask=valid)
        target_position = before + offset
        ends = valid & (offset < count) & (target_position % PAGES[TAIL] == PAGES[TAIL] - 1)
        tail_table = tables[TAIL] + request * table_strides[TAIL]
        page = tl.load(tail_table + target_position // PAGES[TAIL], mask=ends, other=0)
        tl.store(out.tokens + 2 * tokens + at, page.to(tl.int64), mask=valid)
        for group in tl.static_range(GROUPS):
            table = tables[group] + request * table_strides[group]
            page = tl.load(table + position // PAGES[group], mask=is_live, other=0)
            slot = page.to(tl.int64) * PAGES[group] + position % PAGES[group]
            tl.store(out.tokens + (3 + group) * tokens + at, tl.where(is_live, slot, -1), mask=valid)


@triton.jit
def _store_further(
    request, goes_on, known, tables, out, requests, num_wanted, max_len, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr,
):
    """Write the plans of the later passes; each pass is at the position after the previous draft. A request without
    room for another token has a dead token row at a clamped position."""
    index = tl.arange(0, DRAFTS)
    valid = (index > 0) & (index < num_wanted)
    at = (index - 1) * requests + request
    size = (num_wanted - 1) * requests
    position = known - 1 + index
    is_live = valid & goes_on & (position < max_len)
    position = tl.minimum(tl.maximum(position, 0), max_len - 1)
    length = tl.where(is_live, position + 1, 0)
    live = is_live.to(tl.int64)
    tl.store(out.further + at, position, mask=valid)
    tl.store(out.further + size + at, length, mask=valid)
    tl.store(out.further + 2 * size + at, live, mask=valid)
    tl.store(out.narrow_further + at, length.to(tl.int32), mask=valid)
    tl.store(out.narrow_further + size + at, live.to(tl.int32), mask=valid)
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        page = tl.load(table + position // PAGES[group], mask=is_live, other=0)
        slot = page.to(tl.int64) * PAGES[group] + position % PAGES[group]
        tl.store(out.further + (3 + group) * size + at, tl.where(is_live, slot, -1), mask=valid)


# Sizes of a batch, and tensors that may begin anywhere in a buffer: no reason to compile anew.
_VARYING = ["requests", "tokens", "num_wanted"]
_SLICES = list(CommittedRequests._fields)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _passes_kernel(
    rows, query_starts, request_of, computed_before, num_computed, goes_on, state, own, tables, out, requests, tokens,
    num_wanted, max_len, least, token_stride, table_strides, valid_stride,
    PAGES: tl.constexpr, TAIL: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    before = tl.load(computed_before + request)
    count = tl.load(num_computed + request)
    start = tl.load(query_starts + request)
    # Padded token rows belong to the last request, behind its own.
    end = tl.where(request == requests - 1, tokens, tl.load(query_starts + request + 1))
    filled = tl.load(own.filled + row)
    valid_from = tl.load(own.valid_from + row)
    # A gap since the last fill (cold steps) leaves only what is filled from here on.
    valid_from = tl.where((count > 0) & (filled < before + 1), before + 1, valid_from)
    live = tl.minimum(count, tl.maximum(max_len - before - 1, 0))  # a drafter has no slots past its length
    length = tl.where(live > 0, before + 1 + live, 0)
    tl.store(own.valid_from + row, valid_from, mask=count > 0)
    tl.store(own.filled + row, before + 1 + count, mask=count > 0)
    tl.store(out.requests + request, length)
    tl.store(out.requests + requests + request, live)
    tl.store(out.requests + 2 * requests + request, valid_from)
    tl.store(out.narrow + request, length.to(tl.int32))
    tl.store(out.narrow + requests + request, live.to(tl.int32))
    tl.store(out.narrow + 2 * requests + request, valid_from.to(tl.int32))
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        mark_pages(table, own.page_valid, valid_stride, before, count, valid_from, least, PAGES[group], BLOCK)
    store_keys(
        request, row, start, count, state, out.keys, out.temperature, requests, num_wanted, max_len, DRAFTS
    )
    _store_first(
        request, row, start, end, before, count, live, state, tables, out, tokens, max_len, token_stride,
        table_strides, PAGES, TAIL, GROUPS, BLOCK,
    )
    goes_on = tl.load(goes_on + request) != 0
    known = tl.load(state.known + row)
    _store_further(
        request, goes_on, known, tables, out, requests, num_wanted, max_len, table_strides, PAGES, GROUPS, DRAFTS
    )


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _forget_kernel(
    computed_before, num_computed, page_valid, tables, table_strides, valid_stride,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    before = tl.load(computed_before + request)
    count = tl.load(num_computed + request)
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        # As if slots were valid from behind these pages on.
        mark_pages(table, page_valid, valid_stride, before, count, before + count, 0, PAGES[group], BLOCK)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _reading_kernel(
    rows, query_starts, request_of, computed_before, num_computed, goes_on, state, keys, temperature, out, narrow,
    requests, num_wanted, max_len, behind, token_stride, DRAFTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    count = tl.load(num_computed + request)
    start = tl.load(query_starts + request)
    store_keys(request, row, start, count, state, keys, temperature, requests, num_wanted, max_len, DRAFTS)
    computed = tl.load(computed_before + request) + count
    goes_on = tl.load(goes_on + request) != 0
    token = tl.load(state.tokens + row * token_stride + tl.minimum(computed, max_len - 1), mask=goes_on, other=0)
    length = tl.where(goes_on, computed, 0)
    tl.store(out + request, token)
    tl.store(out + requests + request, tl.maximum(computed - 1, 0))
    tl.store(out + 2 * requests + request, length)
    tl.store(out + 3 * requests + request, goes_on.to(tl.int64))
    tl.store(out + 4 * requests + request, -1)
    tl.store(out + 5 * requests + request, tl.maximum(tl.load(state.known + row) - behind, 0))
    tl.store(narrow + request, length.to(tl.int32))
    tl.store(narrow + requests + request, goes_on.to(tl.int32))


def check_requests(name: str, batch: CommittedRequests, rows: DraftingRows, max_len: int) -> None:
    requests, device, num_rows = batch.rows.shape[0], batch.rows.device, rows.known.shape[0]
    sizes = {"query_starts": requests + 1, "request_of": batch.request_of.shape[0]}
    for field, tensor in zip(batch._fields, batch, strict=True):
        dtype = torch.bool if field == "goes_on" else torch.int64
        require_tensor(name, f"requests.{field}", tensor, (sizes.get(field, requests),), device, (dtype,))
    for field, tensor in zip(rows._fields, rows, strict=True):
        shape = (num_rows, None) if field == "tokens" else (num_rows,)
        dtype = torch.float32 if field == "temperature" else torch.int64
        require_tensor(name, f"rows.{field}", tensor, shape, device, (dtype,))
    require(max_len <= rows.tokens.shape[1], name, "max_len", f"is {max_len}, more than the rows hold")


def check_tables(name: str, rows: torch.Tensor, tables: Tables, own: DrafterCacheState) -> None:
    groups = len(tables)
    require(groups == len(own.page_tokens), name, "own.page_tokens", f"are {own.page_tokens} for {groups} tables")
    require(0 <= own.tail_group < groups, name, "own.tail_group", f"is {own.tail_group} for {groups} tables")
    require_tensor(name, "own.page_valid", own.page_valid, (None,), rows.device, (torch.bool,), 0)
    for table, size in zip(tables, own.page_tokens, strict=True):
        require_tensor(name, "tables", table, (rows.shape[0], None), rows.device, (torch.int32,))
        has_room = table.shape[1] * size >= own.max_len
        require(has_room, name, "tables", f"have no column for token {own.max_len - 1}")


def plan_draft_passes(
    requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *, num_wanted: int
) -> DraftPasses:
    """Plan every pass of a proposal, and record which cache slots the first pass fills; see
    `kernels.drafting.plan_draft_passes` for the arguments."""
    name, device, (count,), (num_tokens,) = (
        "plan_draft_passes", requests.rows.device, requests.rows.shape, requests.request_of.shape
    )
    check_requests(name, requests, rows, own.max_len)
    check_tables(name, requests.rows, tables, own)
    for field, tensor in (("valid_from", own.valid_from), ("filled", own.filled)):
        require_tensor(name, f"own.{field}", tensor, tuple(rows.known.shape), device, (torch.int64,))
    require(num_wanted > 0, name, "num_wanted", f"is {num_wanted}")

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups, int32 = len(tables), torch.int32
    out = _Out(
        empty(NUM_KEYS.value + num_wanted, count), empty(count, dtype=torch.float32), empty(3, count),
        empty(3, count, dtype=int32), empty(3 + groups, num_tokens), empty(3 + groups, num_wanted - 1, count),
        empty(2, num_wanted - 1, count, dtype=int32),
    )
    if count:
        _passes_kernel[(count,)](
            *requests, rows, OwnTensors(own.valid_from, own.filled, own.page_valid), tables, out, count, num_tokens,
            num_wanted, own.max_len, own.first_position, rows.tokens.stride(0),
            tuple(table.stride(0) for table in tables), own.page_valid.stride(0),
            PAGES=own.page_tokens, TAIL=own.tail_group, GROUPS=groups, DRAFTS=next_power_of_two(num_wanted),
            BLOCK=BLOCK_ROWS, num_warps=1,
        )
    return _unpacked(out)


def _unpacked(out: _Out) -> DraftPasses:
    tokens, positions, tail_page, *slots = out.tokens
    lengths, live_first, key_starts = out.requests
    lengths_int32, live_int32, key_starts_int32 = out.narrow
    first = DraftPass(positions, tuple(slots), lengths, live_first, lengths_int32, live_int32)
    further = []
    for (own_positions, own_lengths, live, *own_slots), narrow in zip(
        out.further.unbind(1), out.narrow_further.unbind(1), strict=True
    ):
        further.append(DraftPass(own_positions, tuple(own_slots), own_lengths, live, *narrow))
    keys = unpacked_keys(out.keys, out.temperature)
    return DraftPasses(keys, tokens, first, further, key_starts, key_starts_int32, tail_page)


def unpacked_keys(keys: torch.Tensor, temperature: torch.Tensor) -> DraftSamplingKeys:
    seed, sample_index, counts, last = keys[: NUM_KEYS.value]
    return DraftSamplingKeys(temperature, seed, sample_index, keys[NUM_KEYS.value :], counts, last)


def forget_pages(requests: CommittedRequests, tables: Tables, own: DrafterCacheState) -> None:
    """Mark the pages that the step completed as not valid for drafting; see `kernels.drafting.forget_pages`."""
    name, device, (count,) = "forget_pages", requests.rows.device, requests.rows.shape
    check_tables(name, requests.rows, tables, own)
    for field, tensor in (("computed_before", requests.computed_before), ("num_computed", requests.num_computed)):
        require_tensor(name, f"requests.{field}", tensor, (count,), device, (torch.int64,))
    if count:
        _forget_kernel[(count,)](
            requests.computed_before, requests.num_computed, own.page_valid, tables,
            tuple(table.stride(0) for table in tables), own.page_valid.stride(0), PAGES=own.page_tokens,
            GROUPS=len(tables), BLOCK=BLOCK_ROWS, num_warps=1,
        )


def plan_reading_pass(
    requests: CommittedRequests, rows: DraftingRows, *, num_wanted: int, max_len: int, behind: int
) -> ReadingPass:
    """Plan a drafting pass that only reads the cache; see `kernels.drafting.plan_reading_pass` for the arguments."""
    name, device, (count,) = "plan_reading_pass", requests.rows.device, requests.rows.shape
    check_requests(name, requests, rows, max_len)
    require(num_wanted > 0, name, "num_wanted", f"is {num_wanted}")
    keys = torch.empty(NUM_KEYS.value + num_wanted, count, dtype=torch.int64, device=device)
    temperature = torch.empty(count, dtype=torch.float32, device=device)
    out = torch.empty(6, count, dtype=torch.int64, device=device)
    narrow = torch.empty(2, count, dtype=torch.int32, device=device)
    if count:
        _reading_kernel[(count,)](
            *requests, rows, keys, temperature, out, narrow, count, num_wanted, max_len, behind, rows.tokens.stride(0),
            DRAFTS=next_power_of_two(num_wanted), num_warps=1,
        )
    tokens, positions, lengths, live, nowhere, rope_positions = out
    only = DraftPass(positions, (nowhere,), lengths, live, *narrow)
    return ReadingPass(unpacked_keys(keys, temperature), tokens, rope_positions, only)


def draw_drafts(
    logits: torch.Tensor, keys: DraftSamplingKeys, index: int, *, target_ids: torch.Tensor | None, any_sampled: bool,
    out: torch.Tensor, levels: torch.Tensor,
) -> None:
    """Sample one draft for each request from a draft head's logits; see `drafters.draw.draw_drafts` for the arguments.
    One compiled kernel serves every temperature, also 0."""
    key = (keys.seed, keys.sample_index, keys.positions[index])
    sample_logits(logits, keys.temperature, *key, ids=target_ids, out=out, levels=DraftLevels(levels, index))
