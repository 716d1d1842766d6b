"""The Hopper kernel that `rows.py` launches, divided into what each kind of warp runs: one fetches, the others
multiply."""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider.kernels.code_kinds import CODES, FP8, INT8
from outrider.kernels.gpu.hopper.dependent_launch import release_dependents, wait_for_inputs
from outrider.kernels.gpu.hopper.few_rows import add_parts, gated
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel
from outrider.kernels.gpu.linear.scaled_codes import NIBBLES_TO_BF16

COLUMNS = gl.constexpr(128)  # of the inner dimension, of one step
OUTPUTS = gl.constexpr(64)  # weight rows of one group of warps
MAX_OLD_ROWS = gl.constexpr(16)
LEAST_SCALES = gl.constexpr(32)  # of token rows, in one step: what is fetched lies at multiples of 128 bytes
# What has a scale of its own: an output, 128 columns of an output, 128 columns of 128 outputs, or fewer columns of an
# output. Scales of fewer columns multiply the numbers that codes become; all others multiply sums.
OF_OUTPUTS, OF_STEPS, OF_BLOCKS, OF_GROUPS = (gl.constexpr(kind) for kind in range(4))
_FP8, _INT8 = gl.constexpr(CODES.index(FP8)), gl.constexpr(CODES.index(INT8))
# Four bytes of int8 codes become two pairs of bfloat16 numbers: 128 + the lowest seven bits, less 128, or 256 where the
# sign bit is set.
_BYTES_TO_BF16 = gl.constexpr("""{
    .reg .b32 r<2>, n<2>;
    prmt.b32 r0, $2, 0, 0x4140;
    prmt.b32 r1, $2, 0, 0x4342;
    lop3.b32 n0, r0, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 n1, r1, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 r0, r0, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 r1, r1, 0x007F007F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, r0, n0;
    sub.rn.bf16x2 $1, r1, n1;
    }""")


@gluon.jit
def _outputs_of(tile, WARP_GROUP: gl.constexpr, num_tiles, WARP_GROUPS: gl.constexpr, GATE: gl.constexpr):
    """Return which 64 outputs of the weight a group of warps computes. With a gate, the first group has gate outputs,
    and the second the up outputs that these multiply."""
    if GATE:
        return tile + WARP_GROUP * num_tiles
    else:
        return tile * WARP_GROUPS + WARP_GROUP


