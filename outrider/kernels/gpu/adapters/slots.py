"""Sorts token rows by their adapter slots and divides them into segments, in one program: a step has few rows, for
which torch needs some twenty launches. `RowSlots` is the specification."""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.delta_tables import NO_SLOT, SEGMENT_ROWS, RowSlots
from outrider.kernels.gpu.common import require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

MAX_ROWS = 512
_FEW_ROWS = 64
_OTHERS = 32  # rows that all rows are compared with at once


@kernel(do_not_specialize=["count"])
def _sort_slots_kernel(slots, sorted_slots, order, segments, num_segments, count, ROWS: tl.constexpr,
                       OTHERS: tl.constexpr, SEGMENT: tl.constexpr, NONE: tl.constexpr):
    """Sort token rows by slot. The place of a row is the number of rows with a smaller slot plus the number of earlier
    rows with the same slot."""
    row = tl.arange(0, ROWS)
    is_in = row < count
    slot = tl.load(slots + row, mask=is_in, other=0)
    first = tl.zeros([ROWS], dtype=tl.int32)  # place of the first row with the same slot
    earlier = tl.zeros([ROWS], dtype=tl.int32)
    same = tl.zeros([ROWS], dtype=tl.int32)
    for start in range(0, count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        there = (other < count)[None, :]
        value = tl.load(slots + other, mask=other < count, other=0)[None, :]
        is_same = there & (value == slot[:, None])
        first += tl.sum((there & (value < slot[:, None])).to(tl.int32), axis=1)
        same += tl.sum(is_same.to(tl.int32), axis=1)
        earlier += tl.sum((is_same & (other[None, :] < row[:, None])).to(tl.int32), axis=1)
    place = first + earlier
    tl.store(sorted_slots + place, slot, mask=is_in)
    tl.store(order + place, row.to(tl.int64), mask=is_in)
    # The run of rows with the same slot, for now where segments will be: they are counted in the order of places.
    tl.store(segments + place * 3, first.to(tl.int64), mask=is_in)
    tl.store(segments + place * 3 + 1, (first + same).to(tl.int64), mask=is_in)
    tl.debug_barrier()
    slot = tl.load(sorted_slots + row, mask=is_in, other=0)
    first_of_run = tl.load(segments + row * 3, mask=is_in, other=0)
    end_of_run = tl.load(segments + row * 3 + 1, mask=is_in, other=0)
    tl.debug_barrier()
    begins = is_in & ((row - first_of_run) % SEGMENT == 0)
    number = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    segment = segments + number * 3
    tl.store(segment, row.to(tl.int64), mask=begins)
    tl.store(segment + 1, tl.minimum(row + SEGMENT, end_of_run), mask=begins)
    tl.store(segment + 2, slot, mask=begins)
    num_found = tl.sum(begins.to(tl.int32), axis=0)
    tl.store(num_segments, num_found.to(tl.int64))
    is_behind = is_in & (row >= num_found)
    nothing = tl.full([ROWS], NONE, dtype=tl.int64)
    tl.store(segments + row * 3, tl.zeros([ROWS], dtype=tl.int64) + count, mask=is_behind)
    tl.store(segments + row * 3 + 1, tl.zeros([ROWS], dtype=tl.int64) + count, mask=is_behind)
    tl.store(segments + row * 3 + 2, nothing, mask=is_behind)


def takes_few(slots: torch.Tensor) -> bool:
    return 0 < len(slots) <= MAX_ROWS


def sort_slots(slots: torch.Tensor) -> RowSlots:
    """Sort the token rows by adapter slot, and list the segments; see `kernels.adapter_products.sort_slots` for the
    arguments. Accepts the calls for which `takes_few` is true."""
    name, count = "sort_slots", len(slots)
    require_tensor(name, "slots", slots, (None,), slots.device, (torch.int64,))
    require(takes_few(slots), name, "slots", f"has {count} rows, allowed are 1 to {MAX_ROWS}")
    sorted_slots, order, segments, num_segments = (slots.new_empty(size) for size in (count, count, (count, 3), 1))
    _sort_slots_kernel[(1,)](slots, sorted_slots, order, segments, num_segments, count,
                             ROWS=_FEW_ROWS if count <= _FEW_ROWS else MAX_ROWS, OTHERS=_OTHERS, SEGMENT=SEGMENT_ROWS,
                             NONE=NO_SLOT, num_warps=8)
    return RowSlots(slots, sorted_slots, order, segments, num_segments).settled()
