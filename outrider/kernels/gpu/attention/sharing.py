"""Finds out, on the device and from the page tables alone, which requests of a batch share pages.

Requests with a common beginning hold the same pages in the first columns of their page tables. Decode attention reads
these pages once for several requests (`packs.py`). What is shared follows from the tables of the step alone: two
requests share exactly the leading columns that are equal, so a wrong choice here can cost time but no key.

Requests are put into an order in which those with the longest common beginnings are neighbours: by their pages at 256,
512, 1024, ... tokens, one after the other. A batch without common pages is done after the first of them.

**Pages that requests share.** While requests decode, attention can read a page once for several requests that hold it.
The kernel for this is 1 to 12% slower where nothing is shared, so it has graphs of its own (`GraphKey.shares_pages`,
for powers of two, captured when a batch needs them). The host chooses these graphs when enough requests began with a
prefix hit on pages that other requests hold (`CacheManager.shares_pages`). The device finds out which requests share:

1. `find_shared` (`kernels/gpu/attention/sharing.py`) compares the page tables and orders the requests of the step so
   that sharers are neighbours.
2. `list_splits` cuts this order into *packs*. A pack has as many requests as fit into the rows of one tile: four with
   four query heads for each key/value head. It lists the splits of packs before those of single requests.
3. The program of a pack (`packs.py`) reads the pages of the pack's first request. Each row sees keys only as
   far as its own page table is equal to that request's, so no request reads a page that is not its own. The splits of a
   pack are merged like all others.

A common beginning counts from 256 tokens on (`LEAST_SHARED`). Nothing is shared in steps of at most 8 requests or with
more than one draft for a request (`SHARED_DRAFTS`), in layers with a window, for drafters that do not see all keys,
where no two requests fit into a tile, and in exact mode."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import cdiv, padded_requests, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

LEAST_SHARED = 256  # tokens; a shorter common beginning is not worth the merging
_NO_PAGE = tl.constexpr((1 << 31) - 1)  # sorts behind all pages


class SharedPages(NamedTuple):
    """The requests of a batch, ordered so that neighbours share the most pages. Tensors are int32 [requests]."""

    order: torch.Tensor  # request at each place
    shared: torch.Tensor  # tokens of the leading pages that a place's request has in common with the one before it


@triton.jit
def _contexts(lengths, live, request, num_requests):
    """Return how many tokens are in the cache before the request's queries, all of which see them; -1 if the request
    has no live query."""
    exists = request < num_requests
    num_live = tl.load(live + request, mask=exists, other=0)
    return tl.where(num_live > 0, tl.load(lengths + request, mask=exists, other=0) - num_live, -1)


@triton.jit
def _pages_at(page_table, table_stride, request, context, column, PAGE: tl.constexpr):
    """Return the page of each request in a column; _NO_PAGE if the request's context does not fill that page."""
    at = page_table + request.to(tl.int64) * table_stride + column
    return tl.load(at, mask=(column + 1) * PAGE <= context, other=_NO_PAGE)


@triton.jit
def _column_of(level, least, PAGE: tl.constexpr):
    """Return the page table column in which requests are compared at a level: the one with the last of the first `least
    * 2^level` tokens."""
    return tl.cdiv(least << level, PAGE) - 1


@kernel(do_not_specialize=["num_requests", "num_levels", "least"],
        do_not_specialize_on_alignment=["page_table", "lengths", "live", "order", "shared"])
