"""Plans a drafter's first work on newly admitted requests, in one launch: finds which cache slots of the prefix hit the
drafter has filled, and plans the pass that fills the slot of the first token to compute.

`kernels.drafting.plan_first_slots` is the specification, integer for integer. Each program serves one request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.drafting import AdmittedRows, DrafterCacheState, DraftPass, FirstSlots, Tables
from outrider.kernels.gpu.common import require_tensor
from outrider.kernels.gpu.drafts.passes import BLOCK_ROWS, OwnTensors, check_tables
from outrider.kernels.gpu.launch.triton_kernel import kernel


@triton.jit
def _valid_in_hit(table, page_valid, valid_stride, needed, begin, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the cache slot from which on all slots of the prefix hit are valid. It follows the last slot that the
    drafter did not fill or that was evicted."""
    end = begin // PAGE
    last = tl.zeros((BLOCK,), tl.int64)
    for first in range(needed, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        page = tl.load(table + column, mask=column < end, other=0).to(tl.int64)
        is_valid = tl.load(page_valid + page * valid_stride, mask=column < end, other=0) != 0
        last = tl.maximum(last, tl.where((column < end) & ((page == 0) | ~is_valid), column + 1, 0))
    return tl.where(begin % PAGE == 0, tl.max(last, axis=0) * PAGE, begin)


@kernel(do_not_specialize=["requests", "is_filled"],
        do_not_specialize_on_alignment=["rows", "begins", "lives", "needed"])
def _first_slots_kernel(
    rows, begins, lives, needed, own, tables, out, narrow, requests, max_len, is_filled, table_strides, valid_stride,
    PAGES: tl.constexpr, TAIL: tl.constexpr, GROUPS: tl.constexpr, NEEDS_TAIL: tl.constexpr, CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    begin = tl.load(begins + request)
    can_fill = tl.load(lives + request) > 0
    valid_from = begin * 0 + NEEDS_TAIL  # a head has no slot for position 0
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        first = tl.load(needed + group * requests + request)
        own_valid = _valid_in_hit(table, own.page_valid, valid_stride, first, begin, PAGES[group], BLOCK)
        valid_from = tl.maximum(valid_from, own_valid)
    has_tail = (begin > 0) & (begin % PAGES[TAIL] == 0)
    tail_table = tables[TAIL] + request * table_strides[TAIL]
    tail = tl.load(tail_table + tl.maximum(begin // PAGES[TAIL] - 1, 0), mask=has_tail, other=0).to(tl.int64)
    if NEEDS_TAIL:
        can_fill = can_fill & (tail != 0) & (tl.load(own.page_valid + tail * valid_stride) != 0)
    key_start = tl.where(can_fill | (begin == 0), valid_from, begin + 1) + CHAINED
    tl.store(own.valid_from + row, key_start)
    tl.store(own.filled + row, begin + is_filled)
    is_live = can_fill & (begin < max_len)
    length = tl.where(is_live, begin + 1, 0)
    tl.store(out + request, tl.minimum(begin, max_len - 1))
    tl.store(out + requests + request, length)
    tl.store(out + 2 * requests + request, is_live.to(tl.int64))
    tl.store(out + 3 * requests + request, key_start)
    tl.store(out + 4 * requests + request, tail)
    tl.store(narrow + request, length.to(tl.int32))
    tl.store(narrow + requests + request, is_live.to(tl.int32))
    tl.store(narrow + 2 * requests + request, key_start.to(tl.int32))
    for group in tl.static_range(GROUPS):
        table = tables[group] + request * table_strides[group]
        page = tl.load(table + begin // PAGES[group], mask=is_live, other=0).to(tl.int64)
        slot = page * PAGES[group] + begin % PAGES[group]
        tl.store(out + (5 + group) * requests + request, tl.where(is_live, slot, -1))


def plan_first_slots(
    admitted: AdmittedRows, tables: Tables, own: DrafterCacheState, *, needs_tail: bool, num_chained: int,
    is_filled: bool,
) -> FirstSlots:
    """Plan the pass that fills the first cache slots of admitted requests; see `kernels.drafting.plan_first_slots` for
    the arguments."""
    name, device, (count,), groups = "plan_first_slots", admitted.rows.device, admitted.rows.shape, len(tables)
    for field, tensor in zip(admitted._fields, admitted, strict=True):
        shape = (groups, count) if field == "needed" else (count,)
        require_tensor(name, f"admitted.{field}", tensor, shape, device, (torch.int64,), len(shape))
    check_tables(name, admitted.rows, tables, own)
    out = torch.empty(5 + groups, count, dtype=torch.int64, device=device)
    int32 = torch.empty(3, count, dtype=torch.int32, device=device)
    if count:
        _first_slots_kernel[(count,)](
            admitted.rows, admitted.begin, admitted.live, admitted.needed,
            OwnTensors(own.valid_from, own.filled, own.page_valid), tables, out, int32, count, own.max_len,
            int(is_filled), tuple(table.stride(0) for table in tables), own.page_valid.stride(0), PAGES=own.page_tokens,
            TAIL=own.tail_group, GROUPS=groups, NEEDS_TAIL=int(needs_tail), CHAINED=num_chained,
            BLOCK=BLOCK_ROWS, num_warps=1,
        )
    positions, lengths, live, key_starts, tail_page, *slots = out
    only = DraftPass(positions, tuple(slots), lengths, live, *int32[:2])
    return FirstSlots(only, key_starts, int32[2], tail_page)
