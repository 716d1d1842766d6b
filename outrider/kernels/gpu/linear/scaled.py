"""Products with weights of codes and scales (`kernels.scaled.Scaled`) in Triton, for any number of token rows.

The weight is the first operand of every tile, so that tensor cores take 64 of its rows however few token rows there
are. Token rows that are rounded to fp8 are multiplied with fp8 codes directly; all other codes are converted to the
dtype of x in registers. The scale of a long group multiplies the group's sum, which stays unrounded; the scales of
short groups multiply the numbers.

An output is one chain of additions over the columns, or the sum of several chains over ranges that depend on the
weight's shape alone, added in order. A token row's bits depend on no other row; in exact mode not on their number
either. Many token rows are left to the vendor's library, except in exact mode: fp8 with one scale for an output as it
is, all other codes as numbers that are written to scratch memory first. On Hopper cards `hopper/coded/tiles.py` takes
batches of token rows between few and many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from outrider.kernels.code_kinds import CODES, FP4, FP8, INT4
from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, arrive, counters_for
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    num_sms,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.hopper.coded import rows as coded_rows
from outrider.kernels.gpu.hopper.coded import tiles as coded_tiles
from outrider.kernels.gpu.launch.triton_kernel import is_collecting, kernel
from outrider.kernels.gpu.linear.rounding import LIBRARY_ROWS, rounded_rows
from outrider.kernels.gpu.linear.scaled_codes import expand, load_groups, spread, unpack, unpack_scaled
from outrider.kernels.gpu.linear.thin import prefetch_rows
from outrider.kernels.scaled import BLOCK, Scaled
from outrider.kernels.vendor_products import wide_product

COLUMNS = 128  # of the inner dimension, of one tile
MAX_FEW_ROWS = 64  # token rows up to which chains have programs of their own
# Numbers in scratch memory at a time: 128 MiB in bfloat16. Smaller products would leave multiprocessors idle.
MAX_NUMBERS = 1 << 26
MAX_CHAINS, SHORTEST_CHAIN = 4, 1024
_FP8, _INT8, _INT4, _FP4 = (tl.constexpr(CODES.index(code)) for code in CODES)
_GROUP_OF_TILES = 8  # tiles of token rows that pass by the same weights while those are in the cache


@triton.jit
def _load_scales(
    scales, x_scales, in_rows, in_tokens, stride_g, group, GROUPS: tl.constexpr, X_GROUP: tl.constexpr
):
    """Return (scales of the outputs, scales of the token rows) of one group."""
    scale = tl.load(scales + group * stride_g, mask=in_rows & (group < GROUPS), other=0.0).to(tl.float32)
    if X_GROUP > 0:
        return scale, tl.load(x_scales + group, mask=in_tokens & (group < GROUPS), other=0.0)
    else:
        return scale, scale


@triton.jit
def _load_rows(x_row, in_tokens, column, inside, WHOLE: tl.constexpr, DTYPE: tl.constexpr):
    """Load columns of the token rows, transposed: [columns, tokens]. inside: which columns have a code in the weight
    row. Past a row's end integer codes are not zero, and columns of the other half of the group may be stored there."""
    mask = in_tokens[:, None] if WHOLE else in_tokens[:, None] & inside[None, :]
    return tl.trans(tl.load(x_row + column[None, :], mask=mask, other=0.0).to(DTYPE))


