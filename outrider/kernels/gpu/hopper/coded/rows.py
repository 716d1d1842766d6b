"""The Hopper kernel of linear layers with quantised weights (codes with scales), for 1 to 64 token rows, where reading
the codes takes all of the time. It has the same parts and order of sums as `../few_rows.py`, with these differences.

Fp8 codes and fp8 token rows go to the tensor cores as they are. Integers become bfloat16 in the registers of the
threads that multiply with them; the weight is rearranged for that when it is loaded (`arrange`), so that a thread's
bytes are side by side. Tensor cores add fp8 products with fewer bits, so the sum of every 128 columns is moved to
float32 and multiplied by its scales there. Scales of fewer columns, and offsets, are applied to the numbers in
bfloat16. One or two groups of four warps multiply, each with 64 outputs, and share the token rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.code_kinds import CODES, FP8, INT4, INT8
from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, counters_for
from outrider.kernels.gpu.common import cdiv, num_sms, pdl_options, uses_pdl
from outrider.kernels.gpu.hopper.coded.rows_kernel import (
    COLUMNS,
    LEAST_SCALES,
    OF_BLOCKS,
    OF_GROUPS,
    OF_OUTPUTS,
    OF_STEPS,
    OUTPUTS,
    coded_rows_kernel,
)
from outrider.kernels.gpu.hopper.few_rows import GATES
from outrider.kernels.gpu.hopper.prefill import is_hopper
from outrider.kernels.gpu.launch.triton_kernel import is_collecting
from outrider.kernels.scaled import Scaled, codes_per_byte

MAX_ROWS = 64
TILE_ROWS = (8, 16, 32, MAX_ROWS)  # token rows of a tile
MAX_SPLITS = 4
MAX_STAGES = 24
FETCH_REGISTERS = 40
RING_BYTES, LARGE_RING_BYTES = 100 << 10, 204 << 10  # two programs share a multiprocessor, or one has it for itself


@dataclass(frozen=True)
class CodedPlan:
    """The division of a product among programs."""

    rows: int  # token rows of a tile: 16, 32 or 64
    warp_groups: int  # of 64 outputs each
    splits: int  # programs that share the inner dimension of a tile
    num_stages: int
    fills: bool  # a program has a multiprocessor for itself

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread at the start, and of a thread that multiplies if two groups of warps do."""
        if self.warp_groups == 1:
            return (168 if self.fills else 128), 0
        return (168, 232) if self.fills else (80, 96)


def scale_kind(weight: Scaled) -> int:
    if weight.scales.shape[1] == 1:
        return OF_OUTPUTS.value
    if weight.group < COLUMNS.value:
        return OF_GROUPS.value
    return OF_STEPS.value if weight.blocks is None else OF_BLOCKS.value


def step_group(weight: Scaled) -> int:
    """Return how many columns of a step share a scale. A step is the part of the inner dimension that is fetched at
    once."""
    return min(weight.group, COLUMNS.value)


def padded_scales(rows: int) -> int:
    return max(rows, LEAST_SCALES.value)


def step_bytes(weight: Scaled, rows: int, warp_groups: int) -> int:
    """Return the bytes of shared memory that one step takes."""
    codes = OUTPUTS.value * COLUMNS.value // codes_per_byte(weight.code)
    groups = COLUMNS.value // step_group(weight)
    scales = groups * weight.scales.element_size() if scale_kind(weight) in (OF_STEPS.value, OF_GROUPS.value) else 0
    shifts = 0 if weight.shifts is None else groups * weight.shifts.element_size()
    of_rows = rows * COLUMNS.value * (1 if weight.code == FP8 else 2)
    x_scales = 4 if weight.code == FP8 and scale_kind(weight) != OF_OUTPUTS.value else 0
    return warp_groups * (codes + OUTPUTS.value * (scales + shifts)) + of_rows + padded_scales(rows) * x_scales


