"""The Hopper kernel of linear layers with int4 or int8 weights in tiled order, for more token rows than `rows.py`
serves and fewer than a long prompt has.

Dequantising the weight to memory and reading it again takes several times as long as reading the codes. Here codes are
dequantised in the registers from which tensor cores read them, once for every tile of token rows. Each number is
rounded to bfloat16 with its scale, as if it had been written to memory. With thousands of token rows the library's
product is so much faster that dequantising to memory pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.code_kinds import CODES, INT4, INT8
from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, counters_for
from outrider.kernels.gpu.common import FLOATS, cdiv, num_sms, pdl_options, refuse, require_tensor, uses_pdl
from outrider.kernels.gpu.hopper.coded import rows as coded_rows
from outrider.kernels.gpu.hopper.coded.rows_kernel import COLUMNS, OUTPUTS
from outrider.kernels.gpu.hopper.coded.tiles_kernel import (
    HALF,
    NO_SHIFTS,
    OFFSETS,
    STORED_ROWS,
    ZEROS,
    coded_tiles_kernel,
)
from outrider.kernels.gpu.hopper.few_rows import GATES
from outrider.kernels.gpu.hopper.prefill import is_hopper
from outrider.kernels.gpu.launch.triton_kernel import is_collecting
from outrider.kernels.scaled import Scaled, codes_per_byte

MAX_ROWS = 512
FETCH_REGISTERS = 40
SHARED_BYTES = 224 << 10  # of a program that has a multiprocessor for itself, less what barriers take
MAX_STAGES, MAX_X_STAGES = 8, 12
MAX_SPLITS, MIN_SPLIT_STEPS = 4, 16
SPLIT_STEPS = 4.0  # that take as long as writing and reading the sums of one split of the first shape


@dataclass(frozen=True)
class TileShape:
    """The part of a product that one program computes."""

    rows: int  # token rows: 64, 128 or 256
    warp_groups: int  # groups of four warps that multiply
    blocks: int  # times 64 outputs of each of them
    seconds: float  # of 128 columns, relative to the first shape

    @property
    def outputs(self) -> int:
        return self.warp_groups * self.blocks * OUTPUTS.value

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread at the start, and of a thread that multiplies if two groups of warps do."""
        return (255, 0) if self.warp_groups == 1 else (168, 232)


SHAPES = (TileShape(128, 2, 1, 1.0), TileShape(64, 2, 1, 0.7), TileShape(128, 2, 2, 1.85), TileShape(256, 2, 1, 1.72),
          TileShape(64, 2, 2, 1.2))


@dataclass(frozen=True)
class TilePlan:
    """The division of a product among programs."""

    shape: TileShape
    splits: int  # programs that share the inner dimension of a tile
    num_stages: int  # steps of 128 columns whose codes have room
    num_x_stages: int  # halves of such steps whose token rows have room


def step_group(weight: Scaled) -> int:
    """Return how many columns of a step share a scale. A step is the part of the inner dimension that is fetched at
    once."""
    return min(weight.group, COLUMNS.value)


def step_bytes(weight: Scaled, shape: TileShape) -> int:
    """Return the bytes of one step's codes, scales and shifts."""
    groups = COLUMNS.value // step_group(weight)
    shifts = 0 if weight.shifts is None else weight.shifts.element_size()
    codes = COLUMNS.value // codes_per_byte(weight.code)
    return shape.outputs * (codes + groups * (weight.scales.element_size() + shifts))


