"""What adapters add to the product of a linear layer: two launches, one for each factor. `kernels/adapters.py` is the
specification.

Token rows name slots, and tables on the device say where the factors of a slot lie and what their rank is, so that a
captured step serves any adapters. The first kernel sums over ranges of input features that depend on their number
alone, and the second adds these sums in order, so a token row has the same bits whatever rows are beside it. Token rows
are taken in the order of their slots; a program goes through the slots of its rows one after the other.
"""

from __future__ import annotations

import torch

import triton.language as tl
from outrider.kernels.adapters import NUM_PLACES, AdapterTables, RowSlots, TargetRange
from outrider.kernels.triton.common import (
    FLOATS,
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel

# Token rows of a program, up to so many of a step. Tensor cores take _TILE in any case, so bits do not depend on it.
_ROWS_OF_PROGRAM = ((16, 1), (512, 4))
_TILE = 16  # token rows, and ranks, that tensor cores take at least
_BLOCK_K, _BLOCK_N = 128, 128
_MAX_SPLITS, _SPLIT_COLUMNS = 8, 512


@kernel(do_not_specialize=["M"])
def _shrink_kernel(
    x, numbers, places, slots, order, inner, x_stride, M, first_target, num_targets, max_rank, K: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, PLACES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """inner [splits, token rows in their order, targets, max rank] float32: the sums over SPLIT input features each."""
    release_dependents(PDL)
    lane, column = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    place_of_row = tl.program_id(0) * ROWS + lane
    exists = (lane < ROWS) & (place_of_row < M)
    target, begin = tl.program_id(1), tl.program_id(2) * SPLIT
    wait_for_inputs(PDL)
    token = tl.load(order + place_of_row, mask=exists, other=0)
    slot = tl.load(slots + token, mask=exists, other=-1)
    x_at = x + token[:, None] * x_stride + column[None, :]
    row = tl.program_id(2).to(tl.int64) * M + place_of_row
    inner_at = inner + (row[:, None] * tl.num_programs(1) + target) * max_rank + lane[None, :]
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        place = places + (current * num_targets + first_target + target) * PLACES
        factor, rank = numbers + tl.load(place), tl.load(place + 2)
        for block in range(0, rank, TILE):
            in_rank = block + lane < rank
            a_at = factor + (block + lane).to(tl.int64)[:, None] * K + column[None, :]
            acc = tl.zeros([TILE, TILE], dtype=tl.float32)
            for start in range(begin, tl.minimum(begin + SPLIT, K), BLOCK_K):
                is_there = start + column < K
                value = tl.load(x_at + start, mask=is_own[:, None] & is_there[None, :], other=0.0)
                a = tl.load(a_at + start, mask=in_rank[:, None] & is_there[None, :], other=0.0)
                acc = tl.dot(value, tl.trans(a), acc, input_precision="ieee")
            tl.store(inner_at + block, acc, mask=is_own[:, None] & in_rank[None, :])
        slot = tl.where(is_own, -1, slot)
        current = tl.max(slot, axis=0)


@kernel(do_not_specialize=["M", "first"])
def _expand_kernel(
    inner, numbers, places, scales, bounds, slots, order, out, out_stride, M, first, width, first_target, num_targets,
    max_rank, count, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """first, width: the output features that `out` has. count: targets that `inner` has."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    place_of_row = tl.program_id(0) * ROWS + lane
    exists = (lane < ROWS) & (place_of_row < M)
    place_of_target = tl.program_id(2)
    target = first_target + place_of_target
    wait_for_inputs(PDL)
    token = tl.load(order + place_of_row, mask=exists, other=0)
    slot = tl.load(slots + token, mask=exists, other=-1)
    low, high = tl.load(bounds + 2 * target), tl.load(bounds + 2 * target + 1)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # within the target
    column = low + feature - first  # of `out`
    is_there = (low + feature < high) & (column >= 0) & (column < width)
    inner_at = inner + (place_of_row.to(tl.int64)[:, None] * count + place_of_target) * max_rank + lane[None, :]
    out_at = out + token[:, None] * out_stride + column[None, :]
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        place = places + (current * num_targets + target) * PLACES
        factor, rank = numbers + tl.load(place + 1), tl.load(place + 2)
        if rank > 0:
            acc = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
            for block in range(0, rank, TILE):
                in_rank = block + lane < rank
                total = tl.zeros([TILE, TILE], dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    part = inner_at + tl.cast(split, tl.int64) * M * count * max_rank + block
                    total += tl.load(part, mask=is_own[:, None] & in_rank[None, :], other=0.0)
                b_at = factor + feature.to(tl.int64)[:, None] * rank + (block + lane)[None, :]
                b = tl.load(b_at, mask=is_there[:, None] & in_rank[None, :], other=0.0)
                acc = tl.dot(total.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
            inside = is_own[:, None] & is_there[None, :]
            scale = tl.load(scales + current * num_targets + target)
            before = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_at, (before + scale * acc).to(out.dtype.element_ty), mask=inside)
        slot = tl.where(is_own, -1, slot)
        current = tl.max(slot, axis=0)


def add_adapters(x: torch.Tensor, out: torch.Tensor, first: int, rows: RowSlots, tables: AdapterTables,
                 targets: TargetRange, *, pdl: bool | None = None) -> None:
    """See `kernels.adapters.add_adapters`."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name, device = "add_adapters", x.device
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    num_tokens, num_inputs = x.shape
    require_tensor(name, "out", out, (num_tokens, None), device, FLOATS)
    for argument, tensor in (("slots", rows.slots), ("order", rows.order)):
        require_tensor(name, argument, tensor, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "numbers", tables.numbers, (None,), device, (x.dtype,))
    num_slots, num_targets = tables.scales.shape
    require_tensor(name, "places", tables.places, (num_slots, num_targets, NUM_PLACES), device, (torch.int64,), 3)
    require_tensor(name, "scales", tables.scales, (num_slots, num_targets), device, (torch.float32,), 2)
    require_tensor(name, "bounds", tables.bounds, (num_targets, 2), device, (torch.int64,), 2)
    require(targets.first + len(targets.ends) <= num_targets, name, "targets", "are beyond the tables")
    width = out.shape[1]
    asked = targets.within(first, first + width)
    if not num_tokens or not asked:
        return
    # Ranges of input features depend on their number alone, or bits would depend on the batch.
    splits = max(1, min(_MAX_SPLITS, num_inputs // _SPLIT_COLUMNS))
    split = cdiv(cdiv(num_inputs, splits), _BLOCK_K) * _BLOCK_K
    splits = cdiv(num_inputs, split)
    height = next((height for most, height in _ROWS_OF_PROGRAM if num_tokens <= most), _TILE)
    inner = torch.empty(splits, num_tokens, len(asked), tables.max_rank, dtype=torch.float32, device=device)
    tiles = cdiv(num_tokens, height)
    _shrink_kernel[(tiles, len(asked), splits)](
        x, tables.numbers, tables.places, *rows, inner, x.stride(0), num_tokens, asked.start, num_targets,
        tables.max_rank, K=num_inputs, SPLIT=split, ROWS=height, TILE=_TILE, BLOCK_K=_BLOCK_K, PLACES=NUM_PLACES,
        PDL=pdl, num_warps=4, num_stages=3, **pdl_options(pdl))  # fmt: skip
    begins = (0, *targets.ends[:-1])
    largest = max(end - begin for begin, end in zip(begins, targets.ends, strict=True))
    block_n = min(_BLOCK_N, max(_TILE, next_power_of_two(largest)))
    _expand_kernel[(tiles, cdiv(largest, block_n), len(asked))](
        inner, tables.numbers, tables.places, tables.scales, tables.bounds, *rows, out, out.stride(0), num_tokens,
        first, width, asked.start, num_targets, tables.max_rank, len(asked), SPLITS=splits, ROWS=height, TILE=_TILE,
        BLOCK_N=block_n, PLACES=NUM_PLACES, PDL=pdl, num_warps=4, num_stages=2, **pdl_options(pdl))  # fmt: skip
