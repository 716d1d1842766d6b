"""Products of a few token rows with their chosen experts' 4-bit weights (codes with scales), without tensor cores: each
program serves a few weight rows of one pair (token row, expert).

So few pairs rarely share an expert, and tiles for tensor cores would wait for one short read after the other. Here a
thread reads chunks of 16 bytes of a weight row, and requests several chunks before it multiplies. The codes of a chunk
share one scale, which multiplies their sum. Sums are in float32. A pair's result does not depend on other pairs.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (Tuples of Triton's language grow as programs are unrolled.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.activations import CLAMPED
from outrider.kernels.code_kinds import CODES, FP4, INT4
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    limited,
    pdl_options,
    refuse,
    release_dependents,
    require_tensor,
    wait_for_inputs,
)
from outrider.kernels.gpu.experts.biases import clamped_swiglu_of
from outrider.kernels.gpu.experts.moe import ACTIVATIONS, activation_code
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.scaled import Scaled

MAX_PAIRS = 8  # a power of two: all numbers of pairs whose tiles are compiled together are served here, or none
MAX_UNIT = 16  # bytes that a thread reads at once
_NUMBER_OF_CLAMPED = 1 + max(ACTIVATIONS.values())
_GELU_TANH, _RELU2 = tl.constexpr(ACTIVATIONS["gelu_pytorch_tanh"]), tl.constexpr(ACTIVATIONS["relu2"])
_CLAMPED = tl.constexpr(_NUMBER_OF_CLAMPED)
_FP4 = tl.constexpr(CODES.index(FP4))
_INT4_ZERO = tl.constexpr(8.0)  # codes of integers are stored plus 8
# What a code's number is multiplied by, to be what `_unpack_floats` makes of it.
_UNIT_OF_FP4, _UNIT_OF_INT4 = tl.constexpr(2.0**-14), tl.constexpr(2.0**-24)

# Four registers with two float16 numbers each become eight float32 numbers, in the order of their bytes.
_PAIRS_TO_FLOATS = """    mov.b32 {a0, a1}, p0;
    mov.b32 {a2, a3}, p1;
    mov.b32 {a4, a5}, p2;
    mov.b32 {a6, a7}, p3;
    cvt.f32.f16 $0, a0;
    cvt.f32.f16 $1, a2;
    cvt.f32.f16 $2, a1;
    cvt.f32.f16 $3, a3;
    cvt.f32.f16 $4, a4;
    cvt.f32.f16 $5, a6;
    cvt.f32.f16 $6, a5;
    cvt.f32.f16 $7, a7;
    }"""

# Four bytes of e2m1 codes become the numbers of their low bits, then of their high bits, times 2^-14. As the upper byte
# of a float16 number a code has its sign in bit 7 and its other bits in bits 3 to 1.
_E2M1_TO_FLOATS = tl.constexpr("""{
    .reg .b32 low<3>, high<2>, p<4>;
    .reg .b16 a<8>;
    shl.b32 low0, $8, 4;
    shl.b32 low1, $8, 1;
    shr.b32 high0, $8, 3;
    and.b32 low1, low1, 0x0E0E0E0E;
    and.b32 high0, high0, 0x0E0E0E0E;
    lop3.b32 low2, low0, 0x80808080, low1, 0xEA;
    lop3.b32 high1, $8, 0x80808080, high0, 0xEA;
    prmt.b32 p0, low2, 0, 0x2404;
    and.b32 p1, low2, 0xFF00FF00;
    prmt.b32 p2, high1, 0, 0x2404;
    and.b32 p3, high1, 0xFF00FF00;
""" + _PAIRS_TO_FLOATS)

# Four bytes of int4 codes become the codes of their low bits, then of their high bits, times 2^-24, as the lowest bits
# of float16 numbers.
_INT4_TO_FLOATS = tl.constexpr("""{
    .reg .b32 s<3>, p<4>;
    .reg .b16 a<8>;
    shr.b32 s0, $8, 8;
    shr.b32 s1, $8, 4;
    shr.b32 s2, $8, 12;
    and.b32 p0, $8, 0x000F000F;
    and.b32 p1, s0, 0x000F000F;
    and.b32 p2, s1, 0x000F000F;
    and.b32 p3, s2, 0x000F000F;
""" + _PAIRS_TO_FLOATS)


@triton.jit
def _float_of(nibble, IS_FP4: tl.constexpr):
    """Convert 4-bit codes to floats that are too small by a constant factor (the unit of the code type), which the
    caller multiplies in later."""
    wide = nibble.to(tl.uint16)
    bits = (wide & 7) << 9 | (wide & 8) << 12 if IS_FP4 else wide
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _unpack_floats(packed, IS_FP4: tl.constexpr, ASM: tl.constexpr):
    """Unpack bytes of two 4-bit codes to (floats of the low codes, floats of the high codes), scaled as in
    `_float_of`."""
    if ASM:
        return tl.inline_asm_elementwise(
            _E2M1_TO_FLOATS if IS_FP4 else _INT4_TO_FLOATS, "=f,=f,=f,=f,=f,=f,=f,=f,r", [packed],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )
    else:
        return _float_of(packed & 15, IS_FP4), _float_of(packed >> 4, IS_FP4)


@triton.jit
def _load_codes(codes_row, in_rows, first, LANES: tl.constexpr, UNIT: tl.constexpr, BYTES: tl.constexpr):
    """Load LANES chunks of weight rows, from chunk number `first` on: [rows, chunks, bytes]. Each is read only once, so
    it need not stay in the cache."""
    byte = first * UNIT + tl.arange(0, LANES * UNIT)  # one axis: neighbouring threads read neighbouring bytes
    inside = in_rows[:, None] & (byte < BYTES)[None, :]
    packed = tl.load(codes_row[:, None] + byte[None, :], mask=inside, other=0, eviction_policy="evict_first")
    return tl.reshape(packed, (codes_row.shape[0], LANES, UNIT))


@triton.jit
def _load_of_chunks(of_groups, row, in_rows, chunk, stride_n, stride_g, CHUNKS: tl.constexpr, PER_GROUP: tl.constexpr):
    """Load the scales or shifts of some chunks of weight rows: [rows, chunks]."""
    mask = in_rows[:, None] & (chunk < CHUNKS)[None, :]
    return tl.load(of_groups + row[:, None] * stride_n + (chunk // PER_GROUP)[None, :] * stride_g, mask=mask, other=0.0)


@triton.jit
def _load_values(x_row, column, chunk, CHUNKS: tl.constexpr, UNIT: tl.constexpr):
    """Load columns of the token row for each chunk: [chunks, UNIT], from the chunk's first column on. They are loaded
    in two halves: a thread gets all columns of a chunk, and reads 16 bytes of them at once if x has 16 bits."""
    HALF: tl.constexpr = UNIT // 2
    place = x_row + column[:, None] + tl.arange(0, HALF)[None, :]
    inside = (chunk < CHUNKS)[:, None]
    both = tl.join(tl.load(place, mask=inside, other=0.0), tl.load(place + HALF, mask=inside, other=0.0))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (column.shape[0], UNIT))


@triton.jit
def _scaled_sums(
    packed, scale, shifts, low, high, value_sums, row, in_rows, chunk, shifts_n, shifts_g, CHUNKS: tl.constexpr,
    PER_GROUP: tl.constexpr, IS_FP4: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Sum the products of each chunk's weights with the token row: [rows, chunks]. Factors of whole weight rows are not
    included."""
    of_low, of_high = _unpack_floats(packed, IS_FP4, ASM)
    # Two sums of products, each of which is one chain of fused multiplications and additions.
    sums = tl.sum(of_low * low[None, :, :], axis=2) + tl.sum(of_high * high[None, :, :], axis=2)
    sums *= 1.0 / (_UNIT_OF_FP4 if IS_FP4 else _UNIT_OF_INT4)
    if not IS_FP4:
        sums -= _INT4_ZERO * value_sums
    if HAS_ZEROS:
        sums -= _load_of_chunks(shifts, row, in_rows, chunk, shifts_n, shifts_g, CHUNKS, PER_GROUP) * value_sums
    sums *= scale.to(tl.float32)
    if HAS_OFFSETS:
        sums += _load_of_chunks(shifts, row, in_rows, chunk, shifts_n, shifts_g, CHUNKS, PER_GROUP) * value_sums
    return sums


@kernel
def _coded_expert_rows_kernel(
    x, codes, scales, shifts, factors, bias, out, ids, x_stride, codes_e, codes_n, scales_e, scales_n, scales_g,
    shifts_e, shifts_n, shifts_g, factors_e, bias_e, out_stride, N, K: tl.constexpr, GROUP: tl.constexpr,
    CODE: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    OUTPUTS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, UNIT: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a projection of every pair: out[pair] = activation(x[pair // PAIRS_PER_ROW] @ weight[expert of the
    pair].T), with weights [rows, K] and N outputs.

    Names of strides end in _e from expert to expert, in _n from row to row of a weight and in _g from group to group.
    With a gated activation weight rows 0 to N are the gate and the next N are what it gates. bias: of each weight row,
    added before the activation. A chunk is UNIT bytes, which have one scale; LANES chunks are multiplied together, and
    DEPTH times as many are read together. EARLY: no kernel that may still run writes ids, so the first weights are read
    before this kernel waits for x."""
    GATED: tl.constexpr = (ACTIVATION > 0) and (ACTIVATION != _RELU2)
    IS_FP4: tl.constexpr = CODE == _FP4
    SPAN: tl.constexpr = GROUP // 2  # bytes of a group
    PER_GROUP: tl.constexpr = SPAN // UNIT
    CHUNKS: tl.constexpr = K // (2 * UNIT)
    BLOCKS: tl.constexpr = (CHUNKS + LANES - 1) // LANES
    SUMS_VALUES: tl.constexpr = (not IS_FP4) or HAS_ZEROS or HAS_OFFSETS
    if EARLY:
        release_dependents(PDL)
    else:
        # In this order: kernels that start from here on find the ids complete, before they wait themselves.
        wait_for_inputs(PDL)
        release_dependents(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_rows = row < N
    lane = tl.arange(0, LANES)
    x_row = x + (pair // PAIRS_PER_ROW).to(tl.int64) * x_stride
    codes_row = codes + expert * codes_e + row.to(tl.int64) * codes_n
    scales += expert * scales_e
    shifts += expert * shifts_e
    acc = tl.zeros([OUTPUTS, LANES], dtype=tl.float32)
    up = tl.zeros([OUTPUTS, LANES], dtype=tl.float32)
    for first in tl.static_range(0, BLOCKS, DEPTH):
        packed, up_packed, scale, up_scale, low, high = (), (), (), (), (), ()
        for block in tl.static_range(first, min(first + DEPTH, BLOCKS)):
            chunk = block * LANES + lane
            packed += (_load_codes(codes_row, in_rows, block * LANES, LANES, UNIT, K // 2),)
            scale += (_load_of_chunks(scales, row, in_rows, chunk, scales_n, scales_g, CHUNKS, PER_GROUP),)
            if GATED:
                up_packed += (_load_codes(codes_row + N * codes_n, in_rows, block * LANES, LANES, UNIT, K // 2),)
                up_scale += (_load_of_chunks(scales + N * scales_n, row, in_rows, chunk, scales_n, scales_g, CHUNKS,
                                             PER_GROUP),)
        if EARLY and first == 0:
            wait_for_inputs(PDL)
        for block in tl.static_range(first, min(first + DEPTH, BLOCKS)):
            chunk = block * LANES + lane
            column = chunk // PER_GROUP * GROUP + chunk % PER_GROUP * UNIT
            low += (_load_values(x_row, column, chunk, CHUNKS, UNIT),)
            high += (_load_values(x_row + SPAN, column, chunk, CHUNKS, UNIT),)
        for own in tl.static_range(min(DEPTH, BLOCKS - first)):
            chunk = (first + own) * LANES + lane
            low_values, high_values = low[own].to(tl.float32), high[own].to(tl.float32)
            value_sums = 0.0
            if SUMS_VALUES:
                value_sums = tl.sum(low_values + high_values, axis=1)[None, :]
            acc += _scaled_sums(
                packed[own], scale[own], shifts, low_values, high_values, value_sums, row, in_rows, chunk, shifts_n,
                shifts_g, CHUNKS, PER_GROUP, IS_FP4, HAS_ZEROS, HAS_OFFSETS, ASM)
            if GATED:
                up += _scaled_sums(
                    up_packed[own], up_scale[own], shifts + N * shifts_n, low_values, high_values, value_sums, row,
                    in_rows, chunk, shifts_n, shifts_g, CHUNKS, PER_GROUP, IS_FP4, HAS_ZEROS, HAS_OFFSETS, ASM)
    total, factor = tl.sum(acc, axis=1), tl.sum(up, axis=1)
    if HAS_FACTORS:
        place = factors + expert * factors_e + row
        total *= tl.load(place, mask=in_rows, other=0.0)
        if GATED:
            factor *= tl.load(place + N, mask=in_rows, other=0.0)
    if HAS_BIAS:
        place = bias + expert * bias_e + row
        total += tl.load(place, mask=in_rows, other=0.0).to(tl.float32)
        if GATED:
            factor += tl.load(place + N, mask=in_rows, other=0.0).to(tl.float32)
    if ACTIVATION == _CLAMPED:
        total = clamped_swiglu_of(total, factor)
    elif GATED:
        if LIMIT > 0:
            total, factor = limited(total, factor, LIMIT)
        total = gated(total, factor, ACTIVATION == _GELU_TANH)
    elif ACTIVATION == _RELU2:
        total = tl.where(total < 0, 0.0, total * total)  # not a maximum, which would turn NaN into a number
    tl.store(out + pair.to(tl.int64) * out_stride + row, total.to(out.dtype.element_ty), mask=in_rows)


@dataclass(frozen=True)
class CodedRowsTile:
    """The tile of a program: its outputs, how many chunks of bytes are multiplied together, how many such groups of
    chunks are read together, and its warps."""

    outputs: int
    lanes: int
    depth: int
    num_warps: int


# One warp: token rows and scales are read by the threads that multiply with them, so that nothing is exchanged.
_GATED_TILE, _PLAIN_TILE = CodedRowsTile(4, 32, 3, 1), CodedRowsTile(8, 32, 3, 1)
_INTERPRETED_TILE = CodedRowsTile(64, 32, 3, 1)


def tile_for(is_gated: bool, is_small: bool) -> CodedRowsTile:
    """Return the tile for these sizes. is_small: the interpreter runs the programs because there is no GPU."""
    if is_small:
        return _INTERPRETED_TILE
    return _GATED_TILE if is_gated else _PLAIN_TILE


def activation_number(activation: str | None) -> tuple[int, float]:
    """Return (the number by which the kernel knows the activation, its limit); the limit is 0 if there is none or it is
    fixed."""
    return (_NUMBER_OF_CLAMPED, 0.0) if activation == CLAMPED else activation_code(activation)


def chunk_bytes(weight: Scaled) -> int:
    """Return the bytes of a chunk, 16 or 8, so that each chunk of a weight's 4-bit codes has one scale; 0 if neither
    fits."""
    span = min(weight.group, weight.shape[-1]) // 2
    return next((unit for unit in (MAX_UNIT, MAX_UNIT // 2) if span % unit == 0), 0)


def takes(num_pairs: int, gate_up: Scaled, down: Scaled, rounds: bool) -> bool:
    """Whether this kernel serves the products: few pairs, 4-bit codes, and token rows that are not rounded."""
    if rounds or not 0 < num_pairs <= MAX_PAIRS:
        return False
    return all(weight.code in (INT4, FP4) and chunk_bytes(weight) > 0 for weight in (gate_up, down))


def multiply(
    x: torch.Tensor, weight: Scaled, ids: torch.Tensor, pairs_per_row: int, n: int, activation: str | None,
    bias: torch.Tensor | None, pdl: bool, *, is_second: bool = False, tile: CodedRowsTile | None = None,
) -> torch.Tensor:
    """Multiply token rows with the weights of their chosen experts, for the pairs of ids [tokens, k]. Row p of the
    result [pairs, n] is pair p, made from row p // pairs_per_row of x. is_second: x is the result of a first product of
    the same ids. bias [experts, rows of a weight]: added before the activation."""
    name, (num_experts, rows, k), device = "coded_expert_rows", weight.shape, x.device
    require_tensor(name, "x", x, (ids.numel() // pairs_per_row, k), device, FLOATS)
    require_tensor(name, "ids", ids, (None, None), device, (torch.int64,), inner_contiguous=2)
    unit = chunk_bytes(weight)
    if weight.code not in (INT4, FP4) or not unit:
        refuse(name, "weight", f"has codes {weight.code!r} in groups of {weight.group}, expected 4-bit codes in groups "
                               f"of a multiple of {MAX_UNIT}")
    is_gated = activation not in (None, "relu2")
    if rows != (2 * n if is_gated else n):
        refuse(name, "weight", f"has {rows} rows, expected {n} outputs{' with their gates' if is_gated else ''}")
    if bias is not None:
        require_tensor(name, "bias", bias, (num_experts, rows), device, FLOATS)
    tile, (number, limit) = tile or tile_for(is_gated, device.type != "cuda"), activation_number(activation)
    codes, scales = weight.codes, weight.scales
    shifts = scales if weight.shifts is None else weight.shifts
    factors = scales if weight.factors is None else weight.factors
    own_bias = scales if bias is None else bias
    out = torch.empty(ids.numel(), n, dtype=x.dtype, device=device)
    _coded_expert_rows_kernel[(cdiv(n, tile.outputs), ids.numel())](
        x, codes, scales, shifts, factors, own_bias, out, ids, x.stride(0), codes.stride(0), codes.stride(1),
        *scales.stride(), *shifts.stride(), factors.stride(0), own_bias.stride(0), out.stride(0), n, K=k,
        GROUP=min(weight.group, k), CODE=CODES.index(weight.code), PAIRS_PER_ROW=pairs_per_row, ACTIVATION=number,
        LIMIT=limit, OUTPUTS=tile.outputs, LANES=tile.lanes, DEPTH=tile.depth, UNIT=unit,
        HAS_ZEROS=weight.zeros is not None, HAS_OFFSETS=weight.offsets is not None,
        HAS_FACTORS=weight.factors is not None, HAS_BIAS=bias is not None, ASM=device.type == "cuda", PDL=pdl,
        EARLY=is_second, num_warps=tile.num_warps, **pdl_options(pdl),
    )
    return out
