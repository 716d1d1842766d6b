"""The bookkeeping of a proposal in one launch: all passes of a drafter that fills slots, or the one that only reads.

The torch code of the drafters is the specification, integer for integer. A committed step and row state come in, token
rows go out. A program has a request to itself, and one warp: nothing is read that another could have moved on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import triton
import triton.language as tl
from outrider.core import NULL_ROW
from outrider.kernels.triton.common import next_power_of_two, require, require_tensor
from outrider.kernels.triton.launch import kernel
from outrider.kernels.triton.sampling import sample_logits
from outrider.kernels.triton.synthetic import Verdicts, accept_at_rates

__all__ = ["Batch", "Filled", "Pages", "Passes", "Reading", "Rows", "Verdicts", "accept_at_rates", "draft_passes",
           "forget_pages", "reading_pass", "sample_logits", "store_drafts"]  # fmt: skip

_BLOCK = 256  # token rows, or pages, of a request at a time
_NULL_ROW = tl.constexpr(NULL_ROW)
_KEYS = tl.constexpr(4)  # seed, sample index, count and last token row, before the positions


class Batch(NamedTuple):
    """A committed step's requests, padded; int64 but for `guesses`."""

    row: torch.Tensor  # [requests]
    query_starts: torch.Tensor  # [requests + 1]
    computed_before: torch.Tensor  # [requests]
    num_computed: torch.Tensor  # [requests]
    guesses: torch.Tensor  # [requests] bool


class Rows(NamedTuple):
    """Row state, read only; int64 but for `temperature`."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    known: torch.Tensor  # [ROWS]
    seed: torch.Tensor
    sample_index: torch.Tensor
    temperature: torch.Tensor  # float32


class Filled(NamedTuple):
    """What a drafter has filled."""

    valid_from: torch.Tensor  # [ROWS] int64
    filled: torch.Tensor  # [ROWS] int64
    page_valid: torch.Tensor  # [pages] bool


class Pages(NamedTuple):
    """The drafter's groups."""

    tables: tuple[torch.Tensor, ...]  # [requests, columns] int32 each
    tokens: tuple[int, ...]  # of a page
    tail: int  # place of the group whose pages keep hidden states


class Passes(NamedTuple):
    """Every pass of a proposal; int64 where nothing else is said."""

    choosing: torch.Tensor  # [4 + drafts, requests] seed, sample index, drafts with room, last token row; positions
    temperature: torch.Tensor  # [requests] float32
    requests: torch.Tensor  # [2, requests] of the first pass: lengths; of all: key starts
    narrow: torch.Tensor  # [3, requests] int32: lengths and live tokens of the first pass, key starts
    tokens: torch.Tensor  # [3 + groups, tokens] tokens, slots, page of the tail group that ends or null page; cells
    further: torch.Tensor  # [3 + groups, drafts - 1, requests] slots, lengths, live tokens; cells
    narrow_further: torch.Tensor  # [2, drafts - 1, requests] int32: lengths, live tokens


@triton.jit
def _store_choosing(request, row, start, count, rows, out, temperature, requests, most, max_len, DRAFTS: tl.constexpr):
    known = tl.load(rows.known + row)
    tl.store(temperature + request, tl.load(rows.temperature + row))
    tl.store(out + request, tl.load(rows.seed + row))
    tl.store(out + requests + request, tl.load(rows.sample_index + row))
    tl.store(out + 2 * requests + request, tl.minimum(tl.maximum(max_len - known, 0), most))
    tl.store(out + 3 * requests + request, tl.maximum(start + count - 1, 0))
    index = tl.arange(0, DRAFTS)
    tl.store(out + (_KEYS + index) * requests + request, known + index, mask=index < most)


