"""Products of token rows with the experts they chose, whose weights are quantised: codes with scales
(`kernels.scaled.Scaled`).

Pairs (token row, chosen expert) are found as in `moe.py`. An output is one chain of additions over the columns, as in
`linear/scaled.py`. The weight is the first operand. Fp8 codes are multiplied directly with token rows that were rounded
to fp8; other codes become the dtype of x in registers. A tile of a gated product has as many gate rows as up rows. A
pair's result depends neither on other pairs nor on the tile, so exact mode has the same kernel. In ordinary mode,
experts with many pairs are multiplied as dense weights: their codes are first dequantised, some experts at a time. A
few pairs are left to `coded_rows.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl

from outrider.kernels.activations import CLAMPED
from outrider.kernels.code_kinds import CODES, FP4, FP8, INT4
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    gated,
    next_power_of_two,
    num_sms,
    pdl_options,
    refuse,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.experts import coded_rows as coded_expert_rows
from outrider.kernels.gpu.experts.biases import clamped_swiglu_of
from outrider.kernels.gpu.experts.moe import (
    ACTIVATIONS,
    activate_pairs,
    bias_of_down,
    check_activation,
    combine,
    multiply_pairs,
    tile_config,
)
from outrider.kernels.gpu.experts.pairs import (
    FEW_PAIRS,
    Pairs,
    find_few_pairs,
    find_sorted_pairs,
    max_tiles,
    sort_pairs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.linear.rounding import round_rows, rounded_rows
from outrider.kernels.gpu.linear.scaled import COLUMNS, MAX_NUMBERS, ScaledTile, sum_columns, unpacks_pairs
from outrider.kernels.gpu.linear.scaled_codes import expand
from outrider.kernels.gpu.linear.thin import prefetch_rows
from outrider.kernels.moe import ExpertBiases
from outrider.kernels.scaled import Scaled

_CODES_OF_ACTIVATIONS = ACTIVATIONS | {CLAMPED: 4}
NUMBERS_PAIRS_PER_EXPERT = 256  # from here on writing numbers once costs less than making them for every tile
_SILU, _GELU_TANH, _RELU2, _CLAMPED = (tl.constexpr(i) for i in range(1, 5))
_INT4, _FP4 = tl.constexpr(CODES.index(INT4)), tl.constexpr(CODES.index(FP4))


@kernel(do_not_specialize=["P"])
def _scaled_expert_kernel(
    x, x_scales, codes, scales, shifts, factors, bias, out, ids, order, ends, x_stride, codes_e, codes_n, scales_e,
    scales_n, scales_g, shifts_e, shifts_n, shifts_g, factors_e, bias_e, out_stride, P, E, N, K: tl.constexpr,
    GROUP: tl.constexpr, CODE: tl.constexpr, X_GROUP: tl.constexpr, PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr, FEW: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HAS_FACTORS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a projection of every pair: out[pair] = activation(x[pair // PAIRS_PER_ROW] @ weight[expert of the
    pair].T), with weights [rows, K] and N outputs.

    Strides end in _e from expert to expert, in _n from row to row of a weight and in _g from group to group. With a
    gated activation weight rows 0 to N are the gate and the next N are what it gates. bias: of each weight row, added
    before the activation. EARLY: no kernel that may still run writes ids, order and ends, so weights are requested
    before this kernel waits for x."""
    GATED: tl.constexpr = (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH) or (ACTIVATION == _CLAMPED)
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PER_BYTE: tl.constexpr = 2 if (CODE == _INT4) or (CODE == _FP4) else 1
    tl.static_assert(not (EARLY and GATED), "rows that are asked for early are those of the outputs")
    if EARLY:
        release_dependents(PDL)
    else:
        # In this order: kernels that start from here on find the ids complete, before they wait themselves.
        wait_for_inputs(PDL)
        release_dependents(PDL)
    if FEW:
        expert, pairs, exists, is_tile = find_few_pairs(ids, tl.program_id(1), P, PAIRS, BLOCK_M)
    else:
        expert, pairs, exists, is_tile = find_sorted_pairs(order, ends, tl.program_id(1), 0, E, EXPERTS, BLOCK_M)
    if EARLY:
        if PDL and is_tile:
            first_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            prefetch_rows(codes + expert * codes_e, first_row, codes_n, N, K // PER_BYTE)
        wait_for_inputs(PDL)
    if is_tile:
        at = tl.arange(0, BLOCK_N)
        output = tl.program_id(0) * OUTPUTS + at % OUTPUTS
        row = output + at // OUTPUTS * N  # the second half of a gated tile is what its first half gates
        in_rows = output < N
        token = (pairs // PAIRS_PER_ROW).to(tl.int64)
        own_scales = scales + expert * scales_e
        total = sum_columns(
            x + token[:, None] * x_stride, x_scales, codes + expert * codes_e + row.to(tl.int64)[:, None] * codes_n,
            own_scales, shifts + expert * shifts_e, token, row, exists, in_rows, scales_n, scales_g, shifts_n, shifts_g,
            0, K, K, GROUP, CODE, X_GROUP, BLOCK_M, BLOCK_N, COLUMNS, HAS_ZEROS, HAS_OFFSETS, WIDEN, ASM)
        if GROUP >= K:
            total *= tl.load(own_scales + row * scales_n, mask=in_rows, other=0.0).to(tl.float32)[:, None]
            if X_GROUP > 0:
                total *= tl.load(x_scales + token, mask=exists, other=0.0)[None, :]
        if HAS_FACTORS:
            total *= tl.load(factors + expert * factors_e + row, mask=in_rows, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + expert * bias_e + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, (2, OUTPUTS, BLOCK_M)), (1, 2, 0)))
            if ACTIVATION == _CLAMPED:
                total = clamped_swiglu_of(gate, up)
            else:
                total = gated(gate, up, ACTIVATION == _GELU_TANH)
        elif ACTIVATION == _RELU2:
            # Not a maximum with zero, which would turn NaN into a number.
            total = tl.where(total < 0, 0.0, total * total)
        column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        place = out + pairs.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(place, tl.trans(total).to(out.dtype.element_ty), mask=exists[:, None] & (column < N)[None, :])


