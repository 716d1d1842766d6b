"""LoRA adapters of linear layers: two launches, one for each factor. `kernels/adapter_products.py` is the
specification.

Token rows name adapter slots. Tables on the device say where a slot's factors are stored and what their rank is, so a
captured step serves any adapters. The first kernel sums over ranges of input features that depend only on the number of
features, and the second adds these sums in order, so a token row has the same bits whatever rows are beside it.

A piece of work is a segment of token rows with one slot (see `RowSlots`) and a range of features. Programs loop over
the pieces that exist: a launch is as large as the most work there may be, but takes only as long as the work that there
is. The first kernel does not need the result of the layer's product. It is launched after the product, and runs at the
same time where the product allows that. Factors and segments are fetched while the previous kernel still runs, because
no kernel of the layers writes them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from outrider.kernels.delta_tables import ALIGNMENT, NUM_PLACES, SEGMENT_ROWS, DeltaTables, RowSlots, TargetRange
from outrider.kernels.gpu.common import (
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
from outrider.kernels.gpu.launch.triton_kernel import is_behind_product, is_collecting, kernel

TILE = SEGMENT_ROWS
_MAX_PROGRAMS = 528  # that go through pieces of work: about as many as run at once
_MIN_SPLITS, _MAX_SPLIT = 8, 1024  # ranges of input features: about so many, none longer
# Input features that are loaded at once; beside a product few, since programs must find room in the shared memory that
# its programs leave. Bits do not depend on it: products of 16-bit numbers are added 16 at a time, in order.
_BLOCK_K, _BLOCK_K_BESIDE, _BLOCK_K_FLOAT32 = 512, 128, 128
_BLOCK_N = 128
_MAX_RANKS = 64
_GATED = ("silu", "gelu_pytorch_tanh")
_LINE = tl.constexpr(128)  # bytes the memory system fetches at once
_MAX_STEP = 16  # numbers that one load takes at most


@triton.jit
def summed_ranges(at, stride, mask, SPLITS: tl.constexpr):
    """Add up the partial sums of all ranges of input features, in order."""
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + tl.cast(split, tl.int64) * stride, mask=mask, other=0.0)
    return total


@triton.jit
def own_blocks(num_segments, PER_SEGMENT: tl.constexpr):
    """Return (first, end) of the blocks of output features that this program computes; blocks are counted over all
    segments. Neighbouring blocks mostly belong to one segment, so the program adds up that segment's partial sums
    once."""
    num_blocks = tl.load(num_segments).to(tl.int32) * PER_SEGMENT
    share = tl.cdiv(num_blocks, tl.num_programs(0))
    first = tl.program_id(0) * share
    return first, tl.minimum(first + share, num_blocks)


@triton.jit
def added_by(total, b, b_at, b_stride, rank, inner_at, inner_stride, is_own, is_there, TILE: tl.constexpr,
             RANKS: tl.constexpr, HAS_MORE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Multiply the summed first product of an adapter (at inner_at) with its second factor of this rank, and return
    [TILE, BLOCK_N] float32. total, b: the first RANKS ranks of both operands. HAS_MORE: there may be more ranks."""
    lane = tl.arange(0, RANKS)
    acc = tl.dot(total, b, tl.zeros([TILE, BLOCK_N], dtype=tl.float32), input_precision="ieee")
    if HAS_MORE:
        for block in range(RANKS, rank, RANKS):
            is_rank = block + lane < rank
            more = summed_ranges(inner_at + block, inner_stride, is_own[:, None] & is_rank[None, :], SPLITS)
            b_at += RANKS * b_stride
            b = tl.load(b_at, mask=is_rank[:, None] & is_there[None, :], other=0.0)
            acc = tl.dot(more.to(b.dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit
def _prefetch_factor(factor, row, rank, first, K: tl.constexpr, SPLIT: tl.constexpr):
    """Prefetch SPLIT columns (a power of two), from `first` on, of some rows of a first factor. Loads that follow one
    another then wait for memory only once."""
    step: tl.constexpr = _LINE // (factor.dtype.element_ty.primitive_bitwidth // 8)
    column = tl.minimum(first + tl.arange(0, SPLIT // step) * step, K - 1)
    own = tl.minimum(row, tl.maximum(rank, 1) - 1)
    address = (factor + own[:, None] * K + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@kernel(do_not_specialize=["M", "num_pieces", "share", "first_target", "num_targets"])
def _shrink_kernel(
    x, numbers, places, segments, order, inner, x_stride, M, num_pieces, share, first_target, num_targets, inner_width,
    COUNT: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr,
    PER_ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, PLACES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BESIDE: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply token rows with the first factors. Writes inner [SPLITS, token rows in their order, COUNT targets,
    ranks] float32: a partial sum for every SPLIT input features.

    Each slot is an adapter, or with EXPERTS > 1 one expert of an adapter. Row `r` reads row r // PER_ROW of x. share:
    how many pieces of work divide the ranks of an adapter.

    BESIDE: this kernel runs at the same time as the previous kernel, which is a product of x that let this one start
    after it had itself waited for x (`note_product`). So x is complete and `inner` is written by no other kernel,
    because all kernels before the product have ended; and no memory that the product still uses has been freed. x is
    read from the L2 cache, as the copy in an L1 cache may be older. One program waits for the product to end, since the
    next kernel waits only for this one; the other programs leave room for more of them."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    piece = tl.program_id(0)
    while piece < num_pieces:
        target, rest = piece % COUNT, piece // COUNT
        split, rest = rest % SPLITS, rest // SPLITS
        segment = segments + rest // share * 3
        begin, end, slot = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        if slot >= 0:
            place_of_row = begin + lane
            is_own = place_of_row < end
            column = split * SPLIT + tl.arange(0, BLOCK_K)
            token = tl.load(order + place_of_row, mask=is_own, other=0)
            place = places + (slot // EXPERTS * num_targets + first_target + target) * PLACES
            rank = tl.load(place + 2).to(tl.int32)
            factor = numbers + tl.multiple_of(tl.load(place), ALIGNMENT)
            if EXPERTS > 1:
                factor += tl.multiple_of(slot % EXPERTS * rank * K, ALIGNMENT)
            x_at = x + (token // PER_ROW)[:, None] * x_stride + column[None, :]
            row = split.to(tl.int64) * M + place_of_row
            inner_at = inner + (row[:, None] * COUNT + target) * inner_width + lane[None, :]
            block = rest % share * TILE
            a_at = factor + (block + lane)[:, None] * K + column[None, :]
            a = tl.load(a_at, mask=(block + lane < rank)[:, None] & (column < K)[None, :], other=0.0)
            if BESIDE:
                if PDL:
                    _prefetch_factor(factor, block + lane, rank, split * SPLIT, K, SPLIT)
            else:
                wait_for_inputs(PDL)  # in every piece: a program's first ones may be of rows without an adapter
            for block in range(rest % share * TILE, rank, share * TILE):
                acc = tl.zeros([TILE, TILE], dtype=tl.float32)
                for start in tl.static_range(0, SPLIT, BLOCK_K):
                    value = tl.load(x_at + start, mask=is_own[:, None] & (column + start < K)[None, :], other=0.0,
                                    cache_modifier=".cg" if BESIDE else "")
                    acc = tl.dot(value, tl.trans(a), acc, input_precision="ieee")
                    if start + BLOCK_K < SPLIT:
                        is_there = column + start + BLOCK_K < K
                        a = tl.load(a_at + start + BLOCK_K, mask=(block + lane < rank)[:, None] & is_there[None, :],
                                    other=0.0)
                tl.store(inner_at + block, acc, mask=is_own[:, None])
                a_at += share * TILE * K
                is_next = block + share * TILE + lane < rank
                a = tl.load(a_at, mask=is_next[:, None] & (column < K)[None, :], other=0.0)
        piece = tl.where(begin < M, piece + tl.num_programs(0), num_pieces)
    if BESIDE:
        if tl.program_id(0) == 0:
            wait_for_inputs(PDL)
    else:
        wait_for_inputs(PDL)


@kernel(do_not_specialize=["M", "first", "first_target", "num_targets"])
def _expand_kernel(
    inner, numbers, places, scales, bounds, segments, num_segments, order, out, out_stride, M, first, width,
    first_target, num_targets, inner_width, gain, COUNT: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, HAS_MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    PLACES: tl.constexpr, ALIGNMENT: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply the summed first products with the second factors, and add the results to `out`.

    first, width: the output features that `out` has. COUNT: targets in `inner`, each with at most BLOCKS blocks of
    BLOCK_N features. gain: a factor for everything that is added. STEP: a number that divides `first` and the ends of
    all targets."""
    release_dependents(PDL)
    row, lane = tl.arange(0, TILE), tl.arange(0, RANKS)
    next_block, end_block = own_blocks(num_segments, COUNT * BLOCKS)
    while next_block < end_block:
        place_of_target = next_block // BLOCKS % COUNT
        segment = segments + next_block // (BLOCKS * COUNT) * 3
        begin, end, slot = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        block = next_block % BLOCKS
        stop = tl.minimum(BLOCKS, block + end_block - next_block)
        next_block += stop - block
        if slot >= 0:
            target = first_target + place_of_target
            low, high = tl.load(bounds + 2 * target), tl.load(bounds + 2 * target + 1)
            num_features = tl.multiple_of((high - low).to(tl.int32), STEP)
            first_column = tl.multiple_of((low - first).to(tl.int32), STEP)
            # Blocks that have features of the target within `out`.
            block = tl.maximum(block, -first_column // BLOCK_N)
            stop = tl.minimum(stop, tl.cdiv(tl.minimum(num_features, width - first_column), BLOCK_N))
            slot_and_target = slot // EXPERTS * num_targets + target
            place = places + slot_and_target * PLACES
            rank = tl.load(place + 2).to(tl.int32)
            if (rank > 0) & (block < stop):
                place_of_row = begin + row
                is_own = place_of_row < end
                token = tl.load(order + place_of_row, mask=is_own, other=0)
                factor = numbers + tl.multiple_of(tl.load(place + 1), ALIGNMENT)
                if EXPERTS > 1:
                    factor += tl.multiple_of(slot % EXPERTS * rank * num_features, ALIGNMENT)
                scale = tl.load(scales + slot_and_target) * gain
                feature = block * BLOCK_N + tl.arange(0, BLOCK_N)  # within the target
                # Groups of STEP features are whole, there or not, so that they can be loaded together.
                column = first_column + feature  # of `out`
                is_there = tl.max_constancy((feature < num_features) & (column >= 0) & (column < width), [STEP])
                is_rank = lane < rank
                b_at = factor + lane[:, None] * num_features + feature[None, :]
                b = tl.load(b_at, mask=is_rank[:, None] & is_there[None, :], other=0.0)
                wait_for_inputs(PDL)
                inner_row = place_of_row.to(tl.int64)[:, None] * COUNT + place_of_target
                inner_at = inner + inner_row * inner_width + lane[None, :]
                stride = tl.cast(M, tl.int64) * COUNT * inner_width
                total = summed_ranges(inner_at, stride, is_own[:, None] & is_rank[None, :], SPLITS).to(b.dtype)
                while block < stop:
                    inside = is_own[:, None] & is_there[None, :]
                    out_at = out + token[:, None] * out_stride + (first_column + feature)[None, :]
                    before = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
                    acc = added_by(total, b, b_at, num_features, rank, inner_at, stride, is_own, is_there, TILE, RANKS,
                                   HAS_MORE, BLOCK_N, SPLITS)
                    tl.store(out_at, (before + scale * acc).to(out.dtype.element_ty), mask=inside)
                    block += 1
                    feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
                    column = first_column + feature
                    is_there = tl.max_constancy((feature < num_features) & (column >= 0) & (column < width), [STEP])
                    b_at = factor + lane[:, None] * num_features + feature[None, :]
                    b = tl.load(b_at, mask=is_rank[:, None] & is_there[None, :] & (block < stop), other=0.0)
    wait_for_inputs(PDL)


@kernel(do_not_specialize=["M", "first_target", "num_targets"])
def _expand_gated_kernel(
    inner, numbers, places, scales, segments, num_segments, order, product, out, product_stride, out_stride, M, width,
    first_target, num_targets, inner_width, SPLITS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
    HAS_MORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr, ALIGNMENT: tl.constexpr,
    STEP: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):
    """Write out = act(gate) * up, after adding the adapters' results to gate and up. `product` has both without
    adapters. Gate and up are the two targets in `inner`, each with BLOCKS blocks of BLOCK_N features. Every token row
    is written; STEP divides width."""
    release_dependents(PDL)
    row, lane = tl.arange(0, TILE), tl.arange(0, RANKS)
    width = tl.multiple_of(width, STEP)
    next_block, end_block = own_blocks(num_segments, BLOCKS)
    while next_block < end_block:
        segment = segments + next_block // BLOCKS * 3
        begin, end, slot = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        block = next_block % BLOCKS
        stop = tl.minimum(BLOCKS, block + end_block - next_block)
        next_block += stop - block
        place_of_row = begin + row
        is_own = place_of_row < end
        token = tl.load(order + place_of_row, mask=is_own, other=0)
        # Ranks of gate and up; those of a segment without an adapter count as 0.
        slot_and_target = tl.maximum(slot, 0) * num_targets + first_target
        place = places + slot_and_target * PLACES
        gate_rank = tl.where(slot >= 0, tl.load(place + 2), 0).to(tl.int32)
        up_rank = tl.where(slot >= 0, tl.load(place + PLACES + 2), 0).to(tl.int32)
        gate_scale, up_scale = tl.load(scales + slot_and_target), tl.load(scales + slot_and_target + 1)
        gate_factor = numbers + tl.multiple_of(tl.load(place + 1), ALIGNMENT)
        up_factor = numbers + tl.multiple_of(tl.load(place + PLACES + 1), ALIGNMENT)
        feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_there = tl.max_constancy(feature < width, [STEP])
        factor_at = lane[:, None] * width + feature[None, :]
        gate_b = tl.load(gate_factor + factor_at, mask=(lane < gate_rank)[:, None] & is_there[None, :], other=0.0)
        up_b = tl.load(up_factor + factor_at, mask=(lane < up_rank)[:, None] & is_there[None, :], other=0.0)
        wait_for_inputs(PDL)
        inner_at = inner + place_of_row.to(tl.int64)[:, None] * 2 * inner_width + lane[None, :]
        stride = tl.cast(M, tl.int64) * 2 * inner_width
        gate_total = summed_ranges(inner_at, stride, is_own[:, None] & (lane < gate_rank)[None, :], SPLITS)
        up_total = summed_ranges(inner_at + inner_width, stride, is_own[:, None] & (lane < up_rank)[None, :], SPLITS)
        gate_total, up_total = gate_total.to(gate_b.dtype), up_total.to(up_b.dtype)
        while block < stop:
            inside = is_own[:, None] & is_there[None, :]
            product_at = product + token[:, None] * product_stride + feature[None, :]
            gate = tl.load(product_at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(product_at + width, mask=inside, other=0.0).to(tl.float32)
            factor_at = lane[:, None] * width + feature[None, :]
            if gate_rank > 0:
                gate += gate_scale * added_by(gate_total, gate_b, gate_factor + factor_at, width, gate_rank, inner_at,
                                              stride, is_own, is_there, TILE, RANKS, HAS_MORE, BLOCK_N, SPLITS)
            if up_rank > 0:
                up += up_scale * added_by(up_total, up_b, up_factor + factor_at, width, up_rank,
                                          inner_at + inner_width, stride, is_own, is_there, TILE, RANKS, HAS_MORE,
                                          BLOCK_N, SPLITS)
            # Rounded as if they had been stored.
            gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
            result = gated(gate, up, GELU).to(out.dtype.element_ty)
            tl.store(out + token[:, None] * out_stride + feature[None, :], result, mask=inside)
            block += 1
            feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_there = tl.max_constancy(feature < width, [STEP])
            factor_at = lane[:, None] * width + feature[None, :]
            is_next = is_there[None, :] & (block < stop)
            gate_b = tl.load(gate_factor + factor_at, mask=(lane < gate_rank)[:, None] & is_next, other=0.0)
            up_b = tl.load(up_factor + factor_at, mask=(lane < up_rank)[:, None] & is_next, other=0.0)
    wait_for_inputs(PDL)


def reduce_adapters(x: torch.Tensor, rows: RowSlots, tables: DeltaTables, targets: range, *,
                    pdl: bool | None = None) -> torch.Tensor:
    """Multiply token rows with the first factor of their adapters; see `kernels.adapter_products.reduce_adapters` for
    the arguments."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name = "reduce_adapters"
    require_tensor(name, "x", x, (None, None), x.device, FLOATS)
    require_tables(name, rows, tables, len(x), x)
    require(targets.stop <= len(tables.bounds), name, "targets", "are beyond the tables")
    return _shrink(x, rows, tables, targets, tables.max_rank, 1, 1, pdl)


def add_adapters(inner: torch.Tensor, out: torch.Tensor, first: int, rows: RowSlots, tables: DeltaTables,
                 targets: TargetRange, *, pdl: bool | None = None) -> None:
    """Multiply with the second factors and add the results to `out`; see `kernels.adapter_products.add_adapters` for
    the arguments."""
    pdl = uses_pdl(out.device) if pdl is None else pdl
    name, asked = "add_adapters", targets.within(first, first + out.shape[1])
    require_tensor(name, "out", out, (None, None), out.device, FLOATS)
    _require_inner(name, inner, rows, tables, len(out), len(asked), out.device)
    require(targets.first + len(targets.ends) <= len(tables.bounds), name, "targets", "are beyond the tables")
    if len(out) and asked:
        _expand(inner, out, first, rows, tables, targets, asked, 1.0, 1, pdl)


def takes_gated(inner: torch.Tensor, out: torch.Tensor, activation: str, rows: RowSlots, tables: DeltaTables,
                targets: TargetRange) -> bool:
    """Whether `add_adapters_gated` has a kernel for this call: gate and up must be two consecutive targets."""
    return activation in _GATED and len(targets.ends) == 2 and 2 * targets.ends[0] == targets.ends[1] == out.shape[1]


def add_adapters_gated(inner: torch.Tensor, out: torch.Tensor, activation: str, rows: RowSlots, tables: DeltaTables,
                       targets: TargetRange, *, pdl: bool | None = None) -> torch.Tensor:
    """Add the adapters' results to gate and up, and return act(gate) * up in one launch; see
    `kernels.adapter_products.add_adapters_gated` for the arguments."""
    pdl = uses_pdl(out.device) if pdl is None else pdl
    name, width, num_rows = "add_adapters_gated", targets.ends[0], len(out)
    require_tensor(name, "out", out, (None, 2 * width), out.device, FLOATS)
    _require_inner(name, inner, rows, tables, num_rows, 2, out.device)
    require(activation in _GATED, name, "activation", f"is {activation!r}")
    require(targets.first + 2 <= len(tables.bounds), name, "targets", "are beyond the tables")
    result = torch.empty(num_rows, width, dtype=out.dtype, device=out.device)
    if not num_rows:
        return result
    ranks, block = _ranks(inner.shape[3]), min(_BLOCK_N, max(TILE, next_power_of_two(width)))
    blocks = cdiv(width, block)
    programs = min(RowSlots.most_segments(num_rows, len(tables.scales)) * blocks, _MAX_PROGRAMS)
    _expand_gated_kernel[(programs,)](
        inner, tables.numbers, tables.places, tables.scales, rows.segments, rows.num_segments, rows.order, out, result,
        out.stride(0), width, num_rows, width, targets.first, len(tables.bounds), inner.shape[3],
        SPLITS=inner.shape[0], TILE=TILE, RANKS=ranks, HAS_MORE=inner.shape[3] > ranks, BLOCK_N=block, BLOCKS=blocks,
        PLACES=NUM_PLACES, ALIGNMENT=ALIGNMENT, STEP=_step(width), GELU=activation != "silu", PDL=pdl, num_warps=4,
        num_stages=1, **pdl_options(pdl))
    return result


def add_adapter_embeddings(out: torch.Tensor, tokens: torch.Tensor, gain: float, rows: RowSlots, tables: DeltaTables,
                           target: int, *, pdl: bool | None = None) -> None:
    """Add the adapters' token embeddings to `out`; see `kernels.adapter_products.add_adapter_embeddings` for the
    arguments."""
    pdl = uses_pdl(out.device) if pdl is None else pdl
    name = "add_adapter_embeddings"
    require_tensor(name, "out", out, (None, None), out.device, FLOATS)
    require_tensor(name, "tokens", tokens, (len(out),), out.device, (torch.int64,))
    require_tables(name, rows, tables, len(out), out)
    if len(out):
        begin, _, rank = tables.places[rows.sorted_slots.clamp(min=0), target].unbind(1)
        lane = torch.arange(_whole(tables.max_rank), device=out.device)
        looked_up = begin[:, None] + tokens[rows.order, None] * rank[:, None] + lane
        found = tables.numbers[looked_up.clamp(max=len(tables.numbers) - 1)].float()
        inner = torch.where(lane < rank[:, None], found, 0.0)[None, :, None]
        targets = TargetRange(target, (out.shape[1],))
        _expand(inner, out, 0, rows, tables, targets, range(target, target + 1), gain, 1, pdl)


def add_to_pairs(x: torch.Tensor, out: torch.Tensor, pairs: RowSlots, tables: DeltaTables, target: int,
                 max_rank: int, num_experts: int, pdl: bool) -> None:
    """Add the adapters' low-rank products to out [pairs, features], which holds an expert projection of each pair
    (token row, expert). pairs: the slot of each pair, which is the adapter's slot times `num_experts` plus the expert.
    x: [pairs, inputs], or [tokens, inputs], where each token row serves equally many pairs. max_rank: the target's
    largest rank."""
    name = "add_to_pairs"
    require_tensor(name, "out", out, (None, None), x.device, FLOATS)
    require(len(x) > 0 and len(out) % len(x) == 0, name, "x", f"has {len(x)} rows for {len(out)} pairs")
    require_tables(name, pairs, tables, len(out), x)
    asked, targets = range(target, target + 1), TargetRange(target, (out.shape[1],))
    inner = _shrink(x, pairs, tables, asked, max_rank, num_experts, len(out) // len(x), pdl)
    _expand(inner, out, 0, pairs, tables, targets, asked, 1.0, num_experts, pdl)


def _shrink(x: torch.Tensor, rows: RowSlots, tables: DeltaTables, asked: range, max_rank: int, num_experts: int,
            per_row: int, pdl: bool) -> torch.Tensor:
    """Multiply token rows by the first factors of their adapters. Returns partial sums [splits, rows in the order of
    `rows`, asked targets, ranks] float32; a split is a range of input features."""
    num_rows, num_inputs = len(rows.slots), x.shape[1]
    beside = is_behind_product(x)
    # Ranges of input features depend on their number alone, or bits would depend on the batch.
    block = min(_BLOCK_K if x.dtype.itemsize == 2 else _BLOCK_K_FLOAT32, max(TILE, next_power_of_two(num_inputs)))
    split = min(_MAX_SPLIT, cdiv(cdiv(num_inputs, _MIN_SPLITS), block) * block)
    splits = cdiv(num_inputs, split)
    width = _whole(max_rank)
    inner = torch.empty(splits, num_rows, len(asked), width, dtype=torch.float32, device=x.device)
    pieces = RowSlots.most_segments(num_rows, len(tables.scales) * num_experts) * len(asked) * splits
    if not pieces:
        return inner
    share = max(1, min(width // TILE, _MAX_PROGRAMS // pieces))
    for is_beside in (False, True) if is_collecting() and beside else (beside,):  # in a step of more rows it waits
        own_block = min(block, _BLOCK_K_BESIDE) if is_beside else block
        _shrink_kernel[(min(pieces * share, _MAX_PROGRAMS),)](
            x, tables.numbers, tables.places, rows.segments, rows.order, inner, x.stride(0), num_rows, pieces * share,
            share, asked.start, len(tables.bounds), width, COUNT=len(asked), K=num_inputs, SPLIT=split, SPLITS=splits,
            EXPERTS=num_experts, PER_ROW=per_row, TILE=TILE, BLOCK_K=own_block, PLACES=NUM_PLACES,
            ALIGNMENT=alignment_of(num_experts, num_inputs), BESIDE=is_beside, PDL=pdl, num_warps=4,
            num_stages=1, **pdl_options(pdl))
    return inner


def _expand(inner: torch.Tensor, out: torch.Tensor, first: int, rows: RowSlots, tables: DeltaTables,
            targets: TargetRange, asked: range, gain: float, num_experts: int, pdl: bool) -> None:
    """Multiply `inner` [splits, rows in their order, asked targets, ranks] by the second factors, and add the results
    to `out`."""
    splits, num_rows, _, inner_width = inner.shape
    begins = (0, *targets.ends[:-1])
    widest = max(end - begin for begin, end in zip(begins, targets.ends, strict=True))
    ranks, block = _ranks(inner_width), min(_BLOCK_N, max(TILE, next_power_of_two(widest)))
    blocks = cdiv(widest, block)
    segments = RowSlots.most_segments(num_rows, len(tables.scales) * num_experts)
    _expand_kernel[(min(segments * len(asked) * blocks, _MAX_PROGRAMS),)](
        inner, tables.numbers, tables.places, tables.scales, tables.bounds, rows.segments, rows.num_segments,
        rows.order, out, out.stride(0), num_rows, first, out.shape[1], asked.start, len(tables.bounds), inner_width,
        gain, COUNT=len(asked), SPLITS=splits, EXPERTS=num_experts, TILE=TILE, RANKS=ranks,
        HAS_MORE=inner_width > ranks, BLOCK_N=block, BLOCKS=blocks, PLACES=NUM_PLACES,
        ALIGNMENT=alignment_of(num_experts, widest), STEP=_step(first, out.shape[1], *targets.ends), PDL=pdl,
        num_warps=4, num_stages=1, **pdl_options(pdl))


def _ranks(inner_width: int) -> int:
    """Return how many ranks of an adapter the second kernel multiplies at once: enough for most adapters."""
    return min(_MAX_RANKS, next_power_of_two(inner_width))


def _step(*places: int) -> int:
    """Return the largest power of two, up to a limit, that divides all of these feature indices."""
    common = math.gcd(*places)
    return min(_MAX_STEP, common & -common)


def _whole(rank: int) -> int:
    """Round a rank up to whole tiles."""
    return cdiv(rank, TILE) * TILE


def alignment_of(num_experts: int, num_features: int) -> int:
    """Return to how many numbers the start of each factor is aligned in memory. The alignment is smaller if the factors
    of several experts are stored one after another."""
    return ALIGNMENT if num_experts == 1 else min(ALIGNMENT, num_features & -num_features)


def require_tables(name: str, rows: RowSlots, tables: DeltaTables, num_rows: int, x: torch.Tensor) -> None:
    _require_rows(name, rows, tables, num_rows, x.device)
    require_tensor(name, "numbers", tables.numbers, (None,), x.device, (x.dtype,))


def _require_inner(name: str, inner: torch.Tensor, rows: RowSlots, tables: DeltaTables, num_rows: int,
                   num_targets: int, device: torch.device) -> None:
    _require_rows(name, rows, tables, num_rows, device)
    width = _whole(tables.max_rank)
    require_tensor(name, "inner", inner, (None, num_rows, num_targets, width), device, (torch.float32,), 4)


def _require_rows(name: str, rows: RowSlots, tables: DeltaTables, num_rows: int, device: torch.device) -> None:
    for argument, tensor in (("slots", rows.slots), ("sorted_slots", rows.sorted_slots), ("order", rows.order)):
        require_tensor(name, argument, tensor, (num_rows,), device, (torch.int64,))
    require_tensor(name, "segments", rows.segments, (num_rows, 3), device, (torch.int64,), 2)
    require_tensor(name, "num_segments", rows.num_segments, (1,), device, (torch.int64,))
    num_slots, num_targets = tables.scales.shape
    require_tensor(name, "places", tables.places, (num_slots, num_targets, NUM_PLACES), device, (torch.int64,), 3)
    require_tensor(name, "scales", tables.scales, (num_slots, num_targets), device, (torch.float32,), 2)
    require_tensor(name, "bounds", tables.bounds, (num_targets, 2), device, (torch.int64,), 2)