def _find_shared_kernel(
    page_table, lengths, live, order, shared, table_stride, num_requests, num_levels, least,
    PAGE: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, PAD)
    own_context = _contexts(lengths, live, own, num_requests)
    context = _contexts(lengths, live, other, num_requests)

    column = _column_of(0, least, PAGE)
    own_page = _pages_at(page_table, table_stride, own, own_context, column, PAGE)
    page = _pages_at(page_table, table_stride, other, context, column, PAGE)
    exists = (other < num_requests)[None, :]
    is_before = exists & (page[None, :] < own_page[:, None])
    is_tied = exists & (page[None, :] == own_page[:, None])
    begins_alike = is_tied & (page != _NO_PAGE)[None, :] & (other[None, :] != own[:, None])
    has_alike = tl.max(tl.max(begins_alike.to(tl.int32), axis=1), axis=0) > 0
    level = 1
    while has_alike & (level < num_levels):
        column = _column_of(level, least, PAGE)
        own_page = _pages_at(page_table, table_stride, own, own_context, column, PAGE)
        page = _pages_at(page_table, table_stride, other, context, column, PAGE)
        is_before = is_before | (is_tied & (page[None, :] < own_page[:, None]))
        is_tied = is_tied & (page[None, :] == own_page[:, None])
        level += 1
    is_before = is_before | (is_tied & (other[None, :] < own[:, None]))
    place = tl.sum(is_before.to(tl.int32), axis=1)

    num_columns = tl.zeros([ROWS], dtype=tl.int32)
    if has_alike:
        previous = _find_previous(is_before & begins_alike, page_table, table_stride, other, context, num_levels, least,
                                  PAGE)
        previous_context = _contexts(lengths, live, tl.maximum(previous, 0), num_requests)
        most = tl.where(previous >= 0, tl.minimum(own_context, previous_context) // PAGE, 0)
        num_columns = _equal_columns(page_table, table_stride, own, previous, most, ROWS, COLUMNS)
    tokens = tl.where(num_columns * PAGE >= least, num_columns * PAGE, 0)
    tl.store(order + place, own, mask=own < num_requests)
    tl.store(shared + place, tokens, mask=own < num_requests)


@triton.jit
def _find_previous(is_candidate, page_table, table_stride, other, context, num_levels, least, PAGE: tl.constexpr):
    """Return, for each row, the candidate request that is last in the order of the pages: [rows]; -1 if it has none."""
    level = 1
    is_left = is_candidate
    while level < num_levels:
        page = _pages_at(page_table, table_stride, other, context, _column_of(level, least, PAGE), PAGE)
        last = tl.max(tl.where(is_left, page[None, :], -1), axis=1)
        is_left = is_left & (page[None, :] == last[:, None])
        level += 1
    return tl.max(tl.where(is_left, other[None, :], -1), axis=1)


@triton.jit
def _equal_columns(page_table, table_stride, own, previous, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return [rows]: the number of leading columns in which the page tables of two requests are equal, at most
    `most`."""
    own_row = page_table + own.to(tl.int64) * table_stride
    previous_row = page_table + previous.to(tl.int64) * table_stride
    count = most
    start = 0
    while start < tl.max(count, axis=0):
        column = start + tl.arange(0, COLUMNS)
        inside = column[None, :] < count[:, None]
        page = tl.load(own_row[:, None] + column[None, :], mask=inside, other=0)
        previous_page = tl.load(previous_row[:, None] + column[None, :], mask=inside, other=0)
        first_other = tl.min(tl.where(page != previous_page, column[None, :], _NO_PAGE), axis=1)
        count = tl.minimum(count, first_other)
        start += COLUMNS
    return count


@triton.jit
def begins_run(shared, place, num_requests):
    """Whether a new run of sharing requests begins at a place in the order. It does if the request there shares nothing
    with the one before, or if the next request shares at least twice as much with it. No pack crosses the beginning of
    a run."""
    own = tl.load(shared + place, mask=place < num_requests, other=0)
    after = tl.load(shared + place + 1, mask=place + 1 < num_requests, other=0)
    return (own == 0) | (after >= 2 * own)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def find_runs(shared, place, num_requests):
    """Return, for each place in order, the first place of its run."""
    return tl.associative_scan(tl.where(begins_run(shared, place, num_requests), place, 0), 0, _later)


@triton.jit
def find_packs(shared, place, run, num_requests, pack_size):
    """Cut each run of sharing requests into packs. Returns, for each place in the order, (first place of its pack,
    tokens that the place reads with its pack, tokens that the pack reads). All places of a pack read the pages of the
    first place, each as far as its own page table is equal. A place that is alone reads 0 tokens this way."""
    first = place - (place - run) % pack_size
    tokens = tl.full(place.shape, _NO_PAGE, dtype=tl.int32)
    for back in range(0, pack_size - 1):
        is_inside = (place - back > first) & (place < num_requests)
        tokens = tl.minimum(tokens, tl.load(shared + place - back, mask=is_inside, other=_NO_PAGE))
    has_second = (first + 1 < num_requests) & (begins_run(shared, first + 1, num_requests) == 0)
    pack_tokens = tl.load(shared + first + 1, mask=has_second, other=0)
    return first, tl.where(first == place, pack_tokens, tl.minimum(tokens, pack_tokens)), pack_tokens


@triton.jit
def count_pack_splits(pack_tokens, split_keys, most, BLOCK_N: tl.constexpr):
    """Return the number of splits of a pack, with about `split_keys` keys each, at most `most`; 0 for a place without a
    pack."""
    count = tl.minimum(tl.cdiv(pack_tokens, split_keys), most)
    return tl.cdiv(pack_tokens, pack_split_size(pack_tokens, count, BLOCK_N))


@triton.jit
def pack_split_size(pack_tokens, num_splits, BLOCK_N: tl.constexpr):
    """Return the number of keys in each split of a pack. The last split has the rest."""
    return tl.maximum(tl.cdiv(tl.cdiv(pack_tokens, tl.maximum(num_splits, 1)), BLOCK_N), 1) * BLOCK_N


def find_shared(page_table: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, page_size: int, *,
                max_length: int, least: int | None = None) -> SharedPages:
    """Order the requests of a batch so that those that share pages are neighbours. `live`: the number of live tokens of
    each request that uses the decode kernel; 0 for other requests, which share nothing. Common beginnings of fewer than
    `least` tokens (default LEAST_SHARED) are ignored."""
    least = LEAST_SHARED if least is None else least
    name, device, int32 = "find_shared", lengths.device, (torch.int32,)
    num_requests = lengths.shape[0]
    require_tensor(name, "lengths", lengths, (None,), device, int32)
    require_tensor(name, "live", live, (num_requests,), device, int32)
    require_tensor(name, "page_table", page_table, (num_requests, None), device, int32)
    require(max_length <= page_table.shape[1] * page_size, name, "max_length",
            f"is {max_length}, but page_table has {page_table.shape[1]} columns of {page_size} tokens")
    order, shared = torch.empty(2, num_requests, dtype=torch.int32, device=device).unbind(0)
    num_levels = max(1, (max_length // least).bit_length())
    pad = padded_requests(num_requests)
    _find_shared_kernel[(cdiv(num_requests, 16),)](
        page_table, lengths, live, order, shared, page_table.stride(0), num_requests, num_levels, least,
        PAGE=page_size, PAD=pad, ROWS=16, COLUMNS=128, num_warps=8,
    )
    return SharedPages(order, shared)