_FEWEST, _FEW, _SOME, _MORE, _MANY = (ScaledTile(16, 64, 4, 6), ScaledTile(16, 128, 8, 4), ScaledTile(32, 64, 4, 5),
                                      ScaledTile(64, 128, 4, 4), ScaledTile(128, 128, 8, 3))


@lru_cache(maxsize=256)
def expert_tile(num_pairs: int, num_experts: int, is_small: bool, rows_of_fp4: int = 0, sms: int = 1) -> ScaledTile:
    """Choose a tile by the shapes alone, without reading ids. is_small: the interpreter computes the tiles because
    there is no GPU. rows_of_fp4: rows of an expert's weight, if its codes are fp4; tiles are small while these rows
    make fewer than four tiles for each multiprocessor."""
    rows = num_pairs / num_experts
    if is_small:
        return ScaledTile(16, 64, 4, 1) if rows <= 16 else ScaledTile(32, 64, 4, 1)
    if rows <= 8:
        is_fewest = 0 < min(num_pairs, num_experts) * rows_of_fp4 < 4 * sms * _FEW.block_n
        return _FEWEST if is_fewest else _FEW
    return _SOME if rows <= 32 else _MORE if rows <= 128 else _MANY


def scaled_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Scaled, down: Scaled, activation: str,
    added: torch.Tensor | None = None, rounds: bool = False, biases: ExpertBiases | None = None, *,
    as_numbers: bool | None = None, by_rows: bool | None = None, tile: ScaledTile | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token row's quantised experts; see `kernels.moe.scaled_experts` for the
    arguments. as_numbers: dequantise the codes to scratch memory first. by_rows: multiply each pair by itself, without
    tensor cores. None: choose by shapes. `tile` is used if neither is done."""
    name, device, (num_experts, hidden, width) = "scaled_experts", x.device, down.shape
    check_activation(name, activation, biases)
    rows = width if activation == "relu2" else 2 * width
    require_tensor(name, "x", x, (None, hidden), device, FLOATS)
    if gate_up.shape != (num_experts, rows, hidden):
        refuse(name, "gate_up", f"has shape {list(gate_up.shape)}, expected {[num_experts, rows, hidden]}")
    require_tensor(name, "ids", ids, (x.shape[0], None), device, (torch.int64,), inner_contiguous=2)
    require_tensor(name, "weights", weights, ids.shape, device, (torch.float32,), inner_contiguous=2)
    if ids.numel() == 0:
        return torch.empty_like(x) if added is None else added
    pdl = uses_pdl(device) if pdl is None else pdl
    as_numbers = is_faster_as_numbers(down.code, ids.numel(), num_experts) if as_numbers is None else as_numbers
    if by_rows is None:
        by_rows = tile is None and not as_numbers and coded_expert_rows.takes(ids.numel(), gate_up, down, rounds)
    if by_rows:
        made = coded_expert_rows.multiply(x, gate_up, ids, ids.shape[1], width, activation, biases and biases.gate_up,
                                          pdl)
        out = coded_expert_rows.multiply(made, down, ids, 1, hidden, None, None, pdl, is_second=True)
        return combine(out, weights, added=added, bias=bias_of_down(biases, ids), pdl=pdl)
    pairs = None if ids.numel() <= FEW_PAIRS and not as_numbers else sort_pairs(ids, num_experts, pdl=pdl)
    if activation in ACTIVATIONS or (activation == CLAMPED and not as_numbers):
        bias = None if biases is None else biases.gate_up
        made = _product(x, gate_up, ids, pairs, ids.shape[1], width, activation, rounds, as_numbers, tile, pdl, False,
                        bias)
    else:  # the product of numbers adds no biases, and none has limits
        projected = _product(x, gate_up, ids, pairs, ids.shape[1], rows, None, rounds, as_numbers, tile, pdl,
                             False)
        made = activate_pairs(projected, ids, activation, biases, pdl)
    out = _product(made, down, ids, pairs, 1, hidden, None, rounds, as_numbers, tile, pdl, True)
    return combine(out, weights, added=added, bias=bias_of_down(biases, ids), pdl=pdl)


def exact_scaled_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Scaled, down: Scaled, activation: str,
    added: torch.Tensor | None = None, rounds: bool = False, biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Compute `scaled_experts` with one order of additions, and the same roundings, for any number of pairs."""
    return scaled_experts(x, ids, weights, gate_up, down, activation, added, rounds, biases, as_numbers=False,
                          by_rows=False)