@triton.jit
def _mark_pages(table, page_valid, before, count, valid_from, least, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Pages whose last token the step computed are valid where all their slots are filled."""
    end = (before + count) // PAGE
    for first in range(before // PAGE, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        page = tl.load(table + column, mask=column < end, other=0)
        tl.store(page_valid + page, valid_from <= tl.maximum(column * PAGE, least), mask=column < end)


@triton.jit
def _store_first(
    request, row, start, end, before, count, rows, tables, out, tokens, max_len, token_stride, table_strides,
    PAGES: tl.constexpr, TAIL: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    """The tokens behind the computed ones, at their slots; dead token rows repeat a slot and write nothing."""
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        valid = at < end
        offset = at - start
        is_live = valid & (offset < count)
        slot = tl.minimum(before + 1 + tl.minimum(offset, tl.maximum(count - 1, 0)), max_len - 1)
        token = tl.load(rows.tokens + row * token_stride + slot, mask=is_live, other=0)
        tl.store(out.tokens + at, token, mask=valid)
        tl.store(out.tokens + tokens + at, slot, mask=valid)
        position = before + offset
        ends = is_live & (position % PAGES[TAIL] == PAGES[TAIL] - 1)
        page = tl.load(tables[TAIL] + request * table_strides[TAIL] + position // PAGES[TAIL], mask=ends, other=0)
        tl.store(out.tokens + 2 * tokens + at, page.to(tl.int64), mask=valid)
        for group in tl.static_range(GROUPS):
            table = tables[group] + request * table_strides[group]
            page = tl.load(table + slot // PAGES[group], mask=is_live, other=0)
            cell = page.to(tl.int64) * PAGES[group] + slot % PAGES[group]
            tl.store(out.tokens + (3 + group) * tokens + at, tl.where(is_live, cell, -1), mask=valid)


@triton.jit
def _store_further(
    request, guesses, known, tables, out, requests, most, max_len, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr,
):
    """Draft `index` at the slot after the last; without room for it the row runs on a clamped slot and is dead."""
    index = tl.arange(0, DRAFTS)
    valid = (index > 0) & (index < most)
    at = (index - 1) * requests + request
    size = (most - 1) * requests
    slot = known - 1 + index
    is_live = valid & guesses & (slot < max_len)
    slot = tl.minimum(tl.maximum(slot, 0), max_len - 1)
    length = tl.where(is_live, slot + 1, 0)
    live = is_live.to(tl.int64)
    tl.store(out.further + at, slot, mask=valid)
    tl.store(out.further + size + at, length, mask=valid)
    tl.store(out.further + 2 * size + at, live, mask=valid)
    tl.store(out.narrow_further + at, length.to(tl.int32), mask=valid)
    tl.store(out.narrow_further + size + at, live.to(tl.int32), mask=valid)
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        page = tl.load(table + slot // PAGES[group], mask=is_live, other=0)
        cell = page.to(tl.int64) * PAGES[group] + slot % PAGES[group]
        tl.store(out.further + (3 + group) * size + at, tl.where(is_live, cell, -1), mask=valid)


# Sizes of a batch, and tensors that may begin anywhere in a buffer: no reason to compile anew.
_VARYING = ["requests", "tokens", "most"]
_SLICES = ["row", "query_starts", "computed_before", "num_computed", "guesses"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _passes_kernel(
    row, query_starts, computed_before, num_computed, guesses, rows, own, tables, out, requests, tokens, most, max_len,
    least, token_stride, table_strides,
    PAGES: tl.constexpr, TAIL: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(row + request)
    before = tl.load(computed_before + request)
    count = tl.load(num_computed + request)
    start = tl.load(query_starts + request)
    # Padded token rows belong to the last request, behind its own.
    end = tl.where(request == requests - 1, tokens, tl.load(query_starts + request + 1))
    filled = tl.load(own.filled + row)
    valid_from = tl.load(own.valid_from + row)
    # A gap since the last fill (cold steps) leaves only what is filled from here on.
    valid_from = tl.where((count > 0) & (filled < before + 1), before + 1, valid_from)
    length = tl.where(count > 0, before + 1 + count, 0)
    tl.store(own.valid_from + row, valid_from, mask=count > 0)
    tl.store(own.filled + row, length, mask=count > 0)
    tl.store(out.requests + request, length)
    tl.store(out.requests + requests + request, valid_from)
    tl.store(out.narrow + request, length.to(tl.int32))
    tl.store(out.narrow + requests + request, count.to(tl.int32))
    tl.store(out.narrow + 2 * requests + request, valid_from.to(tl.int32))
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        _mark_pages(table, own.page_valid, before, count, valid_from, least, PAGES[group], BLOCK)
    _store_choosing(
        request, row, start, count, rows, out.choosing, out.temperature, requests, most, max_len, DRAFTS
    )
    _store_first(
        request, row, start, end, before, count, rows, tables, out, tokens, max_len, token_stride, table_strides,
        PAGES, TAIL, GROUPS, BLOCK,
    )
    guesses = tl.load(guesses + request) != 0
    known = tl.load(rows.known + row)
    _store_further(
        request, guesses, known, tables, out, requests, most, max_len, table_strides, PAGES, GROUPS, DRAFTS
    )


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _forget_kernel(
    computed_before, num_computed, page_valid, tables, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    before = tl.load(computed_before + request)
    count = tl.load(num_computed + request)
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        # As if slots were valid from behind these pages on.
        _mark_pages(table, page_valid, before, count, before + count, 0, PAGES[group], BLOCK)


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _reading_kernel(
    row, query_starts, computed_before, num_computed, guesses, rows, choosing, temperature, out, narrow, requests, most,
    max_len, behind, token_stride, DRAFTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(row + request)
    count = tl.load(num_computed + request)
    start = tl.load(query_starts + request)
    _store_choosing(request, row, start, count, rows, choosing, temperature, requests, most, max_len, DRAFTS)
    computed = tl.load(computed_before + request) + count
    guesses = tl.load(guesses + request) != 0
    token = tl.load(rows.tokens + row * token_stride + tl.minimum(computed, max_len - 1), mask=guesses, other=0)
    length = tl.where(guesses, computed, 0)
    tl.store(out + request, token)
    tl.store(out + requests + request, tl.maximum(computed - 1, 0))
    tl.store(out + 2 * requests + request, length)
    tl.store(out + 3 * requests + request, guesses.to(tl.int64))
    tl.store(out + 4 * requests + request, -1)
    tl.store(out + 5 * requests + request, tl.maximum(tl.load(rows.known + row) - behind, 0))
    tl.store(narrow + request, length.to(tl.int32))
    tl.store(narrow + requests + request, guesses.to(tl.int32))


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=[*_SLICES, "counts", "proposed"])
def _store_kernel(
    row, tokens, counts, guesses, drafts, num_drafts, proposed, most, request_stride, index_stride, draft_stride,
    proposed_stride, DRAFTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(row + request)
    count = tl.where(tl.load(guesses + request) != 0, tl.load(counts + request), 0)
    index = tl.arange(0, DRAFTS)
    is_draft = (index < most) & (row != _NULL_ROW)
    token = tl.load(tokens + request * request_stride + index * index_stride, mask=is_draft, other=0)
    tl.store(drafts + row * draft_stride + index, token, mask=is_draft)
    tl.store(num_drafts + row, count, mask=row != _NULL_ROW)
    tl.store(proposed + request * proposed_stride, count)


def _check(name: str, batch: Batch, rows: Rows, pages: Pages | None, max_len: int) -> None:
    requests, device, num_rows = batch.row.shape[0], batch.row.device, rows.known.shape[0]
    for field, tensor in zip(batch._fields, batch, strict=True):
        size = requests + 1 if field == "query_starts" else requests
        dtype = torch.bool if field == "guesses" else torch.int64
        require_tensor(name, f"batch.{field}", tensor, (size,), device, (dtype,))
    for field, tensor in zip(rows._fields, rows, strict=True):
        shape = (num_rows, None) if field == "tokens" else (num_rows,)
        dtype = torch.float32 if field == "temperature" else torch.int64
        require_tensor(name, f"rows.{field}", tensor, shape, device, (dtype,))
    require(max_len <= rows.tokens.shape[1], name, "max_len", f"is {max_len}, more than the rows hold")
    if pages is not None:
        groups = len(pages.tables)
        require(groups == len(pages.tokens), name, "pages.tokens", f"are {len(pages.tokens)} for {groups} tables")
        require(0 <= pages.tail < groups, name, "pages.tail", f"is {pages.tail} for {groups} tables")
        for table, size in zip(pages.tables, pages.tokens, strict=True):
            require_tensor(name, "pages.tables", table, (requests, None), device, (torch.int32,))
            require(table.shape[1] * size >= max_len, name, "pages.tables", f"have no column for token {max_len - 1}")


def draft_passes(
    batch: Batch, rows: Rows, own: Filled, pages: Pages, *, num_tokens: int, most: int, max_len: int, least: int
) -> Passes:
    """Every pass of a proposal of `most` drafts; the first has the batch's own `num_tokens` token rows. Moves `own` on:
    rows by what the first pass fills, and pages whose last token the step computed. No row has slots below `least`."""
    name, device, (requests,) = "draft_passes", batch.row.device, batch.row.shape
    _check(name, batch, rows, pages, max_len)
    for field, tensor in zip(own._fields, own, strict=True):
        shape, dtype = ((None,), torch.bool) if field == "page_valid" else (tuple(rows.known.shape), torch.int64)
        require_tensor(name, f"own.{field}", tensor, shape, device, (dtype,))
    require(most > 0, name, "most", f"is {most}")

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups, int32 = len(pages.tables), torch.int32
    out = Passes(
        empty(_KEYS.value + most, requests), empty(requests, dtype=torch.float32), empty(2, requests),
        empty(3, requests, dtype=int32), empty(3 + groups, num_tokens), empty(3 + groups, most - 1, requests),
        empty(2, most - 1, requests, dtype=int32),
    )  # fmt: skip
    if requests:
        _passes_kernel[(requests,)](
            *batch, rows, own, pages.tables, out, requests, num_tokens, most, max_len, least, rows.tokens.stride(0),
            tuple(table.stride(0) for table in pages.tables), PAGES=pages.tokens, TAIL=pages.tail, GROUPS=groups,
            DRAFTS=next_power_of_two(most), BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return out


def forget_pages(batch: Batch, page_valid: torch.Tensor, pages: Pages) -> None:
    """Pages whose last token the step computed are not valid."""
    name, device, (requests,) = "forget_pages", batch.row.device, batch.row.shape
    require_tensor(name, "page_valid", page_valid, (None,), device, (torch.bool,))
    for argument, tensor in (("computed_before", batch.computed_before), ("num_computed", batch.num_computed)):
        require_tensor(name, f"batch.{argument}", tensor, (requests,), device, (torch.int64,))
    for table in pages.tables:
        require_tensor(name, "pages.tables", table, (requests, None), device, (torch.int32,))
    if requests:
        _forget_kernel[(requests,)](
            batch.computed_before, batch.num_computed, page_valid, pages.tables,
            tuple(table.stride(0) for table in pages.tables), PAGES=pages.tokens, GROUPS=len(pages.tables),
            BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip


class Reading(NamedTuple):
    """One pass that writes nothing; int64 where nothing else is said."""

    choosing: torch.Tensor  # these two as in Passes
    temperature: torch.Tensor
    requests: torch.Tensor  # [6, requests] tokens, positions, lengths, live tokens, cells; rope positions
    narrow: torch.Tensor  # [2, requests] int32: lengths, live tokens


def reading_pass(batch: Batch, rows: Rows, *, most: int, max_len: int, behind: int) -> Reading:
    """The pass stands at each guessing request's last computed token, with the known token after it, and has no cells.
    Its rope position is `behind` the known tokens."""
    requests, device = batch.row.shape[0], batch.row.device
    _check("reading_pass", batch, rows, None, max_len)
    require(most > 0, "reading_pass", "most", f"is {most}")
    out = Reading(
        torch.empty(_KEYS.value + most, requests, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.float32, device=device),
        torch.empty(6, requests, dtype=torch.int64, device=device),
        torch.empty(2, requests, dtype=torch.int32, device=device),
    )
    if requests:
        _reading_kernel[(requests,)](
            *batch, rows, *out, requests, most, max_len, behind, rows.tokens.stride(0),
            DRAFTS=next_power_of_two(most), num_warps=1,
        )  # fmt: skip
    return out


def store_drafts(
    row: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, guesses: torch.Tensor, *, drafts: torch.Tensor,
    num_drafts: torch.Tensor, proposed: torch.Tensor,
) -> None:
    """Drafts [requests, most], of which counts [requests] are meant where a request guesses and none otherwise, become
    those of its row; how many they are is written to `proposed` [requests] too. The null row keeps what it has."""
    name, device, int64, (requests,) = "store_drafts", row.device, (torch.int64,), row.shape
    require_tensor(name, "row", row, (requests,), device, int64)
    require_tensor(name, "tokens", tokens, (requests, None), device, int64, 0)
    require_tensor(name, "counts", counts, (requests,), device, int64)
    require_tensor(name, "guesses", guesses, (requests,), device, (torch.bool,))
    require_tensor(name, "drafts", drafts, (None, None), device, int64)
    require_tensor(name, "num_drafts", num_drafts, (drafts.shape[0],), device, int64)
    require_tensor(name, "proposed", proposed, (requests,), device, int64, 0)
    most = tokens.shape[1]
    require(most <= drafts.shape[1], name, "tokens", f"has {most} columns, more than the rows")
    if requests:
        _store_kernel[(requests,)](
            row, tokens, counts, guesses, drafts, num_drafts, proposed, most, tokens.stride(0), tokens.stride(1),
            drafts.stride(0), proposed.stride(0), DRAFTS=next_power_of_two(drafts.shape[1]), num_warps=1,
        )  # fmt: skip
