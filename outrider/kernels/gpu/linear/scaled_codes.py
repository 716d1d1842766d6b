"""Conversion of the codes of `kernels.scaled.Scaled` to numbers in Triton: the parts that products share, and the
expansion of a whole weight."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from outrider.kernels.code_kinds import CODES, FP4, INT4
from outrider.kernels.gpu.common import cdiv
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.scaled import Scaled

_INT4, _FP4 = tl.constexpr(CODES.index(INT4)), tl.constexpr(CODES.index(FP4))
_FP8_MAX = tl.constexpr(448.0)
_EXPONENT_126 = tl.constexpr(2.0**126)
_ROWS, _COLUMNS = 32, 128  # of one program


# Four bytes of int4 codes become two pairs of bfloat16 numbers for their low bits, and two for their high bits. 128 +
# code has the code in its lowest bits; 136 is subtracted, as codes are stored plus 8.
NIBBLES_TO_BF16 = tl.constexpr("""{
    .reg .b32 r<2>, h<2>, middle;
    mov.b32 middle, 0x43084308;
    prmt.b32 r0, $4, 0, 0x4140;
    prmt.b32 r1, $4, 0, 0x4342;
    shr.b32 h0, r0, 4;
    shr.b32 h1, r1, 4;
    lop3.b32 $0, r0, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $1, r1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $2, h0, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 $3, h1, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, $0, middle;
    sub.rn.bf16x2 $1, $1, middle;
    sub.rn.bf16x2 $2, $2, middle;
    sub.rn.bf16x2 $3, $3, middle;
    }""")


# Four bytes of e2m1 codes, with the scales of their groups, become two pairs of bfloat16 numbers for their low bits,
# and two for their high bits. As the upper bits of a bfloat16 number a code has the exponent 126 too low. A code has
# two significant bits, so the second product is the only one that rounds.
E2M1_TO_SCALED_BF16 = tl.constexpr("""{
    .reg .b32 b<2>, n<4>, s<4>, most;
    mov.b32 most, 0x7E807E80;
    prmt.b32 b0, $4, 0, 0x4140;
    prmt.b32 b1, $4, 0, 0x4342;
    shl.b32 n0, b0, 6;
    shl.b32 n1, b1, 6;
    shl.b32 n2, b0, 2;
    shl.b32 n3, b1, 2;
    shl.b32 s0, b0, 12;
    shl.b32 s1, b1, 12;
    shl.b32 s2, b0, 8;
    shl.b32 s3, b1, 8;
    and.b32 n0, n0, 0x01C001C0;
    and.b32 n1, n1, 0x01C001C0;
    and.b32 n2, n2, 0x01C001C0;
    and.b32 n3, n3, 0x01C001C0;
    lop3.b32 n0, s0, 0x80008000, n0, 0xEA;
    lop3.b32 n1, s1, 0x80008000, n1, 0xEA;
    lop3.b32 n2, s2, 0x80008000, n2, 0xEA;
    lop3.b32 n3, s3, 0x80008000, n3, 0xEA;
    mul.rn.bf16x2 n0, n0, most;
    mul.rn.bf16x2 n1, n1, most;
    mul.rn.bf16x2 n2, n2, most;
    mul.rn.bf16x2 n3, n3, most;
    mul.rn.bf16x2 $0, n0, $5;
    mul.rn.bf16x2 $1, n1, $6;
    mul.rn.bf16x2 $2, n2, $5;
    mul.rn.bf16x2 $3, n3, $6;
    }""")


@triton.jit
def unpack_scaled(packed, scale):
    """Return (numbers of the low bits, numbers of the high bits) of bytes of e2m1 codes times their scales, in
    bfloat16, which the scales are too."""
    return tl.inline_asm_elementwise(
        E2M1_TO_SCALED_BF16, "=&r,=&r,=&r,=&r,r,r,r", [packed, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4,
    )


@triton.jit
def unpack(packed, DTYPE: tl.constexpr, IS_FLOAT: tl.constexpr, ASM: tl.constexpr):
    """Return (numbers of the low bits, numbers of the high bits) of bytes."""
    if IS_FLOAT:
        return _e2m1(packed & 15, DTYPE), _e2m1(packed >> 4, DTYPE)
    elif ASM:
        return tl.inline_asm_elementwise(
            NIBBLES_TO_BF16,
            "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )
    else:
        low, high = (packed & 15).to(tl.int32) - 8, (packed >> 4).to(tl.int32) - 8
        return low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)


@triton.jit
def _e2m1(nibble, DTYPE: tl.constexpr):
    """Numbers of 4 bits. As the upper bits of a float32 they have the exponent 126 too low."""
    wide = nibble.to(tl.int32)
    return (((wide & 7) << 22 | (wide & 8) << 28).to(tl.float32, bitcast=True) * _EXPONENT_126).to(DTYPE)


@triton.jit
def load_groups(of_groups, row, in_rows, stride_n, stride_g, first, NUM: tl.constexpr, GROUPS: tl.constexpr):
    """Load the values of NUM neighbouring groups of each output: [outputs, NUM]."""
    group = first + tl.arange(0, NUM)
    mask = in_rows[:, None] & (group < GROUPS)[None, :]
    return tl.load(of_groups + row[:, None] * stride_n + group[None, :] * stride_g, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def spread(of_groups, WIDTH: tl.constexpr):
    """Repeat each group's value: [outputs, groups] -> [outputs, groups x WIDTH]."""
    rows: tl.constexpr = of_groups.shape[0]
    num: tl.constexpr = of_groups.shape[1]
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], (rows, num, WIDTH)), (rows, num * WIDTH))