@triton.jit
def sum_columns(
    x_row, x_scales, codes_row, scales, shifts, token, row, in_tokens, in_rows, stride_n, stride_g, shift_n, shift_g,
    begin, end, K: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, X_GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    WIDEN: tl.constexpr, ASM: tl.constexpr,
):
    """Return the sums over columns `begin` to `end`: [outputs, tokens]; without the scale if a whole row has one scale.
    shifts: zero points, or offsets of short groups. ASM: 4-bit codes become bfloat16 numbers, the dtype of x, two at a
    time; scales of fp4 codes are then bfloat16, or have no more bits."""
    PER_BYTE: tl.constexpr = 2 if (CODE == _INT4) or (CODE == _FP4) else 1
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    SPAN: tl.constexpr = GROUP // PER_BYTE  # bytes of a group
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ROW_SCALE: tl.constexpr = GROUPS == 1
    AFTER: tl.constexpr = ROW_SCALE or SPAN % BYTES == 0  # scales multiply sums; those of shorter groups numbers
    tl.static_assert(not (AFTER and HAS_OFFSETS), "offsets are those of short groups")
    SCALES_SUMS: tl.constexpr = AFTER and not ROW_SCALE
    NUM: tl.constexpr = 1 if AFTER else BYTES // SPAN
    BY_PAIRS: tl.constexpr = ASM and CODE == _FP4 and not (AFTER or HAS_ZEROS or HAS_OFFSETS)
    WHOLE: tl.constexpr = K % COLUMNS == 0
    DTYPE: tl.constexpr = tl.float32 if WIDEN else (codes_row.dtype.element_ty if X_GROUP > 0 else
                                                    x_row.dtype.element_ty)
    at = tl.arange(0, BYTES)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if SCALES_SUMS:
        scale, of_x = _load_scales(scales + row * stride_n, x_scales + token * GROUPS, in_rows, in_tokens, stride_g,
                                   begin // GROUP, GROUPS, X_GROUP)
    if not AFTER:
        of_groups = load_groups(scales, row, in_rows, stride_n, stride_g, begin // GROUP, NUM, GROUPS)
    for start in range(begin // PER_BYTE, end // PER_BYTE, BYTES):
        byte = start + at
        inside = byte < K // PER_BYTE
        if SCALES_SUMS:  # asked for one step ahead
            next_scale, next_of_x = _load_scales(scales + row * stride_n, x_scales + token * GROUPS, in_rows, in_tokens,
                                                 stride_g, (start + BYTES) // SPAN, GROUPS, X_GROUP)
        if not AFTER:  # one step ahead here too: the compiler asks for codes early, for scales it would wait
            next_groups = load_groups(scales, row, in_rows, stride_n, stride_g, start // SPAN + NUM, NUM, GROUPS)
        mask = in_rows[:, None] if WHOLE else in_rows[:, None] & inside[None, :]
        packed = tl.load(codes_row + byte[None, :], mask=mask, other=0.0 if CODE == _FP8 else 0)
        group = start // SPAN
        if PER_BYTE == 1:
            numbers, high = packed.to(DTYPE), packed
        elif BY_PAIRS:
            numbers, high = unpack_scaled(packed, spread(of_groups.to(tl.bfloat16), SPAN))
        else:
            numbers, high = unpack(packed, DTYPE, CODE == _FP4, ASM)
        if HAS_ZEROS:
            zero = load_groups(shifts, row, in_rows, shift_n, shift_g, group, NUM, GROUPS)
            zero = zero.to(DTYPE) if AFTER else spread(zero, SPAN).to(DTYPE)
            numbers -= zero
            if PER_BYTE == 2:
                high -= zero
        if not (AFTER or BY_PAIRS):
            scale = spread(of_groups, SPAN)
            wide, wide_high = numbers.to(tl.float32) * scale, high.to(tl.float32) * scale
            if HAS_OFFSETS:
                offset = spread(load_groups(shifts, row, in_rows, shift_n, shift_g, group, NUM, GROUPS), SPAN)
                wide, wide_high = wide + offset, wide_high + offset
            numbers, high = wide.to(DTYPE), wide_high.to(DTYPE)
        if PER_BYTE == 1:
            column = byte
        elif AFTER:
            column = tl.multiple_of(group * GROUP + start % SPAN, BYTES) + at
        else:
            column = byte // SPAN * GROUP + byte % SPAN
        value = _load_rows(x_row, in_tokens, column, inside, WHOLE, DTYPE)
        if SCALES_SUMS:
            part = tl.dot(numbers, value, input_precision="ieee")
            if PER_BYTE == 2:
                value = _load_rows(x_row, in_tokens, column + SPAN, inside, WHOLE, DTYPE)
                part = tl.dot(high, value, part, input_precision="ieee")
            acc += part * (scale[:, None] * of_x[None, :]) if X_GROUP > 0 else part * scale[:, None]
            scale, of_x = next_scale, next_of_x
        else:
            acc = tl.dot(numbers, value, acc, input_precision="ieee", max_num_imprecise_acc=COLUMNS)
            if PER_BYTE == 2:
                value = _load_rows(x_row, in_tokens, column + SPAN, inside, WHOLE, DTYPE)
                acc = tl.dot(high, value, acc, input_precision="ieee")
        if not AFTER:
            of_groups = next_groups
    return acc


@kernel(do_not_specialize=["M"])
def _scaled_kernel(
    x, x_scales, codes, scales, shifts, factors, bias, out, parts, counters, x_stride, codes_stride, stride_n, stride_g,
    shift_n, shift_g, out_stride, M, N, K: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, X_GROUP: tl.constexpr,
    CHAIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_GROUP: tl.constexpr, SHARED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply a tile of token rows with a tile of a weight of codes. SHARED: one program for each chain of CHAIN
    columns, and all token rows in one tile; the last of them adds up."""
    release_dependents(PDL)
    PER_BYTE: tl.constexpr = 2 if (CODE == _INT4) or (CODE == _FP4) else 1
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (TILE_GROUP * n_tiles) * TILE_GROUP
    height = tl.minimum(m_tiles - first, TILE_GROUP)
    inside = program % (TILE_GROUP * n_tiles)
    token = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    in_tokens, in_rows = token < M, row < N
    begin = tl.program_id(1) * CHAIN
    if PDL:
        prefetch_rows(codes + begin // PER_BYTE, row, codes_stride, N, K // PER_BYTE)
    wait_for_inputs(PDL)
    x_row = x + token.to(tl.int64)[:, None] * x_stride
    codes_row = codes + row.to(tl.int64)[:, None] * codes_stride
    if SHARED or CHAIN >= K:
        total = sum_columns(
            x_row, x_scales, codes_row, scales, shifts, token, row, in_tokens, in_rows, stride_n, stride_g, shift_n,
            shift_g, begin, tl.minimum(begin + CHAIN, K), K, GROUP, CODE, X_GROUP, BLOCK_M, BLOCK_N, COLUMNS, HAS_ZEROS,
            HAS_OFFSETS, WIDEN, ASM)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for start in range(0, K, CHAIN):
            total += sum_columns(
                x_row, x_scales, codes_row, scales, shifts, token, row, in_tokens, in_rows, stride_n, stride_g, shift_n,
                shift_g, start, tl.minimum(start + CHAIN, K), K, GROUP, CODE, X_GROUP, BLOCK_M, BLOCK_N, COLUMNS,
                HAS_ZEROS, HAS_OFFSETS, WIDEN, ASM)
    total = tl.trans(total)
    inside_out = in_tokens[:, None] & in_rows[None, :]
    is_last = True
    if SHARED:
        part = parts + token[:, None] * N + row[None, :]
        tl.store(part + tl.program_id(1) * M * N, total, mask=inside_out)
        is_last = arrive(counters + program, tl.num_programs(1))
        if is_last:
            total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for _ in range(0, K, CHAIN):
                # Parts come from other multiprocessors: they are read where all of them write.
                total += tl.load(part, mask=inside_out, other=0.0, cache_modifier=".cg")
                part += M * N
    if is_last:
        if GROUP >= K:
            total *= tl.load(scales + row * stride_n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
            if X_GROUP > 0:
                total *= tl.load(x_scales + token, mask=in_tokens, other=0.0)[:, None]
        if HAS_FACTORS:
            total *= tl.load(factors + row, mask=in_rows, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        tl.store(out + token.to(tl.int64)[:, None] * out_stride + row[None, :], total.to(out.dtype.element_ty),
                 mask=inside_out)


@dataclass(frozen=True)
class ScaledTile:
    """Token rows and outputs per tile, and options of the compiler."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_FEW, _SOME, _MANY = ScaledTile(16, 64, 4, 5), ScaledTile(64, 64, 4, 4), ScaledTile(128, 128, 8, 3)
# Numbers of token rows whose tiles are compiled at start-up, the last one for exact mode alone.
_SAMPLED_ROWS = (1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1)


@lru_cache(maxsize=256)
def scaled_tile(num_rows: int, is_small: bool) -> ScaledTile:
    """Return the tile for these sizes. is_small: the interpreter computes the tiles because there is no GPU."""
    if is_small:
        return ScaledTile(16, 16, 4, 1) if num_rows <= 16 else ScaledTile(32, 32, 4, 1)
    return _FEW if num_rows <= _FEW.block_m else _SOME if num_rows <= _SOME.block_m else _MANY


@lru_cache(maxsize=1024)
def chain_columns(n: int, k: int, sms: int, block_n: int = 64) -> int:
    """Return the columns of each chain of a weight [n, k]: there are as many chains as give every multiprocessor about
    two programs."""
    chains = min(MAX_CHAINS, k // SHORTEST_CHAIN, cdiv(2 * sms, cdiv(n, block_n)))
    return k if chains < 2 else cdiv(cdiv(k, chains), 2 * COLUMNS) * 2 * COLUMNS


def scaled_linear(
    x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None = None, rounding: int = 0, *,
    out_dtype: torch.dtype | None = None, is_exact: bool = False, tile: ScaledTile | None = None,
    chain: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply token rows with a weight of codes and scales; see `kernels.scaled.scaled_linear` for the arguments."""
    name, (num_rows, k), n, device = "scaled_linear", x.shape, weight.shape[0], x.device
    require_tensor(name, "x", x, (None, weight.shape[1]), device, FLOATS)
    require_tensor(name, "weight", weight.codes, (None, None), device, (weight.codes.dtype,))
    assert rounding == 0 or (weight.code == FP8 and rounding == min(weight.group, k)), "groups of x are the weight's"
    assert rounding in (0, k) or rounding % COLUMNS == 0, "sums of whole groups are scaled"
    out_dtype = out_dtype or x.dtype
    if num_rows == 0:
        return torch.empty(0, n, dtype=out_dtype, device=device)
    is_own = is_exact or tile is not None  # many token rows too are multiplied here, not by the library
    is_library = num_rows > LIBRARY_ROWS and not is_own
    is_few = not is_own and coded_rows.takes(x, weight, rounding)
    if is_collecting() and not is_own and coded_tiles.has_kernel(weight, device, x.dtype):
        coded_tiles.coded_tiles(x, weight, bias, out_dtype)  # later steps have more token rows
    takes_codes = _library_takes(weight, rounding, out_dtype, device)
    by_group = rounding < k and (is_few or (is_library and takes_codes))
    values, x_scales = rounded_rows(x, rounding, by_group) if rounding else (x, x)
    if is_library and takes_codes:
        # With blocks there may be more token rows than x has.
        scales = weight.scales if weight.blocks is None else weight.blocks
        # Sums of rows stay in tensor cores, which keep 14 bits of them: 0.2 to 0.3% of error, rounding to fp8 has 4.
        out = torch._scaled_mm(values, weight.codes.t(), x_scales, scales.t(), out_dtype=out_dtype,
                               use_fast_accum=weight.blocks is None)[:num_rows]
        return out if bias is None else out.add_(bias)
    if is_library or (is_collecting() and not (is_own or takes_codes)):  # later steps have more token rows
        out = _product_of_numbers(values[:num_rows], x_scales[:num_rows], weight, rounding, x.dtype, out_dtype)
        if is_library:
            return out if bias is None else out.add_(bias)
    if is_few:
        out = torch.empty(num_rows, n, dtype=out_dtype, device=device)
        coded_rows.coded_rows(values, x_scales, weight, bias, out, pdl=pdl)
        return out
    assert not weight.is_tiled, "codes in tiles are for few token rows and ordinary mode"
    out = torch.empty(num_rows, n, dtype=out_dtype, device=device)
    chain = min(k, chain or chain_columns(n, k, num_sms(device)))
    is_card = device.type == "cuda"
    sampled = _SAMPLED_ROWS if is_exact else _SAMPLED_ROWS[:2]
    rows = {num_rows, *(sampled if is_collecting() else ())}
    launches = {(tile or scaled_tile(count, not is_card), count <= MAX_FEW_ROWS) for count in sorted(rows)}
    for each, is_few in launches:  # several only where launches are collected: later steps have other token rows
        shared = is_few and (num_rows <= each.block_m or is_collecting())
        own = chain if is_few or is_exact else k
        _launch(values, x_scales, weight, bias, out, rounding, each, own, shared,
                uses_pdl(device) and is_few if pdl is None else pdl)
    return out


def _launch(
    x: torch.Tensor, x_scales: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor,
    rounding: int, tile: ScaledTile, chain: int, is_shared: bool, pdl: bool,
) -> None:
    (num_rows, n), k, device = out.shape, weight.shape[1], out.device
    is_shared = is_shared and chain < k
    chains = cdiv(k, chain) if is_shared else 1
    parts = counters = out  # unused, unless programs share the sums
    if is_shared:
        parts = torch.empty(chains * num_rows * n, dtype=torch.float32, device=device)
        counters = counters_for(device, MIN_COUNTERS)
    factors, scales = weight.factors, weight.scales
    shifts = scales if weight.shifts is None else weight.shifts
    is_card = device.type == "cuda"
    _scaled_kernel[(cdiv(num_rows, tile.block_m) * cdiv(n, tile.block_n), chains)](
        x, x_scales, weight.codes, scales, shifts, scales if factors is None else factors,
        x_scales if bias is None else bias, out, parts, counters, x.stride(0), weight.codes.stride(0),
        scales.stride(0), scales.stride(1), shifts.stride(0), shifts.stride(1), out.stride(0), num_rows, n, K=k,
        GROUP=min(weight.group, k), CODE=CODES.index(weight.code), X_GROUP=rounding, CHAIN=chain, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, COLUMNS=COLUMNS, TILE_GROUP=_GROUP_OF_TILES, SHARED=is_shared,
        HAS_ZEROS=weight.zeros is not None, HAS_OFFSETS=weight.offsets is not None, HAS_FACTORS=factors is not None,
        HAS_BIAS=bias is not None, WIDEN=not is_card,
        ASM=is_card and unpacks_pairs(weight, x.dtype), PDL=pdl, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **pdl_options(pdl),
    )


def unpacks_pairs(weight: Scaled, dtype: torch.dtype) -> bool:
    """Whether codes can be converted two at a time with the same bits: to bfloat16 numbers, for int4 codes, or fp4
    codes whose scales are not float32 or float16."""
    if dtype != torch.bfloat16:
        return False
    return weight.code == INT4 or (weight.code == FP4 and weight.scales.dtype in (torch.bfloat16, torch.float8_e4m3fn))


def _library_takes(weight: Scaled, rounding: int, out_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has a kernel for this product. Either both weight rows and token rows have one scale each and sizes
    are multiples of 16; or scales belong to 128 columns of token rows and to blocks of 128 x 128 of the weight. In the
    second case the library reads rows of scales whose lengths it assumes to be multiples of 4, and torch does not
    refuse others."""
    n, k = weight.shape
    if device.type != "cuda" or out_dtype != torch.bfloat16 or weight.code != FP8 or not rounding:
        return False
    if weight.blocks is not None:
        return k % (4 * BLOCK) == 0
    return rounding == k and n % 16 == 0 and k % 16 == 0


def _product_of_numbers(
    values: torch.Tensor, x_scales: torch.Tensor, weight: Scaled, rounding: int, dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply with the weight expanded to numbers. Token rows that were rounded to fp8 are expanded too, so that the
    factors are those of a product of few rows, except that scaled numbers are rounded to `dtype`."""
    (n, k), num_rows, device = weight.shape, values.shape[0], values.device
    x = expand(Scaled(FP8, rounding, values, x_scales), dtype) if rounding else values
    out = torch.empty(num_rows, n, dtype=out_dtype, device=device)
    outputs = outputs_at_once(n, k)
    for first in range(0, n, outputs):
        numbers, part = expand(weight[first : first + outputs], dtype), out[:, first : first + outputs]
        if dtype == out_dtype:
            torch.mm(x, numbers.t(), out=part)
        else:
            part.copy_(wide_product(x, numbers))
        del numbers  # before the next ones are made
    return out


def outputs_at_once(n: int, k: int) -> int:
    """Return how many outputs of a weight [n, k] are expanded to numbers in scratch memory at once: all of them, or
    pieces of about the same size."""
    return cdiv(cdiv(n, cdiv(n * k, MAX_NUMBERS)), COLUMNS) * COLUMNS


def takes_gate(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, rounding: int, activation: str) -> bool:
    return coded_rows.takes(x, weight, rounding, activation)


def scaled_gated(
    x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, rounding: int, activation: str
) -> torch.Tensor:
    """Return act(gate) * up of a product with a weight of codes and scales, for few token rows; see
    `kernels.scaled.scaled_gated` for the arguments."""
    values, x_scales = rounded_rows(x, rounding, rounding < x.shape[1]) if rounding else (x, x)
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    if is_collecting() and coded_tiles.has_kernel(weight, x.device, x.dtype):
        coded_tiles.coded_tiles(x, weight, bias, x.dtype, activation=activation)  # later steps have more token rows
    coded_rows.coded_rows(values, x_scales, weight, bias, out, activation=activation)
    return out


def scaled_wide(x: torch.Tensor, weight: Scaled, rounding: int = 0) -> torch.Tensor:
    return scaled_linear(x, weight, None, rounding, out_dtype=torch.float32)


def exact_scaled_linear(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None = None,
                        rounding: int = 0) -> torch.Tensor:
    return scaled_linear(x, weight, bias, rounding, is_exact=True)


def exact_scaled_wide(x: torch.Tensor, weight: Scaled, rounding: int = 0) -> torch.Tensor:
    return scaled_linear(x, weight, None, rounding, out_dtype=torch.float32, is_exact=True)
