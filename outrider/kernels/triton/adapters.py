"""What adapters add to the product of a linear layer: two launches, one for each factor. `kernels/adapters.py` is the
specification.

Token rows name slots, and tables on the device say where the factors of a slot lie and what their rank is, so that a
captured step serves any adapters. The first kernel sums over ranges of input features that depend on their number
alone, and the second adds these sums in order, so a token row has the same bits whatever rows are beside it.

Token rows are taken in the order of their slots, in tiles. The slots of a tile are shared out to several programs, each
of which goes through its own one after the other; a program without a slot ends at once. Factors and the order of rows
are written by no kernel of the layers, so they are fetched while the predecessor still runs (see `RowSlots`).
"""

from __future__ import annotations

import math

import torch

import triton
import triton.language as tl
from outrider.kernels.adapters import ALIGNMENT, NUM_PLACES, AdapterTables, RowSlots, TargetRange
from outrider.kernels.triton.common import (
    FLOATS,
    cdiv,
    gated,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import kernel
from triton import knobs

TILE = 16  # token rows, and ranks, that tensor cores take at least
# Programs that share the slots of a tile, up to so many token rows of a step, and the most programs that a launch gets
# by that: programs without a slot take time, too.
_SHARES = ((1, 1), (2, 2), (4, 4), (16, 8), (64, 4), (256, 2))
_MAX_SHARED = 1024
_MIN_SPLITS, _MAX_SPLIT = 8, 1024  # ranges of input features: about so many, none longer
_BLOCK_K, _BLOCK_K_FLOAT32 = 512, 128
_BLOCK_N = 128
_EXPAND_REGISTERS = 128  # of a thread: ptxas takes twice as many otherwise, and half as many programs run at once
_GATED = ("silu", "gelu_pytorch_tanh")
_MAX_STEP = 16  # numbers that one load takes at most


@triton.jit
def without_largest(slot, count):
    """Slots of a tile without those that are the largest, the next smaller ones, and so on."""
    for _ in range(count):
        slot = tl.where(slot == tl.max(slot, axis=0), -1, slot)
    return slot


@triton.jit
def own_slots(sorted_slots, place_of_row, M, share):
    """The slots of a tile's rows, of which the first is this program's. Negative: no adapter, or another program's."""
    slot = tl.load(sorted_slots + place_of_row, mask=place_of_row < M, other=-1)
    return without_largest(slot, tl.program_id(0) % share)


@kernel(do_not_specialize=["M", "share", "first_target", "num_targets"])
def _shrink_kernel(
    x, numbers, places, sorted_slots, order, inner, x_stride, M, share, first_target, num_targets, inner_width,
    K: tl.constexpr, SPLIT: tl.constexpr, EXPERTS: tl.constexpr, PER_ROW: tl.constexpr, TILE: tl.constexpr,
    BLOCK_K: tl.constexpr, PLACES: tl.constexpr, ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [splits, token rows in their order, targets, ranks] float32: the sums over SPLIT input features each. A
    slot is one of EXPERTS experts of an adapter; its row `r` reads row r // PER_ROW of x."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    place_of_row = tl.program_id(0) // share * TILE + lane
    target, begin = tl.program_id(1), tl.program_id(2) * SPLIT
    column = begin + tl.arange(0, BLOCK_K)
    token = tl.load(order + place_of_row, mask=place_of_row < M, other=0)
    slot = own_slots(sorted_slots, place_of_row, M, share)
    x_at = x + (token // PER_ROW)[:, None] * x_stride + column[None, :]
    row = tl.program_id(2).to(tl.int64) * M + place_of_row
    inner_at = inner + (row[:, None] * tl.num_programs(1) + target) * inner_width + lane[None, :]
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        place = places + (current // EXPERTS * num_targets + first_target + target) * PLACES
        rank = tl.load(place + 2)
        factor = numbers + tl.multiple_of(tl.load(place) + current % EXPERTS * rank * K, ALIGNMENT)
        for block in range(0, rank, TILE):
            in_rank = block + lane < rank
            a_at = factor + (block + lane)[:, None] * K + column[None, :]
            a = tl.load(a_at, mask=in_rank[:, None] & (column < K)[None, :], other=0.0)
            wait_for_inputs(PDL)
            acc = tl.zeros([TILE, TILE], dtype=tl.float32)
            for start in tl.static_range(0, SPLIT, BLOCK_K):
                value = tl.load(x_at + start, mask=is_own[:, None] & (column + start < K)[None, :], other=0.0)
                acc = tl.dot(value, tl.trans(a), acc, input_precision="ieee")
                if start + BLOCK_K < SPLIT:
                    is_there = column + start + BLOCK_K < K
                    a = tl.load(a_at + start + BLOCK_K, mask=in_rank[:, None] & is_there[None, :], other=0.0)
            tl.store(inner_at + block, acc, mask=is_own[:, None] & in_rank[None, :])
        slot = without_largest(slot, share)
        current = tl.max(slot, axis=0)
    wait_for_inputs(PDL)


@kernel(do_not_specialize=["M", "share", "first", "first_target", "num_targets", "count"])
def _expand_kernel(
    inner, numbers, places, scales, bounds, sorted_slots, order, out, out_stride, M, share, first, width, first_target,
    num_targets, inner_width, count, gain, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, PLACES: tl.constexpr, ALIGNMENT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """first, width: the output features that `out` has. count: targets that `inner` has. gain: a factor of all that is
    added. STEP: all targets begin and end at multiples of it, and so does `first`."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    place_of_row = tl.program_id(0) // share * TILE + lane
    place_of_target = tl.program_id(2)
    target = first_target + place_of_target
    token = tl.load(order + place_of_row, mask=place_of_row < M, other=0)
    slot = own_slots(sorted_slots, place_of_row, M, share)
    low, high = tl.load(bounds + 2 * target), tl.load(bounds + 2 * target + 1)
    num_features = tl.multiple_of((high - low).to(tl.int32), STEP)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # within the target
    column = tl.multiple_of((low - first).to(tl.int32), STEP) + feature  # of `out`
    # Groups of STEP features are whole, there or not, so that they can be loaded together.
    is_there = tl.max_constancy((feature < num_features) & (column >= 0) & (column < width), [STEP])
    inner_at = inner + (place_of_row.to(tl.int64)[:, None] * count + place_of_target) * inner_width + lane[None, :]
    out_at = out + token[:, None] * out_stride + column[None, :]
    slot = tl.where(tl.max(is_there.to(tl.int32), axis=0) > 0, slot, -1)
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        slot_and_target = current // EXPERTS * num_targets + target
        place = places + slot_and_target * PLACES
        rank = tl.load(place + 2)
        factor = numbers + tl.multiple_of(tl.load(place + 1) + current % EXPERTS * rank * num_features, ALIGNMENT)
        scale = tl.load(scales + slot_and_target) * gain
        b_at = factor + lane[:, None] * num_features + feature[None, :]
        b = tl.load(b_at, mask=(lane < rank)[:, None] & is_there[None, :], other=0.0)
        wait_for_inputs(PDL)
        if rank > 0:
            inside = is_own[:, None] & is_there[None, :]
            before = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
            acc = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
            for block in range(0, rank, TILE):
                total = tl.zeros([TILE, TILE], dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    part = inner_at + tl.cast(split, tl.int64) * M * count * inner_width + block
                    total += tl.load(part, mask=is_own[:, None] & (block + lane < rank)[None, :], other=0.0)
                acc = tl.dot(total.to(b.dtype), b, acc, input_precision="ieee")
                in_next = block + TILE + lane < rank
                b_at += TILE * num_features
                b = tl.load(b_at, mask=in_next[:, None] & is_there[None, :], other=0.0)
            tl.store(out_at, (before + scale * acc).to(out.dtype.element_ty), mask=inside)
        slot = without_largest(slot, share)
        current = tl.max(slot, axis=0)
    wait_for_inputs(PDL)


@kernel(do_not_specialize=["M", "first_target", "num_targets"])
def _expand_gated_kernel(
    inner, numbers, places, scales, sorted_slots, order, product, out, product_stride, out_stride, M, width,
    first_target, num_targets, inner_width, SPLITS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    PLACES: tl.constexpr, ALIGNMENT: tl.constexpr, STEP: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up, of which `product` has both without adapters. Gate and up are the two targets that `inner`
    has. Every token row is written; STEP divides width."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    place_of_row = tl.program_id(0) * TILE + lane
    exists = place_of_row < M
    token = tl.load(order + place_of_row, mask=exists, other=0)
    slot = tl.load(sorted_slots + place_of_row, mask=exists, other=-1)
    width = tl.multiple_of(width, STEP)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = tl.max_constancy(feature < width, [STEP])
    # Sums for gate and up. Slots of a tile come one after the other, and each has rows of its own.
    gate_added = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
    up_added = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        for target in tl.static_range(2):
            slot_and_target = current * num_targets + first_target + target
            place = places + slot_and_target * PLACES
            rank = tl.load(place + 2)
            b_at = numbers + tl.multiple_of(tl.load(place + 1), ALIGNMENT) + lane[:, None] * width + feature[None, :]
            b = tl.load(b_at, mask=(lane < rank)[:, None] & is_there[None, :], other=0.0)
            scale = tl.load(scales + slot_and_target)
            wait_for_inputs(PDL)
            inner_at = inner + (place_of_row.to(tl.int64)[:, None] * 2 + target) * inner_width + lane[None, :]
            acc = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
            for block in range(0, rank, TILE):
                total = tl.zeros([TILE, TILE], dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    part = inner_at + tl.cast(split, tl.int64) * M * 2 * inner_width + block
                    total += tl.load(part, mask=is_own[:, None] & (block + lane < rank)[None, :], other=0.0)
                acc = tl.dot(total.to(b.dtype), b, acc, input_precision="ieee")
                b_at += TILE * width
                in_next = block + TILE + lane < rank
                b = tl.load(b_at, mask=in_next[:, None] & is_there[None, :], other=0.0)
            if target == 0:
                gate_added = tl.where(is_own[:, None], scale * acc, gate_added)
            else:
                up_added = tl.where(is_own[:, None], scale * acc, up_added)
        slot = without_largest(slot, 1)
        current = tl.max(slot, axis=0)
    wait_for_inputs(PDL)
    inside = exists[:, None] & is_there[None, :]
    product_at = product + token[:, None] * product_stride + feature[None, :]
    # Rounded as if they had been stored.
    gate = tl.load(product_at, mask=inside, other=0.0).to(tl.float32) + gate_added
    up = tl.load(product_at + width, mask=inside, other=0.0).to(tl.float32) + up_added
    gate, up = (gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32))
    result = gated(gate, up, GELU).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * out_stride + feature[None, :], result, mask=inside)


def add_adapters(x: torch.Tensor, out: torch.Tensor, first: int, rows: RowSlots, tables: AdapterTables,
                 targets: TargetRange, *, pdl: bool | None = None) -> None:
    """See `kernels.adapters.add_adapters`."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name = "add_adapters"
    require_tensor(name, "x", x, (None, None), x.device, FLOATS)
    require_tensor(name, "out", out, (len(x), None), x.device, FLOATS)
    require_tables(name, rows, tables, len(x), x)
    require(targets.first + len(targets.ends) <= len(tables.bounds), name, "targets", "are beyond the tables")
    asked = targets.within(first, first + out.shape[1])
    if len(x) and asked:
        _expand(_shrink(x, rows, tables, asked, 1, 1, pdl), out, first, rows, tables, targets, asked, 1.0, 1, pdl)


def takes_gated(x: torch.Tensor, out: torch.Tensor, activation: str, rows: RowSlots, tables: AdapterTables,
                targets: TargetRange) -> bool:
    """Whether gate and up are two targets, one behind the other."""
    return activation in _GATED and len(targets.ends) == 2 and 2 * targets.ends[0] == targets.ends[1] == out.shape[1]


def add_adapters_gated(x: torch.Tensor, out: torch.Tensor, activation: str, rows: RowSlots, tables: AdapterTables,
                       targets: TargetRange, *, pdl: bool | None = None) -> torch.Tensor:
    """See `kernels.adapters.add_adapters_gated`."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name, width = "add_adapters_gated", targets.ends[0]
    require_tensor(name, "x", x, (None, None), x.device, FLOATS)
    require_tensor(name, "out", out, (len(x), 2 * width), x.device, (x.dtype,))
    require_tables(name, rows, tables, len(x), x)
    require(activation in _GATED, name, "activation", f"is {activation!r}")
    require(targets.first + 2 <= len(tables.bounds), name, "targets", "are beyond the tables")
    result = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if not len(x):
        return result
    inner = _shrink(x, rows, tables, range(targets.first, targets.first + 2), 1, 1, pdl)
    block = min(_BLOCK_N, max(TILE, next_power_of_two(width)))
    limit: dict[str, int] = {} if knobs.runtime.interpret else {"maxnreg": _EXPAND_REGISTERS}
    _expand_gated_kernel[(cdiv(len(x), TILE), cdiv(width, block))](
        inner, tables.numbers, tables.places, tables.scales, rows.sorted_slots, rows.order, out, result, out.stride(0),
        width, len(x), width, targets.first, len(tables.bounds), inner.shape[3], SPLITS=inner.shape[0], TILE=TILE,
        BLOCK_N=block, PLACES=NUM_PLACES, ALIGNMENT=ALIGNMENT, STEP=_step(width), GELU=activation != "silu", PDL=pdl,
        num_warps=4, num_stages=1, **limit, **pdl_options(pdl))  # fmt: skip
    return result


def add_adapter_embeddings(out: torch.Tensor, tokens: torch.Tensor, gain: float, rows: RowSlots, tables: AdapterTables,
                           target: int, *, pdl: bool | None = None) -> None:
    """See `kernels.adapters.add_adapter_embeddings`."""
    pdl = uses_pdl(out.device) if pdl is None else pdl
    name = "add_adapter_embeddings"
    require_tensor(name, "out", out, (None, None), out.device, FLOATS)
    require_tensor(name, "tokens", tokens, (len(out),), out.device, (torch.int64,))
    require_tables(name, rows, tables, len(out), out)
    if len(out):
        begin, _, rank = tables.places[rows.sorted_slots.clamp(min=0), target].unbind(1)
        lane = torch.arange(_whole(tables.max_rank), device=out.device)
        looked_up = begin[:, None] + tokens[rows.order, None] * rank[:, None] + lane
        inner = tables.numbers[looked_up.clamp(max=len(tables.numbers) - 1)].float()[None, :, None]
        targets = TargetRange(target, (out.shape[1],))
        _expand(inner, out, 0, rows, tables, targets, range(target, target + 1), gain, 1, pdl)


def add_to_pairs(x: torch.Tensor, out: torch.Tensor, pairs: RowSlots, tables: AdapterTables, target: int,
                 num_experts: int, pdl: bool) -> None:
    """Add to out [pairs, features], the products of pairs of token row and expert, what adapters add. pairs: the slot
    of each pair, which is that of its adapter times `num_experts` plus its expert. x: [pairs, inputs], or [tokens,
    inputs], of which each has as many pairs."""
    name = "add_to_pairs"
    require_tensor(name, "out", out, (None, None), x.device, FLOATS)
    require(len(x) > 0 and len(out) % len(x) == 0, name, "x", f"has {len(x)} rows for {len(out)} pairs")
    require_tables(name, pairs, tables, len(out), x)
    asked, targets = range(target, target + 1), TargetRange(target, (out.shape[1],))
    inner = _shrink(x, pairs, tables, asked, num_experts, len(out) // len(x), pdl)
    _expand(inner, out, 0, pairs, tables, targets, asked, 1.0, num_experts, pdl)


def _shrink(x: torch.Tensor, rows: RowSlots, tables: AdapterTables, asked: range, num_experts: int, per_row: int,
            pdl: bool) -> torch.Tensor:
    """The products with the first factors: [splits, rows in their order, asked targets, ranks] float32."""
    num_rows, num_inputs = len(rows.slots), x.shape[1]
    # Ranges of input features depend on their number alone, or bits would depend on the batch.
    block = min(_BLOCK_K if x.dtype.itemsize == 2 else _BLOCK_K_FLOAT32, max(TILE, next_power_of_two(num_inputs)))
    split = min(_MAX_SPLIT, cdiv(cdiv(num_inputs, _MIN_SPLITS), block) * block)
    splits = cdiv(num_inputs, split)
    width = _whole(tables.max_rank)
    inner = torch.empty(splits, num_rows, len(asked), width, dtype=torch.float32, device=x.device)
    share = share_of(num_rows, len(asked) * splits, len(tables.scales) * num_experts)
    _shrink_kernel[(cdiv(num_rows, TILE) * share, len(asked), splits)](
        x, tables.numbers, tables.places, rows.sorted_slots, rows.order, inner, x.stride(0), num_rows, share,
        asked.start, len(tables.bounds), width, K=num_inputs, SPLIT=split, EXPERTS=num_experts, PER_ROW=per_row,
        TILE=TILE, BLOCK_K=block, PLACES=NUM_PLACES, ALIGNMENT=alignment_of(num_experts, num_inputs), PDL=pdl,
        num_warps=4, num_stages=1, **pdl_options(pdl))  # fmt: skip
    return inner


def _expand(inner: torch.Tensor, out: torch.Tensor, first: int, rows: RowSlots, tables: AdapterTables,
            targets: TargetRange, asked: range, gain: float, num_experts: int, pdl: bool) -> None:
    """Add the products of `inner` [splits, rows in their order, asked targets, ranks] with the second factors."""
    splits, num_rows, _, inner_width = inner.shape
    begins = (0, *targets.ends[:-1])
    widest = max(end - begin for begin, end in zip(begins, targets.ends, strict=True))
    block = min(_BLOCK_N, max(TILE, next_power_of_two(widest)))
    blocks = cdiv(widest, block)
    share = share_of(num_rows, len(asked) * blocks, len(tables.scales) * num_experts)
    limit: dict[str, int] = {} if knobs.runtime.interpret else {"maxnreg": _EXPAND_REGISTERS}
    _expand_kernel[(cdiv(num_rows, TILE) * share, blocks, len(asked))](
        inner, tables.numbers, tables.places, tables.scales, tables.bounds, rows.sorted_slots, rows.order, out,
        out.stride(0), num_rows, share, first, out.shape[1], asked.start, len(tables.bounds), inner_width, len(asked),
        gain, SPLITS=splits, EXPERTS=num_experts, TILE=TILE, BLOCK_N=block, PLACES=NUM_PLACES,
        ALIGNMENT=alignment_of(num_experts, widest), STEP=_step(first, out.shape[1], *targets.ends), PDL=pdl,
        num_warps=4, num_stages=1, **limit, **pdl_options(pdl))  # fmt: skip


def _step(*places: int) -> int:
    """The largest power of two, up to a limit, that all places are multiples of."""
    common = math.gcd(*places)
    return min(_MAX_STEP, common & -common)


def _whole(rank: int) -> int:
    """A rank in whole tiles."""
    return cdiv(rank, TILE) * TILE


def alignment_of(num_experts: int, num_features: int) -> int:
    """Numbers at whose multiples factors begin: experts lie one behind the other."""
    return ALIGNMENT if num_experts == 1 else min(ALIGNMENT, num_features & -num_features)


def share_of(num_rows: int, programs: int, num_slots: int) -> int:
    """Programs that share the slots of a tile, where each tile has so many programs already. Bits do not depend on
    it."""
    share = next((share for most, share in _SHARES if num_rows <= most), 1)
    share = min(share, next_power_of_two(num_slots))
    while share > 1 and cdiv(num_rows, TILE) * programs * share > _MAX_SHARED:
        share //= 2
    return share


def require_tables(name: str, rows: RowSlots, tables: AdapterTables, num_rows: int, x: torch.Tensor) -> None:
    for argument, tensor in (("slots", rows.slots), ("sorted_slots", rows.sorted_slots), ("order", rows.order)):
        require_tensor(name, argument, tensor, (num_rows,), x.device, (torch.int64,))
    require_tensor(name, "numbers", tables.numbers, (None,), x.device, (x.dtype,))
    num_slots, num_targets = tables.scales.shape
    require_tensor(name, "places", tables.places, (num_slots, num_targets, NUM_PLACES), x.device, (torch.int64,), 3)
    require_tensor(name, "scales", tables.scales, (num_slots, num_targets), x.device, (torch.float32,), 2)
    require_tensor(name, "bounds", tables.bounds, (num_targets, 2), x.device, (torch.int64,), 2)