def make_plan(weight: Scaled, shape: TileShape, splits: int, out_bytes: int) -> TilePlan:
    """Plan a matrix product with a given tile: how many stages of codes and of token rows fit into shared memory.
    splits: see `TilePlan`. out_bytes: bytes of one number of the result."""
    exchange = shape.warp_groups * OUTPUTS.value * STORED_ROWS.value * out_bytes
    room, step, half = SHARED_BYTES - exchange, step_bytes(weight, shape), 2 * shape.rows * HALF.value
    # Token rows come from the card's cache, codes from its memory: these have a step more.
    num_x = max(count for count in range(2, MAX_X_STAGES + 1) if count * half + (count // 2 + 1) * step <= room)
    return TilePlan(shape, splits, min(MAX_STAGES, (room - num_x * half) // step), num_x)


@lru_cache(maxsize=1024)
def choose(num_rows: int, n: int, k: int, is_gated: bool, sms: int) -> tuple[TileShape, int]:
    """Return the (tile, splits) with the least expected time. n: all outputs."""
    steps = k // COLUMNS.value

    def num_programs(shape: TileShape, splits: int) -> int:
        return cdiv(num_rows, shape.rows) * cdiv(n, shape.outputs) * splits

    def seconds(shape: TileShape, splits: int) -> float:
        share = shape.rows * shape.outputs / (SHAPES[0].rows * SHAPES[0].outputs)
        added = SPLIT_STEPS * splits * share if splits > 1 else 0.0
        return cdiv(num_programs(shape, splits), sms) * cdiv(steps, splits) * shape.seconds + added

    def fits(shape: TileShape, splits: int) -> bool:
        if is_gated and (splits > 1 or shape.blocks < 2):
            return False
        return splits == 1 or (steps // splits >= MIN_SPLIT_STEPS and num_programs(shape, splits) <= sms)

    found = [(shape, splits) for shape in SHAPES for splits in range(1, MAX_SPLITS + 1) if fits(shape, splits)]
    return min(found, key=lambda each: seconds(*each))


def has_kernel(weight: Scaled, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel serves this weight, for some numbers of token rows."""
    return (is_hopper(device) and dtype == torch.bfloat16 and weight.code in (INT4, INT8) and weight.is_tiled
            and weight.factors is None)


def takes(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None = None, rounding: int = 0,
          activation: str | None = None) -> bool:
    """Whether the kernel serves this product, with its activation if there is one."""
    if not (coded_rows.MAX_ROWS < x.shape[0] <= MAX_ROWS and rounding == 0 and has_kernel(weight, x.device, x.dtype)):
        return False
    return activation is None or (activation in GATES and weight.shape[0] % (2 * OUTPUTS.value) == 0)


def takes_wide(x: torch.Tensor, weight: Scaled, rounding: int = 0) -> bool:
    return takes(x, weight, None, rounding)


def scaled_linear(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None = None,
                  rounding: int = 0) -> torch.Tensor:
    """Multiply token rows with a quantised weight and add the bias; see `kernels.scaled.scaled_linear` for the
    arguments."""
    return coded_tiles(x, weight, bias, x.dtype)


def scaled_wide(x: torch.Tensor, weight: Scaled, rounding: int = 0) -> torch.Tensor:
    """Multiply token rows with a quantised weight, with a float32 result; see `kernels.scaled.scaled_wide` for the
    arguments."""
    return coded_tiles(x, weight, None, torch.float32)


def scaled_gated(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, rounding: int,
                 activation: str) -> torch.Tensor:
    """Return act(gate) * up of a product with a quantised weight; see `kernels.scaled.scaled_gated` for the
    arguments."""
    return coded_tiles(x, weight, bias, x.dtype, activation=activation)


def coded_tiles(
    x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, out_dtype: torch.dtype, *,
    activation: str | None = None, plan: TilePlan | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Return the product [rows, n] for any number of token rows; with an activation, act(gate) * up of the two halves
    of the outputs [rows, n / 2]. While launches are being collected for compilation, the launches that later steps may
    need are collected too."""
    name, (n, k), device = "coded_tiles", weight.shape, x.device
    require_tensor(name, "x", x, (None, k), device, (torch.bfloat16,))
    require_tensor(name, "weight", weight.codes, (n, None), device, (weight.codes.dtype,))
    if not (weight.is_tiled and weight.code in (INT4, INT8) and weight.factors is None):
        refuse(name, "weight", f"of {weight.code} codes is not in tiles, or has factors")
    if bias is not None:
        require_tensor(name, "bias", bias, (n,), device, FLOATS)
    if activation is not None and (activation not in GATES or n % (2 * OUTPUTS.value)):
        refuse(name, "activation", f"is {activation!r} of {n} outputs, known are {list(GATES)} of multiples of 128")
    if plan is not None and activation is not None and (plan.splits > 1 or plan.shape.blocks < 2):
        refuse(name, "plan", "has no whole gates and ups, which an activation needs")
    # The copy engine reads rows whose places are multiples of 16 bytes.
    x = x if x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    out = torch.empty(x.shape[0], n if activation is None else n // 2, dtype=out_dtype, device=device)
    if x.shape[0] == 0:
        return out
    pdl = uses_pdl(device) if pdl is None else pdl
    asked = n, k, activation is not None, num_sms(device)
    chosen = later_choices(*asked) if is_collecting() else [choose(x.shape[0], *asked)]
    plans = [make_plan(weight, *each, out.element_size()) for each in chosen] if plan is None else [plan]
    for each in plans:
        _launch(x, weight, bias, out, 0 if activation is None else GATES[activation], each, pdl)
    return out


def later_choices(n: int, k: int, is_gated: bool, sms: int) -> Iterable[tuple[TileShape, int]]:
    """Return the tiles that later steps may need, over all numbers of token rows that the kernel serves, so that they
    are compiled ahead. Each comes with and without splits as needed; the number of splits is not compiled in."""
    counts = range(coded_rows.MAX_ROWS + 1, MAX_ROWS + 1, min(shape.rows for shape in SHAPES))
    chosen = (choose(count, n, k, is_gated, sms) for count in counts)
    return {(shape, splits > 1): (shape, splits) for shape, splits in chosen}.values()


def shift_kind(weight: Scaled) -> int:
    if weight.shifts is None:
        return NO_SHIFTS.value
    return OFFSETS.value if weight.zeros is None else ZEROS.value


def _launch(
    x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor, gate: int, plan: TilePlan, pdl: bool,
) -> None:
    num_rows, (n, k), shape, device = x.shape[0], weight.shape, plan.shape, x.device
    grid = (cdiv(num_rows, shape.rows), cdiv(n, shape.outputs), plan.splits)
    if gate:
        grid = (grid[0], cdiv(n // 2, shape.warp_groups * OUTPUTS.value), 1)
    parts = counters = out  # unused, unless programs share the sums
    if plan.splits > 1:
        blocks = grid[0] * grid[1] * shape.warp_groups * shape.blocks
        assert blocks <= MIN_COUNTERS, f"{blocks} blocks of sums have no counters"
        parts = torch.empty(blocks * plan.splits * OUTPUTS.value * shape.rows, dtype=torch.float32, device=device)
        counters = counters_for(device, MIN_COUNTERS)
    groups = COLUMNS.value // step_group(weight)
    x_tiles = _describe(x, shape.rows, HALF.value, 128)
    w_tiles = _describe(weight.codes.view(-1, COLUMNS.value), OUTPUTS.value // 2, COLUMNS.value, 128)
    s_tiles = _describe(weight.scales.T, groups, OUTPUTS.value, 0)
    z_tiles = s_tiles if weight.shifts is None else _describe(weight.shifts.T, groups, OUTPUTS.value, 0)
    registers, multiply_registers = shape.registers
    coded_tiles_kernel[grid](
        x_tiles, w_tiles, s_tiles, z_tiles, x if bias is None else bias, out, parts, counters, out.stride(0), num_rows,
        n, k // COLUMNS.value, CODE=CODES.index(weight.code), ROWS=shape.rows, WARP_GROUPS=shape.warp_groups,
        BLOCKS=shape.blocks, GROUP=step_group(weight), SHIFTS=shift_kind(weight), HAS_BIAS=bias is not None, GATE=gate,
        STAGES=plan.num_stages, X_STAGES=plan.num_x_stages, IS_SPLIT=plan.splits > 1, BYTES=step_bytes(weight, shape),
        REGS=multiply_registers, FETCH_REGS=FETCH_REGISTERS, PDL=pdl, num_warps=4, maxnreg=registers,
        **pdl_options(pdl),
    )


def _describe(matrix: torch.Tensor, rows: int, columns: int, swizzle: int) -> TensorDescriptor:
    """Make a tensor descriptor with which the copy engine (TMA) reads a matrix; it writes zeros for what lies
    outside."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * matrix.element_size(), rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout)