@gluon.jit
def _fetch_weights(tiles, ring, slot, tile, step, num_tiles, num_steps, CODE: gl.constexpr, WARP_GROUPS: gl.constexpr,
                   SCALES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFTS: gl.constexpr, GATE: gl.constexpr,
                   BYTES: gl.constexpr):
    """Start the copies of one step's codes and scales. BYTES: the bytes of the whole step."""
    x_tiles, xs_tiles, w_tiles, s_tiles, z_tiles = tiles
    rows, x_scales, weights, scales, shifts, ready, free = ring
    TILES: gl.constexpr = 2 if CODE == _INT8 else 1
    mbarrier.expect(ready.index(slot), BYTES)
    for each in gl.static_range(WARP_GROUPS):
        of_outputs = _outputs_of(tile, each, num_tiles, WARP_GROUPS, GATE)
        at = slot * WARP_GROUPS + each
        if CODE == _FP8:
            tma.async_copy_global_to_shared(w_tiles, [of_outputs * OUTPUTS, step * COLUMNS], ready.index(slot),
                                            weights.index(at))
        else:
            for part in gl.static_range(TILES):
                place = [((of_outputs * num_steps + step) * TILES + part) * 32, 0]
                tma.async_copy_global_to_shared(w_tiles, place, ready.index(slot), weights.index(at * TILES + part))
        group = step * (COLUMNS // GROUP)
        if (SCALES == OF_STEPS) or (SCALES == OF_GROUPS):
            tma.async_copy_global_to_shared(s_tiles, [group, of_outputs * OUTPUTS], ready.index(slot), scales.index(at))
        if HAS_SHIFTS:
            tma.async_copy_global_to_shared(z_tiles, [group, of_outputs * OUTPUTS], ready.index(slot), shifts.index(at))


@gluon.jit
def _fetch_rows(tiles, ring, slot, step, CODE: gl.constexpr, SCALES: gl.constexpr):
    x_tiles, xs_tiles, w_tiles, s_tiles, z_tiles = tiles
    rows, x_scales, weights, scales, shifts, ready, free = ring
    if CODE == _FP8:
        tma.async_copy_global_to_shared(x_tiles, [0, step * COLUMNS], ready.index(slot), rows.index(slot))
        if SCALES != OF_OUTPUTS:
            tma.async_copy_global_to_shared(xs_tiles, [step, 0], ready.index(slot), x_scales.index(slot))
    else:
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(x_tiles, [0, step * COLUMNS + half * (COLUMNS // 2)], ready.index(slot),
                                            rows.index(slot * 2 + half))


@gluon.jit
def _fetch(
    tiles, ring, tile, first, steps, num_tiles, num_steps, CODE: gl.constexpr, WARP_GROUPS: gl.constexpr,
    SCALES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFTS: gl.constexpr, GATE: gl.constexpr, BYTES: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):
    rows, x_scales, weights, scales, shifts, ready, free = ring
    ahead = gl.minimum(steps, STAGES)
    for turn in range(0, ahead):
        _fetch_weights(tiles, ring, turn, tile, first + turn, num_tiles, num_steps, CODE, WARP_GROUPS, SCALES,
                       GROUP, HAS_SHIFTS, GATE, BYTES)
    wait_for_inputs(PDL)
    for turn in range(0, ahead):
        _fetch_rows(tiles, ring, turn, first + turn, CODE, SCALES)
    for turn in range(ahead, steps):
        slot = turn % STAGES
        mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
        _fetch_weights(tiles, ring, slot, tile, first + turn, num_tiles, num_steps, CODE, WARP_GROUPS, SCALES,
                       GROUP, HAS_SHIFTS, GATE, BYTES)
        _fetch_rows(tiles, ring, slot, first + turn, CODE, SCALES)


@gluon.jit
def int4_halves(packed, LAYOUT: gl.constexpr):
    """Unpack the bytes [32, 128] that `arrange` made: (columns 0 to 63, columns 64 to 127) of 64 outputs in bfloat16.

    Four bytes of a thread hold two neighbouring columns of two outputs: low bits of the first half, high bits of the
    second.
    """
    packed = packed.reshape([2, 4, 4, 2, 4, 4, 2, 2]).permute((1, 6, 2, 3, 0, 5, 4, 7)).reshape([64, 64])
    packed = gl.convert_layout(packed, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        NIBBLES_TO_BF16,
        "=r,=r,=r,=r,r", [packed], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
    )


@gluon.jit
def int8_half(packed, LAYOUT: gl.constexpr):
    """Unpack the bytes [32, 128] of int8 codes that `arrange` made: 64 columns of 64 outputs in bfloat16."""
    packed = packed.reshape([2, 4, 4, 2, 4, 4, 2, 2]).permute((1, 6, 2, 3, 0, 5, 4, 7)).reshape([64, 64])
    packed = gl.convert_layout(packed, LAYOUT, assert_trivial=True)
    return gl.inline_asm_elementwise(_BYTES_TO_BF16, "=r,=r,r", [packed], dtype=gl.bfloat16, is_pure=True, pack=4)


@gluon.jit
def load_groups(tile, HALF: gl.constexpr, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    """Load the scales or offsets [64, 64] of 64 columns from a step's [groups, 64] in shared memory. The layout is that
    of the operand: a thread has two neighbouring columns of two outputs, and others 8, 16 and 32 columns from them, in
    this order of register bits."""
    GROUPS: gl.constexpr = 64 // GROUP
    K4: gl.constexpr = [0, 0, 16] if GROUP > 16 else [1, 0, 0]
    K5: gl.constexpr = [0, 0, 32] if GROUP > 32 else [1 if GROUP == 32 else 2, 0, 0]
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], [0, 0, 8], K4, K5], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [0, 32, 0]], [], [GROUPS, 64, GROUP])
    # Not transposed in shared memory: the compiler reads other places then.
    part = tile.slice(HALF * GROUPS, GROUPS, 0).load(gl.SliceLayout(2, LAYOUT))
    spread = gl.expand_dims(part, 2).broadcast_to([GROUPS, 64, GROUP]).permute((1, 0, 2)).reshape([64, 64])
    return gl.convert_layout(spread, OPERAND, assert_trivial=True)