def make_plan(weight: Scaled, rows: int, warp_groups: int, splits: int, fills: bool, is_gated: bool) -> CodedPlan:
    ring = (LARGE_RING_BYTES if fills else RING_BYTES) - 4 * OUTPUTS.value * rows * is_gated
    return CodedPlan(rows, warp_groups, splits, min(ring // step_bytes(weight, rows, warp_groups), MAX_STAGES), fills)


@lru_cache(maxsize=1024)
def choose(num_rows: int, n: int, k: int, code: str, kind: int, is_gated: bool, sms: int) -> tuple[int, int, int, bool]:
    """Return the fastest measured (token rows of a tile, groups of warps, splits, whether one program fills a
    multiprocessor). If scales are fetched with each step, warps have more work, so more programs on a multiprocessor
    are faster. n: all outputs."""
    rows = next(rows for rows in tile_rows(code) if num_rows <= rows)
    steps, tiles = k // COLUMNS.value, cdiv(n, OUTPUTS.value)
    if is_gated:
        return rows, 2, 1, rows == MAX_ROWS
    if tiles > sms:
        return rows, 1 if rows == MAX_ROWS else 2, 1, False
    if kind == OF_OUTPUTS.value:
        return rows, 1, max(1, min(sms // tiles, MAX_SPLITS, steps // 32)), True
    return rows, 1, max(1, min(2 * sms // tiles, MAX_SPLITS, steps // 10)), False


def tile_rows(code: str) -> tuple[int, ...]:
    """Return the numbers of token rows that a tile may have."""
    return TILE_ROWS[1:] if code == FP8 else TILE_ROWS


def has_order(weight: Scaled, dtype: torch.dtype) -> bool:
    """Whether some kernel, or the library's product for many token rows, reads this weight in an order of its own
    (`arrange`)."""
    return dtype == torch.bfloat16 and is_hopper(weight.codes.device) and (weight.has_tiles or weight.has_blocks)


def arrange(weight: Scaled, dtype: torch.dtype) -> Scaled:
    """Bring a weight's codes into the order that these kernels read; see `kernels.scaled.arrange`."""
    return weight.tiled() if weight.has_tiles else weight.with_blocks()


def plan_rows(num_rows: int, weight: Scaled, is_gated: bool, sms: int) -> CodedPlan:
    chosen = choose(num_rows, *weight.shape, weight.code, scale_kind(weight), is_gated, sms)
    return make_plan(weight, *chosen, is_gated)


def takes(x: torch.Tensor, weight: Scaled, rounding: int, activation: str | None = None) -> bool:
    """Whether the kernel serves this product, with its activation if there is one."""
    n, k = weight.shape
    if not (1 <= x.shape[0] <= MAX_ROWS and is_hopper(x.device) and x.dtype == torch.bfloat16 and k % COLUMNS.value == 0
            and weight.factors is None):
        return False
    if activation is not None and (activation not in GATES or n % (2 * OUTPUTS.value)):
        return False
    if weight.code == FP8:
        return rounding == weight.group and weight.group in (k, COLUMNS.value) and n % 4 == 0
    return weight.code in (INT4, INT8) and weight.is_tiled


def coded_rows(
    values: torch.Tensor, x_scales: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, *,
    activation: str | None = None, plan: CodedPlan | None = None, pdl: bool | None = None,
) -> None:
    """Multiply token rows, values [rows, k], with a quantised weight. For fp8 codes the values are fp8 with scales
    [rows, groups] (stored by group if there are several); for other codes they are bfloat16. Writes out [rows, n] in
    bfloat16 or float32; with an activation, act(gate) * up of the two halves of the outputs [rows, n / 2]."""
    device = out.device
    pdl = uses_pdl(device) if pdl is None else pdl
    counts = {out.shape[0], *(tile_rows(weight.code) if is_collecting() else ())}  # later steps have other rows
    plans = {plan_rows(rows, weight, activation is not None, num_sms(device)) for rows in counts}
    gate = 0 if activation is None else GATES[activation]
    for each in [plan] if plan is not None else sorted(plans, key=lambda each: each.rows):
        _launch(values, x_scales, weight, bias, out, gate, each, pdl)


def _launch(
    values: torch.Tensor, x_scales: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor,
    gate: int, plan: CodedPlan, pdl: bool,
) -> None:
    num_rows, (n, k), device = out.shape[0], weight.shape, out.device
    tiles = cdiv(n, plan.warp_groups * OUTPUTS.value)
    parts = counters = out  # unused, unless programs share the sums
    if plan.splits > 1:
        size = tiles * plan.warp_groups * OUTPUTS.value * plan.rows * plan.splits
        parts = torch.empty(size, dtype=torch.float32, device=device)
        counters = counters_for(device, MIN_COUNTERS)
    kind, is_fp8 = scale_kind(weight), weight.code == FP8
    x_tiles = _describe(values, plan.rows, COLUMNS.value if is_fp8 else COLUMNS.value // 2, 128)
    xs_tiles = _describe(x_scales.T, 1, padded_scales(plan.rows), 0) if is_fp8 and kind != OF_OUTPUTS.value else x_tiles
    codes = weight.codes if is_fp8 else weight.codes.view(-1, COLUMNS.value)
    w_tiles = _describe(codes, OUTPUTS.value if is_fp8 else OUTPUTS.value // 2, COLUMNS.value, 128)
    groups, is_fetched = COLUMNS.value // step_group(weight), kind in (OF_STEPS.value, OF_GROUPS.value)
    s_tiles = _describe(weight.scales.T, groups, OUTPUTS.value, 0) if is_fetched else x_tiles
    z_tiles = x_tiles if weight.shifts is None else _describe(weight.shifts.T, groups, OUTPUTS.value, 0)
    registers, multiply_registers = plan.registers
    coded_rows_kernel[(tiles, plan.splits)](
        x_tiles, xs_tiles, w_tiles, s_tiles, z_tiles, x_scales,
        weight.scales if weight.blocks is None else weight.blocks, x_scales if bias is None else bias, out, parts,
        counters, out.stride(0), num_rows, n, k // COLUMNS.value,
        CODE=CODES.index(weight.code), ROWS=plan.rows, WARP_GROUPS=plan.warp_groups, SCALES=kind,
        GROUP=step_group(weight), HAS_SHIFTS=weight.shifts is not None, HAS_BIAS=bias is not None, GATE=gate,
        STAGES=plan.num_stages, SPLITS=plan.splits, BYTES=step_bytes(weight, plan.rows, plan.warp_groups),
        REGS=multiply_registers, FETCH_REGS=FETCH_REGISTERS, PDL=pdl, num_warps=4, maxnreg=registers,
        **pdl_options(pdl),
    )


def _describe(matrix: torch.Tensor, rows: int, columns: int, swizzle: int) -> TensorDescriptor:
    """Make a tensor descriptor with which the copy engine (TMA) reads a matrix; it writes zeros for what lies
    outside."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * matrix.element_size(), rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout)
