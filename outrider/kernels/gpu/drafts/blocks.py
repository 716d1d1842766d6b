"""Plans the passes of a block drafter in one launch: the cache slots where the context is stored, and the positions of
the blocks.

`kernels.drafting.plan_block_passes` is the specification, integer for integer. Each program, of one warp, serves one
request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.drafting import (
    BlockPasses,
    BlockRows,
    CommittedRequests,
    DrafterCacheState,
    DraftingRows,
    DraftPass,
    Tables,
)
from outrider.kernels.gpu.common import next_power_of_two, require, require_tensor
from outrider.kernels.gpu.drafts.passes import (
    BLOCK_ROWS,
    NUM_KEYS,
    OwnTensors,
    check_requests,
    check_tables,
    mark_pages,
    store_keys,
    unpacked_keys,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel


class _Out(NamedTuple):
    """The output tensors of the kernel that plans a block drafter's passes. They are int64 unless their comment names
    another type."""

    keys: torch.Tensor  # [4 + drafts, requests] as in `passes.py`
    temperature: torch.Tensor  # [requests] float32
    requests: torch.Tensor  # [6, requests] of the context: lengths, live; of blocks: live, lengths, key starts, anchors
    narrow: torch.Tensor  # [2, requests] int32: lengths and live tokens of the context
    tokens: torch.Tensor  # [1 + groups, tokens] positions; slots
    block: torch.Tensor  # [3 + groups, requests * rows] positions, live, lengths; slots


@triton.jit
def _store_context(
    request, start, end, before, count, tables, out, tokens, max_len, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the plan of the context pass: the step's token rows at their own positions. Rows whose tokens were not
    computed are dead."""
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        valid = at < end
        offset = at - start
        is_live = valid & (offset < count)
        position = tl.minimum(before + tl.minimum(offset, tl.maximum(count - 1, 0)), max_len - 1)
        tl.store(out.tokens + at, position, mask=valid)
        for group in tl.static_range(GROUPS):
            table = tables[group] + request * table_strides[group]
            page = tl.load(table + position // PAGES[group], mask=is_live, other=0)
            slot = page.to(tl.int64) * PAGES[group] + position % PAGES[group]
            tl.store(out.tokens + (1 + group) * tokens + at, tl.where(is_live, slot, -1), mask=valid)


@triton.jit
def _store_block(
    request, anchor, goes_on, length, tables, out, size, num_rows, max_len, table_strides,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):
    """Write the plan of a block's rows, from the last known token on. Rows past the end of the text are dead."""
    index = tl.arange(0, ROWS)
    valid = index < num_rows
    at = request * num_rows + index
    position = anchor + index
    is_live = valid & goes_on & (position < max_len)
    position = tl.minimum(tl.maximum(position, 0), max_len - 1)
    tl.store(out.block + at, position, mask=valid)
    tl.store(out.block + size + at, is_live.to(tl.int64), mask=valid)
    tl.store(out.block + 2 * size + at, tl.where(is_live, length, 0), mask=valid)
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        page = tl.load(table + position // PAGES[group], mask=is_live, other=0)
        slot = page.to(tl.int64) * PAGES[group] + position % PAGES[group]
        tl.store(out.block + (3 + group) * size + at, tl.where(is_live, slot, -1), mask=valid)


_VARYING = ["requests", "tokens", "num_wanted", "num_rows"]


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=list(CommittedRequests._fields))
def _block_kernel(
    rows, query_starts, request_of, computed_before, num_computed, goes_on, state, own, tables, out, requests, tokens,
    num_wanted, num_rows, max_len, token_stride, table_strides, valid_stride,
    PAGES: tl.constexpr, GROUPS: tl.constexpr, DRAFTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
    valid_from = tl.where((count > 0) & (filled < before), before, valid_from)
    tl.store(own.valid_from + row, valid_from, mask=count > 0)
    tl.store(own.filled + row, before + count, mask=count > 0)
    length = tl.where(count > 0, before + count, 0)
    tl.store(out.requests + request, length)
    tl.store(out.requests + requests + request, count)
    tl.store(out.narrow + request, length.to(tl.int32))
    tl.store(out.narrow + requests + request, count.to(tl.int32))
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        mark_pages(table, own.page_valid, valid_stride, before, count, valid_from, 0, PAGES[group], BLOCK)
    store_keys(request, row, start, count, state, out.keys, out.temperature, requests, num_wanted, max_len, DRAFTS)
    _store_context(
        request, start, end, before, count, tables, out, tokens, max_len, table_strides, PAGES, GROUPS, BLOCK
    )
    anchor = before + count
    goes_on = tl.load(goes_on + request) != 0
    live = tl.where(goes_on, tl.minimum(tl.maximum(max_len - anchor, 0), num_rows), 0)
    block_length = tl.where(live > 0, anchor + live, 0)
    token = tl.load(state.tokens + row * token_stride + tl.minimum(anchor, max_len - 1), mask=goes_on, other=0)
    tl.store(out.requests + 2 * requests + request, live)
    tl.store(out.requests + 3 * requests + request, block_length)
    tl.store(out.requests + 4 * requests + request, valid_from)
    tl.store(out.requests + 5 * requests + request, token)
    _store_block(
        request, anchor, goes_on, block_length, tables, out, requests * num_rows, num_rows, max_len, table_strides,
        PAGES, GROUPS, ROWS,
    )


def plan_block_passes(
    requests: CommittedRequests, rows: DraftingRows, tables: Tables, own: DrafterCacheState, *, num_wanted: int,
    num_rows: int,
) -> BlockPasses:
    """Plan the context pass and the block pass of a proposal; see `kernels.drafting.plan_block_passes` for the
    arguments."""
    name, device, (count,), (num_tokens,) = (
        "plan_block_passes", requests.rows.device, requests.rows.shape, requests.request_of.shape
    )
    check_requests(name, requests, rows, own.max_len)
    check_tables(name, requests.rows, tables, own)
    for field, tensor in (("valid_from", own.valid_from), ("filled", own.filled)):
        require_tensor(name, f"own.{field}", tensor, tuple(rows.known.shape), device, (torch.int64,))
    require(num_wanted > 0, name, "num_wanted", f"is {num_wanted}")
    require(num_rows > 0, name, "num_rows", f"is {num_rows}")

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    groups = len(tables)
    out = _Out(empty(NUM_KEYS.value + num_wanted, count), empty(count, dtype=torch.float32), empty(6, count),
               empty(2, count, dtype=torch.int32), empty(1 + groups, num_tokens), empty(3 + groups, count * num_rows))
    if count:
        _block_kernel[(count,)](
            *requests, rows, OwnTensors(own.valid_from, own.filled, own.page_valid), tables, out, count, num_tokens,
            num_wanted, num_rows, own.max_len, rows.tokens.stride(0), tuple(table.stride(0) for table in tables),
            own.page_valid.stride(0), PAGES=own.page_tokens, GROUPS=groups, DRAFTS=next_power_of_two(num_wanted),
            ROWS=next_power_of_two(num_rows), BLOCK=BLOCK_ROWS, num_warps=1,
        )
    context_lengths, context_live, live, lengths, key_starts, anchors = out.requests
    positions, *slots = out.tokens
    context = DraftPass(positions, tuple(slots), context_lengths, context_live, *out.narrow)
    block_positions, row_live, row_lengths, *block_slots = out.block
    block = BlockRows(block_positions, tuple(block_slots), live, lengths, row_live, row_lengths, key_starts)
    return BlockPasses(unpacked_keys(out.keys, out.temperature), context, anchors, block)