@triton.jit
def store_rounded(value, codes, scales, scale_stride, K: tl.constexpr, GROUP: tl.constexpr):
    """Store one token row [groups, columns of a group] as fp8 codes, with the scales of its groups. A non-finite number
    makes its whole group NaN."""
    GROUPS: tl.constexpr = value.shape[0]
    WIDTH: tl.constexpr = value.shape[1]
    group, inside_group = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    column = group[:, None] * GROUP + inside_group[None, :]
    inside = (inside_group < GROUP)[None, :] & (column < K)
    largest = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
    largest += tl.sum(value * 0.0, axis=1)  # NaN where a number is not finite, which a maximum may pass over
    inverse = tl.div_rn(tl.full([GROUPS], _FP8_MAX, tl.float32), largest)
    tl.store(codes + column, (value * inverse[:, None]).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + group * scale_stride, tl.div_rn(largest, _FP8_MAX), mask=group * GROUP < K)


@kernel(do_not_specialize=["N"])
def _expand_kernel(
    codes, scales, shifts, factors, index, out, codes_e, codes_stride, scales_e, stride_n, stride_g, shifts_e, shift_n,
    shift_g, factors_e, N, K: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr,
    TILED: tl.constexpr, INDEXED: tl.constexpr,
):
    """Write to out [experts, N, K] the numbers of a weight's outputs, or of those in `index`, rounded once. Strides
    from expert to expert end in _e. shifts: zero points or offsets. TILED: bytes lie as `Scaled.tiled` puts them."""
    expert = tl.program_id(2).to(tl.int64)
    codes += expert * codes_e
    scales += expert * scales_e
    shifts += expert * shifts_e
    factors += expert * factors_e
    out += expert * N * K
    PER_BYTE: tl.constexpr = 2 if (CODE == _INT4) or (CODE == _FP4) else 1
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    PACKED: tl.constexpr = COLUMNS if TILED and PER_BYTE == 2 else GROUP  # inputs whose halves share bytes
    SPAN: tl.constexpr = PACKED // PER_BYTE
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ALIGNED: tl.constexpr = (GROUPS == 1) or (SPAN % BYTES == 0)
    APART: tl.constexpr = PACKED > GROUP  # high bits belong to other groups than low bits
    NUM: tl.constexpr = BYTES // GROUP if APART else 1 if ALIGNED else BYTES // SPAN
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BYTES
    at = tl.arange(0, BYTES)
    byte, in_rows = start + at, place < N
    group = start * PER_BYTE // GROUP if APART else start // SPAN
    row = tl.load(index + place, mask=in_rows, other=0) if INDEXED else place
    inside = in_rows[:, None] if K % COLUMNS == 0 else in_rows[:, None] & (byte < K // PER_BYTE)[None, :]
    if TILED:
        of_row = (row >> 4 & 3) << 9 | (row & 7) << 6 | (row >> 3 & 1) << 1
        of_byte = (byte >> 5 & 1) << 11 | (byte >> 1 & 3) << 4 | (byte >> 3 & 3) << 2 | byte & 1
        tile = (row >> 6).to(tl.int64)[:, None] * (64 * codes_stride) + (byte >> 6 << 12)[None, :]
        source = tile + (of_row[:, None] | of_byte[None, :])
    else:
        source = row.to(tl.int64)[:, None] * codes_stride + byte[None, :]
    packed = tl.load(codes + source, mask=inside)
    if PER_BYTE == 1:
        numbers, high, column = packed.to(tl.float32), packed, byte
    else:
        numbers, high = unpack(packed, tl.float32, CODE == _FP4, False)
        if ALIGNED:
            column = tl.multiple_of(start // SPAN * PACKED + start % SPAN, BYTES) + at
        else:
            column = byte // SPAN * PACKED + byte % SPAN
    beside = group + NUM if APART else group  # the first group of the high bits
    to = out + place.to(tl.int64)[:, None] * K + column[None, :]
    numbers = _scaled_numbers(numbers, scales, shifts, factors, row, in_rows, stride_n, stride_g, shift_n, shift_g,
                              group, NUM, GROUPS, HAS_ZEROS, HAS_OFFSETS, HAS_FACTORS)
    tl.store(to, numbers.to(out.dtype.element_ty), mask=inside)
    if PER_BYTE == 2:
        high = _scaled_numbers(high, scales, shifts, factors, row, in_rows, stride_n, stride_g, shift_n, shift_g,
                               beside, NUM, GROUPS, HAS_ZEROS, HAS_OFFSETS, HAS_FACTORS)
        tl.store(to + SPAN, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_numbers(
    numbers, scales, shifts, factors, row, in_rows, stride_n, stride_g, shift_n, shift_g, group, NUM: tl.constexpr,
    GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):
    """The weights of codes [outputs, columns] in NUM neighbouring groups, in float32."""
    WIDTH: tl.constexpr = numbers.shape[1] // NUM
    scale = spread(load_groups(scales, row, in_rows, stride_n, stride_g, group, NUM, GROUPS), WIDTH)
    if HAS_FACTORS:
        scale *= tl.load(factors + row, mask=in_rows, other=0.0)[:, None]
    if HAS_ZEROS or HAS_OFFSETS:
        shift = spread(load_groups(shifts, row, in_rows, shift_n, shift_g, group, NUM, GROUPS), WIDTH)
        return (numbers - shift) * scale if HAS_ZEROS else numbers * scale + shift
    else:
        return numbers * scale


def expand(weight: Scaled, dtype: torch.dtype, index: torch.Tensor | None = None) -> torch.Tensor:
    """Return `Scaled.numbers` of a weight [outputs, inputs], or of several [experts, outputs, inputs], rounded to
    `dtype`. index: the outputs to convert; None for all."""
    *experts, n, k = weight.shape
    n = n if index is None else index.numel()
    out = torch.empty(*experts, n, k, dtype=dtype, device=weight.scales.device)
    if n == 0:
        return out
    codes, scales = _by_expert(weight.codes), _by_expert(weight.scales)
    shifts = scales if weight.shifts is None else _by_expert(weight.shifts)
    multipliers = scales if weight.factors is None else _by_expert(weight.factors)
    _expand_kernel[(cdiv(n, _ROWS), cdiv(k, _COLUMNS), math.prod(experts))](
        codes, scales, shifts, multipliers, out if index is None else index, out, codes.stride(0), codes.stride(1),
        *scales.stride(), *shifts.stride(), multipliers.stride(0), n, K=k, GROUP=min(weight.group, k),
        CODE=CODES.index(weight.code), ROWS=_ROWS, COLUMNS=_COLUMNS, HAS_ZEROS=weight.zeros is not None,
        HAS_OFFSETS=weight.offsets is not None, HAS_FACTORS=weight.factors is not None, TILED=weight.is_tiled,
        INDEXED=index is not None)
    return out


def scaled_rows(weight: Scaled, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise some outputs of a weight; see `kernels.scaled.scaled_rows` for the arguments."""
    return expand(weight, dtype, index)


def _by_expert(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor[None]