@gluon.jit
def _scaled(numbers, at, ring, HALF: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFTS: gl.constexpr,
            OPERAND: gl.constexpr):
    """Multiply dequantised numbers [64, 64], the operand of a product, by the scales of their groups, and add the
    offsets."""
    rows, x_scales, weights, scales, shifts, ready, free = ring
    scale = load_groups(scales.index(at), HALF, GROUP, OPERAND)
    if HAS_SHIFTS:
        offset = load_groups(shifts.index(at), HALF, GROUP, OPERAND)
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [numbers, scale, offset],
                                         dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, scale], dtype=gl.bfloat16,
                                         is_pure=True, pack=2)


@gluon.jit
def _product(slot, ring, acc, WARP_GROUP: gl.constexpr, CODE: gl.constexpr, WARP_GROUPS: gl.constexpr,
             SCALES: gl.constexpr, GROUP: gl.constexpr,
             HAS_SHIFTS: gl.constexpr, IS_OLD: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of one step, without scales. acc: has their shape and layout. If scales belong to groups, `acc`
    holds the sums so far, and the step's sums are added to it."""
    rows, x_scales, weights, scales, shifts, ready, free = ring
    at = slot * WARP_GROUPS + WARP_GROUP
    if CODE == _FP8:
        part = warpgroup_mma(weights.index(at), rows.index(slot).permute((1, 0)), acc, use_acc=False, is_async=True)
        return warpgroup_mma_wait(0, deps=[part])
    else:
        operand: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
        BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
        IS_SUM: gl.constexpr = SCALES == OF_GROUPS
        if CODE == _INT8:
            low = int8_half(weights.index(at * 2).load(BYTES), operand)
            high = int8_half(weights.index(at * 2 + 1).load(BYTES), operand)
        else:
            low, high = int4_halves(weights.index(at).load(BYTES), operand)
        if IS_SUM:
            low = _scaled(low, at, ring, 0, GROUP, HAS_SHIFTS, operand)
            high = _scaled(high, at, ring, 1, GROUP, HAS_SHIFTS, operand)
        elif HAS_SHIFTS:
            zero = shifts.index(at).permute((1, 0)).load(operand).to(gl.bfloat16)
            low, high = low - zero, high - zero
        x_low, x_high = rows.index(slot * 2).permute((1, 0)), rows.index(slot * 2 + 1).permute((1, 0))
        if IS_OLD:
            other: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
            part = mma_v2(low, x_low.load(other), acc if IS_SUM else gl.zeros_like(acc))
            part = mma_v2(high, x_high.load(other), part)
        else:
            part = warpgroup_mma(low, x_low, acc, use_acc=IS_SUM, is_async=True)
            part = warpgroup_mma(high, x_high, part, is_async=True)
            part, low, high = warpgroup_mma_wait(0, deps=[part, low, high])
        return part


@gluon.jit
def _multiply(
    of_x, of_weight, bias, out, out_stride, parts, counters, ring, exchange, tile, first, steps, num_tiles,
    num_steps, M, N, WARP_GROUP: gl.constexpr, CODE: gl.constexpr, ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr,
    SCALES: gl.constexpr, GROUP: gl.constexpr, HAS_SHIFTS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, PDL: gl.constexpr,
):
    rows, x_scales, weights, scales, shifts, ready, free = ring
    # With few token rows the older instruction is faster for codes that are numbers in registers.
    IS_OLD: gl.constexpr = CODE != _FP8 and ROWS <= MAX_OLD_ROWS
    LAYOUT: gl.constexpr = (gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]) if IS_OLD else
                            gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32 if CODE == _FP8 else 16]))
    of_outputs = _outputs_of(tile, WARP_GROUP, num_tiles, WARP_GROUPS, GATE)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=LAYOUT)
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    ROUNDED: gl.constexpr = CODE == _FP8
    of_block = of_weight + of_outputs // 2 * num_steps
    if SCALES == OF_BLOCKS:
        block = gl.load(of_block + first)
    for turn in range(0, steps):
        slot = turn % STAGES
        mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
        part = _product(slot, ring, acc, WARP_GROUP, CODE, WARP_GROUPS, SCALES, GROUP, HAS_SHIFTS, IS_OLD, LAYOUT)
        if SCALES == OF_GROUPS:
            barrier()  # every thread has read what may be overwritten from here on
            mbarrier.arrive(free.index(slot), count=1)
            acc = part
        elif SCALES == OF_OUTPUTS:
            mbarrier.arrive(free.index(slot), count=1)
            acc += part
        else:
            if SCALES == OF_STEPS:
                scale = scales.index(slot * WARP_GROUPS + WARP_GROUP).permute((1, 0)).load(LAYOUT).to(gl.float32)
            if ROUNDED:
                x_scale = x_scales.index(slot).slice(0, ROWS, 1).load(LAYOUT)
            barrier()  # every thread has read what may be overwritten from here on
            mbarrier.arrive(free.index(slot), count=1)
            if SCALES == OF_BLOCKS:
                acc += part * (x_scale * block)
                block = gl.load(of_block + first + gl.minimum(turn + 1, steps - 1))
            elif ROUNDED:
                acc += part * (scale * x_scale)
            else:
                acc += part * scale
    is_last = True
    if SPLITS > 1:
        SIZE: gl.constexpr = OUTPUTS * ROWS
        part_of = parts + of_outputs.to(gl.int64) * (SPLITS * SIZE) + row[:, None] * ROWS + token[None, :]
        gl.store(part_of + gl.program_id(1) * SIZE, acc)
        barrier()  # every thread's part is stored before one of them says so
        is_last = gl.atomic_add(counters + of_outputs, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            gl.store(counters + of_outputs, 0)
            acc = add_parts(part_of, SPLITS, SIZE)
    if is_last:
        dtype: gl.constexpr = out.dtype.element_ty
        output = of_outputs * OUTPUTS + row
        if SCALES == OF_OUTPUTS:
            acc *= gl.load(of_weight + output, mask=output < N, other=0.0).to(gl.float32)[:, None]
            if ROUNDED:
                wait_for_inputs(PDL)
                acc *= gl.load(of_x + token, mask=token < M, other=0.0)[None, :]
        if HAS_BIAS:
            acc += gl.load(bias + output, mask=output < N, other=0.0).to(gl.float32)[:, None]
        to = out + token.to(gl.int64)[None, :] * out_stride + output[:, None]
        if GATE:
            acc = acc.to(dtype).to(gl.float32)  # rounded as the two products would be, had they been stored
            values, is_there = exchange
            if WARP_GROUP == 1:
                values.store(acc)
                barrier()
                mbarrier.arrive(is_there.index(0), count=1)
            else:
                mbarrier.wait(is_there.index(0), 0)
                acc = gated(acc, values.load(LAYOUT), GATE)
                gl.store(to, acc.to(dtype), mask=(token < M)[None, :] & (output < N // 2)[:, None])
        else:
            gl.store(to, acc.to(dtype), mask=(token < M)[None, :] & (output < N)[:, None])


@TritonKernel
@gluon.jit(do_not_specialize=["out_stride", "M", "N", "num_steps"])
def coded_rows_kernel(
    x_tiles, xs_tiles, w_tiles, s_tiles, z_tiles, of_x, of_weight, bias, out, parts, counters, out_stride, M, N,
    num_steps, CODE: gl.constexpr, ROWS: gl.constexpr, WARP_GROUPS: gl.constexpr, SCALES: gl.constexpr,
    GROUP: gl.constexpr, HAS_SHIFTS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, BYTES: gl.constexpr, REGS: gl.constexpr, FETCH_REGS: gl.constexpr, PDL: gl.constexpr,
):
    """Multiply a tile of token rows with a tile of a quantised weight.

    of_x, of_weight: the scales of token rows and outputs, or of blocks; all other scales are fetched with the codes.
    GROUP: how many columns share a fetched scale. HAS_SHIFTS: there are zero points, or offsets beside the scales of
    groups."""
    release_dependents(PDL)
    HALVES: gl.constexpr = 1 if CODE == _FP8 else 2
    rows = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * HALVES, ROWS, COLUMNS // HALVES],
                                     gl.NVMMASharedLayout(128, 8 * HALVES, rank=2))
    TILES: gl.constexpr = 2 if CODE == _INT8 else 1
    weights = gl.allocate_shared_memory(w_tiles.dtype, [STAGES * WARP_GROUPS * TILES, OUTPUTS // HALVES, COLUMNS],
                                        gl.NVMMASharedLayout(128, 8, rank=2))
    GROUPS: gl.constexpr = COLUMNS // GROUP
    if (SCALES == OF_STEPS) or (SCALES == OF_GROUPS):
        scales = gl.allocate_shared_memory(s_tiles.dtype, [STAGES * WARP_GROUPS, GROUPS, OUTPUTS], s_tiles.layout)
    else:
        scales = rows
    if SCALES != OF_OUTPUTS and CODE == _FP8:
        x_scales = gl.allocate_shared_memory(xs_tiles.dtype, [STAGES, 1, max(ROWS, LEAST_SCALES)], xs_tiles.layout)
    else:
        x_scales = rows
    if HAS_SHIFTS:
        shifts = gl.allocate_shared_memory(z_tiles.dtype, [STAGES * WARP_GROUPS, GROUPS, OUTPUTS], z_tiles.layout)
    else:
        shifts = rows
    if GATE:
        exchange = (gl.allocate_shared_memory(gl.float32, [OUTPUTS, ROWS], gl.SwizzledSharedLayout(2, 4, 8, [1, 0])),
                    make_barriers(1, 1))
    else:
        exchange = ()  # type: ignore[assignment]
    ring = (rows, x_scales, weights, scales, shifts, make_barriers(STAGES, 1), make_barriers(STAGES, WARP_GROUPS))
    tiles = (x_tiles, xs_tiles, w_tiles, s_tiles, z_tiles)
    fence_async_shared()
    barrier()
    tile, num_tiles = gl.program_id(0), gl.num_programs(0)
    first = gl.program_id(1) * num_steps // SPLITS
    steps = (gl.program_id(1) + 1) * num_steps // SPLITS - first
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (of_x, of_weight, bias, out, out_stride, parts, counters, ring, exchange, tile, first,
                             steps, num_tiles, num_steps, M, N, 0, CODE, ROWS, WARP_GROUPS, SCALES, GROUP,
                             HAS_SHIFTS, HAS_BIAS, GATE, STAGES, SPLITS, PDL)),
                (_multiply, (of_x, of_weight, bias, out, out_stride, parts, counters, ring, exchange, tile, first,
                             steps, num_tiles, num_steps, M, N, 1, CODE, ROWS, WARP_GROUPS, SCALES, GROUP,
                             HAS_SHIFTS, HAS_BIAS, GATE, STAGES, SPLITS, PDL)),
                (_fetch, (tiles, ring, tile, first, steps, num_tiles, num_steps, CODE, WARP_GROUPS, SCALES, GROUP,
                          HAS_SHIFTS, GATE, BYTES, STAGES, PDL)),
            ],
            [4, 1],
            [REGS, FETCH_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (of_x, of_weight, bias, out, out_stride, parts, counters, ring, exchange, tile, first,
                             steps, num_tiles, num_steps, M, N, 0, CODE, ROWS, WARP_GROUPS, SCALES, GROUP,
                             HAS_SHIFTS, HAS_BIAS, GATE, STAGES, SPLITS, PDL)),
                (_fetch, (tiles, ring, tile, first, steps, num_tiles, num_steps, CODE, WARP_GROUPS, SCALES, GROUP,
                          HAS_SHIFTS, GATE, BYTES, STAGES, PDL)),
            ],
            [1],
            [FETCH_REGS],
        )