def is_faster_as_numbers(code: str, num_pairs: int, num_experts: int) -> bool:
    """Whether it is faster to dequantise the codes first. The decision depends on the power of two of the number of
    pairs, like the tiles. Fp8 codes go to tensor cores as they are: on an H200 with 192 pairs for each expert they took
    1.27 ms, and dequantised weights took 2.81."""
    return code != FP8 and next_power_of_two(num_pairs) >= NUMBERS_PAIRS_PER_EXPERT * num_experts


def _product(
    x: torch.Tensor, weight: Scaled, ids: torch.Tensor, pairs: Pairs | None, pairs_per_row: int, n: int,
    activation: str | None, rounds: bool, as_numbers: bool, tile: ScaledTile | None, pdl: bool, is_second: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply token rows with the weights of their chosen experts. Row p of the result [pairs, n] is pair p, made from
    row p // pairs_per_row of x. is_second: x is the result of a first product. bias [experts, rows of a weight]: added
    before the activation, only in products with codes."""
    group = min(weight.group, x.shape[1])
    assert not rounds or group == x.shape[1] or group % COLUMNS == 0, "sums of whole groups are scaled"
    values, x_scales = x, x
    if rounds:  # by the kernel that made x, perhaps
        values, x_scales = rounded_rows(x, group, False) if group == x.shape[1] else round_rows(x, group, pdl=pdl)
    out = torch.empty(ids.numel(), n, dtype=x.dtype, device=x.device)
    if not as_numbers:
        _multiply_codes(values, x_scales, weight, ids, pairs, pairs_per_row, out, activation, group, rounds, tile, pdl,
                        is_second, bias)
        return out
    assert pairs is not None and bias is None
    values = expand(Scaled(FP8, group, values, x_scales), x.dtype) if rounds else values
    num_experts, rows, k = weight.shape
    config = tile_config(next_power_of_two(ids.numel()), num_experts, n, rows == 2 * n, num_sms(x.device))
    at_once = cdiv(num_experts, cdiv(num_experts * rows * k, MAX_NUMBERS))
    for first in range(0, num_experts, at_once):
        numbers = expand(weight[first : first + at_once], x.dtype)
        multiply_pairs(values, numbers, ids, pairs, pairs_per_row, out, activation, config, False, first)
        del numbers  # before the next ones are made
    return out


def _multiply_codes(
    x: torch.Tensor, x_scales: torch.Tensor, weight: Scaled, ids: torch.Tensor, pairs: Pairs | None,
    pairs_per_row: int, out: torch.Tensor, activation: str | None, group: int, rounds: bool, tile: ScaledTile | None,
    pdl: bool, is_second: bool, bias: torch.Tensor | None,
) -> None:
    """Fill out [pairs, n] with products of codes. x: fp8 codes if token rows are rounded."""
    (num_experts, rows, k), (num_pairs, n), is_card = weight.shape, out.shape, out.device.type == "cuda"
    # By powers of two: a batch of another size is no reason to compile anew.
    rows_of_fp4 = rows if weight.code == FP4 else 0
    tile = tile or expert_tile(next_power_of_two(num_pairs), num_experts, not is_card, rows_of_fp4, num_sms(out.device))
    codes, scales, factors = weight.codes, weight.scales, weight.factors
    shifts = scales if weight.shifts is None else weight.shifts
    multipliers = scales if factors is None else factors
    own_bias = scales if bias is None else bias
    if bias is not None:
        require_tensor("scaled_experts", "biases.gate_up", bias, (num_experts, rows), out.device, FLOATS)
    order, ends = (ids, ids) if pairs is None else (pairs.order, pairs.ends)
    # Outputs first: programs that run together share a tile of x, and read one expert's weights.
    grid = (cdiv(rows, tile.block_n), num_pairs if pairs is None else max_tiles(num_pairs, num_experts, tile.block_m))
    _scaled_expert_kernel[grid](
        x, x_scales, codes, scales, shifts, multipliers, own_bias, out, ids, order, ends, x.stride(0), codes.stride(0),
        codes.stride(1), *scales.stride(), *shifts.stride(), multipliers.stride(0), own_bias.stride(0), out.stride(0),
        num_pairs, num_experts, n, K=k, GROUP=group, CODE=CODES.index(weight.code), X_GROUP=group if rounds else 0,
        PAIRS_PER_ROW=pairs_per_row, ACTIVATION=_CODES_OF_ACTIVATIONS[activation], FEW=pairs is None,
        PAIRS=next_power_of_two(num_pairs) if pairs is None else 1, EXPERTS=next_power_of_two(num_experts),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, COLUMNS=COLUMNS, HAS_ZEROS=weight.zeros is not None,
        HAS_OFFSETS=weight.offsets is not None, HAS_FACTORS=factors is not None,
        HAS_BIAS=bias is not None, WIDEN=not is_card, ASM=is_card and unpacks_pairs(weight, out.dtype), PDL=pdl,
        EARLY=is_second, num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(pdl),
    )
