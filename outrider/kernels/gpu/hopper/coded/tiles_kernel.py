"""The Hopper kernel that `tiles.py` launches, divided into what each kind of warp runs.

One warp fetches. It copies codes with their scales into one ring of buffers, and 64 columns of token rows at a time
into another ring, because a tile has many more bytes of token rows than of codes. One or two groups of four warps
multiply. Each group dequantises its codes to bfloat16 in the registers from which tensor cores read them, for 64 or 128
outputs; all groups share the token rows.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider.kernels.code_kinds import CODES, INT8
from outrider.kernels.gpu.hopper.coded.rows_kernel import COLUMNS, OUTPUTS, int4_halves, int8_half, load_groups
from outrider.kernels.gpu.hopper.dependent_launch import release_dependents, wait_for_inputs
from outrider.kernels.gpu.hopper.few_rows import gated
from outrider.kernels.gpu.hopper.items import barrier, phase_of, slot_of
from outrider.kernels.gpu.hopper.prefill import make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel

HALF = gl.constexpr(64)  # columns of token rows that are fetched at once: 128 bytes, the widest row that is swizzled
STORED_ROWS = gl.constexpr(64)  # token rows whose results pass through shared memory at once
NO_SHIFTS, ZEROS, OFFSETS = (gl.constexpr(kind) for kind in range(3))  # what a weight's `shifts` are
_INT8 = gl.constexpr(CODES.index(INT8))


@gluon.jit
def _outputs_of(tile, WARP_GROUP: gl.constexpr, BLOCK: gl.constexpr, N, WARP_GROUPS: gl.constexpr,
                BLOCKS: gl.constexpr, GATE: gl.constexpr):
    """Return which 64 outputs of the weight one block of a group of warps computes. With a gate, the first block has
    gate outputs, and the second has the up outputs that these multiply."""
    if GATE:
        return tile * WARP_GROUPS + WARP_GROUP + BLOCK * (N // (2 * OUTPUTS))
    else:
        return (tile * WARP_GROUPS + WARP_GROUP) * BLOCKS + BLOCK


@gluon.jit
def _fetch_weights(tiles, ring, turn, tile, step, num_steps, N, CODE: gl.constexpr, WARP_GROUPS: gl.constexpr,
                   BLOCKS: gl.constexpr, GROUP: gl.constexpr, SHIFTS: gl.constexpr, GATE: gl.constexpr,
                   BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Start the copies of one step's codes and scales, BYTES in all."""
    x_tiles, w_tiles, s_tiles, z_tiles = tiles
    rows, weights, scales, shifts, x_ready, x_free, ready, free = ring
    TILES: gl.constexpr = 2 if CODE == _INT8 else 1
    slot, group = slot_of(turn, STAGES), step * (COLUMNS // GROUP)
    done = ready.index(slot)
    mbarrier.expect(done, BYTES)
    for warp_group in gl.static_range(WARP_GROUPS):
        for block in gl.static_range(BLOCKS):
            of_outputs = _outputs_of(tile, warp_group, block, N, WARP_GROUPS, BLOCKS, GATE)
            at = slot * (WARP_GROUPS * BLOCKS) + warp_group * BLOCKS + block
            for part in gl.static_range(TILES):
                place = [((of_outputs * num_steps + step) * TILES + part) * 32, 0]
                tma.async_copy_global_to_shared(w_tiles, place, done, weights.index(at * TILES + part))
            tma.async_copy_global_to_shared(s_tiles, [group, of_outputs * OUTPUTS], done, scales.index(at))
            if SHIFTS != NO_SHIFTS:
                tma.async_copy_global_to_shared(z_tiles, [group, of_outputs * OUTPUTS], done, shifts.index(at))


@gluon.jit
def _fetch_rows(tiles, ring, turn, token, step, ROWS: gl.constexpr, X_STAGES: gl.constexpr):
    """Start the copies of one step's token rows, each half as soon as there is room."""
    x_tiles, w_tiles, s_tiles, z_tiles = tiles
    rows, weights, scales, shifts, x_ready, x_free, ready, free = ring
    for part in gl.static_range(2):
        number = turn * 2 + part
        slot = slot_of(number, X_STAGES)
        mbarrier.wait(x_free.index(slot), phase_of(number, X_STAGES) ^ 1)
        mbarrier.expect(x_ready.index(slot), ROWS * HALF * 2)
        tma.async_copy_global_to_shared(x_tiles, [token, step * COLUMNS + part * HALF], x_ready.index(slot),
                                        rows.index(slot))


@gluon.jit
def _fetch(
    tiles, ring, tile, token, first, steps, num_steps, N, CODE: gl.constexpr, ROWS: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, SHIFTS: gl.constexpr, GATE: gl.constexpr,
    BYTES: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, PDL: gl.constexpr,
):
    rows, weights, scales, shifts, x_ready, x_free, ready, free = ring
    ahead = gl.minimum(steps, STAGES)
    for turn in range(0, ahead):
        _fetch_weights(tiles, ring, turn, tile, first + turn, num_steps, N, CODE, WARP_GROUPS, BLOCKS, GROUP, SHIFTS,
                       GATE, BYTES, STAGES)
    wait_for_inputs(PDL)
    # The place of these codes is free before that of the token rows for which the next line waits.
    LEAD: gl.constexpr = STAGES - (X_STAGES + 1) // 2
    for turn in range(0, steps):
        later = turn + LEAD
        if (later >= STAGES) & (later < steps):
            mbarrier.wait(free.index(slot_of(later, STAGES)), phase_of(later, STAGES) ^ 1)
            _fetch_weights(tiles, ring, later, tile, first + later, num_steps, N, CODE, WARP_GROUPS, BLOCKS, GROUP,
                           SHIFTS, GATE, BYTES, STAGES)
        _fetch_rows(tiles, ring, turn, token, first + turn, ROWS, X_STAGES)


@gluon.jit
def _scaled(numbers, scales, shifts, PART: gl.constexpr, GROUP: gl.constexpr, SHIFTS: gl.constexpr,
            OPERAND: gl.constexpr):
    """Multiply dequantised numbers [64, 64], half PART of a step's columns, by the scales of their groups and add the
    shifts; round once."""
    IN_HALF: gl.constexpr = min(GROUP, HALF)
    FIRST: gl.constexpr = PART if GROUP <= HALF else 0
    scale = load_groups(scales, FIRST, IN_HALF, OPERAND)
    if SHIFTS == OFFSETS:
        offset = load_groups(shifts, FIRST, IN_HALF, OPERAND)
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [numbers, scale, offset],
                                         dtype=gl.bfloat16, is_pure=True, pack=2)
    if SHIFTS == ZEROS:
        zero = load_groups(shifts, FIRST, IN_HALF, OPERAND).to(gl.bfloat16)
        numbers = gl.inline_asm_elementwise("sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, zero], dtype=gl.bfloat16,
                                            is_pure=True, pack=2)  # whole numbers below 256
    if scale.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, scale], dtype=gl.bfloat16,
                                         is_pure=True, pack=2)
    else:
        return (numbers.to(gl.float32) * scale.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _numbers(ring, at, CODE: gl.constexpr, GROUP: gl.constexpr, SHIFTS: gl.constexpr, OPERAND: gl.constexpr):
    """Dequantise one step's codes of 64 outputs to bfloat16: (columns 0 to 63, columns 64 to 127)."""
    rows, weights, scales, shifts, x_ready, x_free, ready, free = ring
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    if CODE == _INT8:
        low = int8_half(weights.index(at * 2).load(BYTES), OPERAND)
        high = int8_half(weights.index(at * 2 + 1).load(BYTES), OPERAND)
    else:
        low, high = int4_halves(weights.index(at).load(BYTES), OPERAND)
    of_shifts = scales.index(at) if SHIFTS == NO_SHIFTS else shifts.index(at)
    low = _scaled(low, scales.index(at), of_shifts, 0, GROUP, SHIFTS, OPERAND)
    high = _scaled(high, scales.index(at), of_shifts, 1, GROUP, SHIFTS, OPERAND)
    return low, high


@gluon.jit
def _store(values, out, out_stride, output, token, M, N, ROWS: gl.constexpr):
    """Store values [64 outputs, token rows], from `output` and `token` on. Threads first exchange values through shared
    memory, so that neighbouring threads store neighbouring outputs. They exchange few token rows at once, to use little
    shared memory."""
    if ROWS > STORED_ROWS:
        halves = values.reshape([OUTPUTS, 2, ROWS // 2]).permute((0, 2, 1))
        first, second = gl.split(halves)
        _store(first, out, out_stride, output, token, M, N, ROWS // 2)
        _store(second, out, out_stride, output, token + ROWS // 2, M, N, ROWS // 2)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        values = gl.convert_layout(values.to(out.dtype.element_ty), LAYOUT)
        row = token + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
        column = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
        to = out + row.to(gl.int64)[None, :] * out_stride + column[:, None]
        gl.store(to, values, mask=(row < M)[None, :] & (column < N)[:, None])


@gluon.jit
def _sum_splits(acc, parts, counters, place, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a block's sums, and return (whether this program is the last of those that share the block, the sum of all
    if it is)."""
    SIZE: gl.constexpr = OUTPUTS * ROWS
    splits = gl.num_programs(2)  # not compiled in: products of other shapes have other numbers
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    part = parts + place.to(gl.int64) * splits * SIZE + row[:, None] * ROWS + token[None, :]
    gl.store(part + gl.program_id(2) * SIZE, acc)
    barrier()  # every thread's part is stored before one of them says so
    is_last = gl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        gl.store(counters + place, 0)
        # Parts come from other multiprocessors: they are read where all of them write, and added in order.
        acc = gl.load(part, cache_modifier=".cg")
        for split in range(1, splits):
            acc += gl.load(part + split * SIZE, cache_modifier=".cg")
    return is_last, acc


@gluon.jit
def _with_bias(acc, bias, output, N, HAS_BIAS: gl.constexpr, LAYOUT: gl.constexpr):
    if HAS_BIAS:
        row = output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
        acc += gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _multiply(
    bias, out, out_stride, parts, counters, ring, tile, token, steps, M, N, WARP_GROUP: gl.constexpr,
    CODE: gl.constexpr, ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr,
    SHIFTS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr,
):
    rows, weights, scales, shifts, x_ready, x_free, ready, free = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=LAYOUT)
    other = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=LAYOUT)  # sums of the second block
    for turn in range(0, steps):
        slot = slot_of(turn, STAGES)
        at = slot * (WARP_GROUPS * BLOCKS) + WARP_GROUP * BLOCKS
        low_slot, high_slot = slot_of(turn * 2, X_STAGES), slot_of(turn * 2 + 1, X_STAGES)
        x_low, x_high = rows.index(low_slot).permute((1, 0)), rows.index(high_slot).permute((1, 0))
        mbarrier.wait(ready.index(slot), phase_of(turn, STAGES))
        low, high = _numbers(ring, at, CODE, GROUP, SHIFTS, OPERAND)
        mbarrier.wait(x_ready.index(low_slot), phase_of(turn * 2, X_STAGES))
        acc = warpgroup_mma(low, x_low, acc, is_async=True)
        if BLOCKS == 2:  # numbers are made while tensor cores multiply those of the first block
            other_low, other_high = _numbers(ring, at + 1, CODE, GROUP, SHIFTS, OPERAND)
            other = warpgroup_mma(other_low, x_low, other, is_async=True)
        barrier()  # every thread has read the codes, which may be overwritten from here on
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.wait(x_ready.index(high_slot), phase_of(turn * 2 + 1, X_STAGES))
        acc = warpgroup_mma(high, x_high, acc, is_async=True)
        if BLOCKS == 2:
            other = warpgroup_mma(other_high, x_high, other, is_async=True)
            acc, other, low, high, other_low, other_high = warpgroup_mma_wait(
                0, deps=[acc, other, low, high, other_low, other_high])
        else:
            acc, low, high = warpgroup_mma_wait(0, deps=[acc, low, high])
        mbarrier.arrive(x_free.index(low_slot), count=1)
        mbarrier.arrive(x_free.index(high_slot), count=1)
    of_outputs = _outputs_of(tile, WARP_GROUP, 0, N, WARP_GROUPS, BLOCKS, GATE)
    output = of_outputs * OUTPUTS
    of_other = _outputs_of(tile, WARP_GROUP, BLOCKS - 1, N, WARP_GROUPS, BLOCKS, GATE) * OUTPUTS
    is_last = True
    if IS_SPLIT:
        block = ((gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)) * WARP_GROUPS + WARP_GROUP) * BLOCKS
        is_last, acc = _sum_splits(acc, parts, counters, block, ROWS, LAYOUT)
        if BLOCKS == 2:
            is_other_last, other = _sum_splits(other, parts, counters, block + 1, ROWS, LAYOUT)
    if GATE:
        dtype: gl.constexpr = out.dtype.element_ty
        acc = _with_bias(acc, bias, output, N, HAS_BIAS, LAYOUT).to(dtype).to(gl.float32)
        other = _with_bias(other, bias, of_other, N, HAS_BIAS, LAYOUT).to(dtype).to(gl.float32)
        _store(gated(acc, other, GATE), out, out_stride, output, token, M, N // 2, ROWS)
    else:
        if is_last:
            _store(_with_bias(acc, bias, output, N, HAS_BIAS, LAYOUT), out, out_stride, output, token, M, N, ROWS)
        if BLOCKS == 2:
            if IS_SPLIT:
                is_last = is_other_last
            if is_last:
                _store(_with_bias(other, bias, of_other, N, HAS_BIAS, LAYOUT), out, out_stride, of_other, token, M, N,
                       ROWS)


@TritonKernel
@gluon.jit(do_not_specialize=["out_stride", "M", "N", "num_steps"])
def coded_tiles_kernel(
    x_tiles, w_tiles, s_tiles, z_tiles, bias, out, parts, counters, out_stride, M, N, num_steps, CODE: gl.constexpr,
    ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, SHIFTS: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
    BYTES: gl.constexpr, REGS: gl.constexpr, FETCH_REGS: gl.constexpr, PDL: gl.constexpr,
):
    """Multiply a tile of token rows with a tile of a quantised weight.

    Program axes: tiles of token rows, tiles of outputs, splits of the inner dimension. GROUP: how many columns share a
    scale, at most 128. IS_SPLIT: the inner dimension has more than one split. BYTES: size of the codes, scales and
    shifts that one step fetches. With a GATE there are two blocks and one split."""
    release_dependents(PDL)
    TILES: gl.constexpr = 2 if CODE == _INT8 else 1
    ALL: gl.constexpr = STAGES * WARP_GROUPS * BLOCKS
    GROUPS: gl.constexpr = COLUMNS // GROUP
    rows = gl.allocate_shared_memory(x_tiles.dtype, [X_STAGES, ROWS, HALF], gl.NVMMASharedLayout(128, 16, rank=2))
    weights = gl.allocate_shared_memory(w_tiles.dtype, [ALL * TILES, OUTPUTS // 2, COLUMNS],
                                        gl.NVMMASharedLayout(128, 8, rank=2))
    scales = gl.allocate_shared_memory(s_tiles.dtype, [ALL, GROUPS, OUTPUTS], s_tiles.layout)
    if SHIFTS != NO_SHIFTS:
        shifts = gl.allocate_shared_memory(z_tiles.dtype, [ALL, GROUPS, OUTPUTS], z_tiles.layout)
    else:
        shifts = scales
    ring = (rows, weights, scales, shifts, make_barriers(X_STAGES, 1), make_barriers(X_STAGES, WARP_GROUPS),
            make_barriers(STAGES, 1), make_barriers(STAGES, WARP_GROUPS))
    tiles = (x_tiles, w_tiles, s_tiles, z_tiles)
    fence_async_shared()
    barrier()
    token, tile = gl.program_id(0) * ROWS, gl.program_id(1)
    first = gl.program_id(2) * num_steps // gl.num_programs(2)
    steps = (gl.program_id(2) + 1) * num_steps // gl.num_programs(2) - first
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, out_stride, parts, counters, ring, tile, token, steps, M, N, 0, CODE, ROWS,
                             WARP_GROUPS, BLOCKS, GROUP, SHIFTS, HAS_BIAS, GATE, STAGES, X_STAGES, IS_SPLIT)),
                (_multiply, (bias, out, out_stride, parts, counters, ring, tile, token, steps, M, N, 1, CODE, ROWS,
                             WARP_GROUPS, BLOCKS, GROUP, SHIFTS, HAS_BIAS, GATE, STAGES, X_STAGES, IS_SPLIT)),
                (_fetch, (tiles, ring, tile, token, first, steps, num_steps, N, CODE, ROWS, WARP_GROUPS, BLOCKS, GROUP,
                          SHIFTS, GATE, BYTES, STAGES, X_STAGES, PDL)),
            ],
            [4, 1],
            [REGS, FETCH_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, out_stride, parts, counters, ring, tile, token, steps, M, N, 0, CODE, ROWS,
                             WARP_GROUPS, BLOCKS, GROUP, SHIFTS, HAS_BIAS, GATE, STAGES, X_STAGES, IS_SPLIT)),
                (_fetch, (tiles, ring, tile, token, first, steps, num_steps, N, CODE, ROWS, WARP_GROUPS, BLOCKS, GROUP,
                          SHIFTS, GATE, BYTES, STAGES, X_STAGES, PDL)),
            ],
            [1],
            [FETCH_REGS],
        )
