"""The Hopper kernel of linear layers for 2 to 64 token rows, where reading the weight takes all of the time.

The weight is the first operand, of which tensor cores take 64 rows, and the token rows are the second one, padded to
16, 32 or 64. One warp fetches tiles with the bulk copy engine into a ring; four warps multiply. A weight does not
depend on other kernels, so the ring is filled with weights before the kernel waits for its token rows.

If there are few outputs, several programs share the inner dimension of a tile: each stores its float32 sums, and the
last one to arrive adds them up, always in the same order. A token row's bits do not depend on other rows; of the number
of rows they depend only on the padded size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, counters_for
from outrider.kernels.gpu.common import cdiv, num_sms, pdl_options, require, require_tensor, uses_pdl
from outrider.kernels.gpu.hopper.dependent_launch import release_dependents, wait_for_inputs
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import is_hopper, make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel, is_collecting, note_product
from outrider.kernels.gpu.linear.thin import SMALL_WEIGHT

COLUMNS = gl.constexpr(64)  # of the inner dimension, of one tile: 128 bytes, the widest row that is swizzled
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)  # made once: that takes longer than all else that describes a tile
_SILU, _GELU_TANH = gl.constexpr(1), gl.constexpr(2)
GATES = {"silu": 1, "gelu_pytorch_tanh": 2}
MAX_ROWS = 64
_TILE_ROWS = (16, 32, MAX_ROWS)  # token rows of a tile
MAX_SPLITS = 4
MAX_SMALL_ROWS = 32  # with small weights
MIN_BYTES, MIN_INNER = 4 << 20, 1024  # of weights: smaller ones were not measured
MIN_HEAD_INNER = 4096  # inner dimension of weights with very many outputs
FETCH_REGISTERS = 40
RING_BYTES, LARGE_RING_BYTES = 104 << 10, 208 << 10  # two programs share a multiprocessor, or one has it for itself


@gluon.jit
def gated(gate, up, GATE: gl.constexpr):
    """Apply a gated activation, as `common.gated` does."""
    if GATE == _GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + (1.0 - 2.0 / (1.0 + gl.exp(2.0 * inner)))) * up
    else:
        return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _fetch_weights(
    w_tiles, weights, ready, slot, output, column, N, GATE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
):
    """Start the copies of one step's weights, and set the number of bytes that the step's barrier waits for."""
    if GATE:
        mbarrier.expect(ready.index(slot), (2 * OUTPUTS + ROWS) * COLUMNS * 2)
        tma.async_copy_global_to_shared(w_tiles, [output, column], ready.index(slot), weights.index(slot * 2))
        tma.async_copy_global_to_shared(w_tiles, [output + N, column], ready.index(slot), weights.index(slot * 2 + 1))
    else:
        mbarrier.expect(ready.index(slot), (OUTPUTS + ROWS) * COLUMNS * 2)
        tma.async_copy_global_to_shared(w_tiles, [output, column], ready.index(slot), weights.index(slot))


@gluon.jit
def _fetch(
    x_tiles, w_tiles, ring, output, first, steps, N, GATE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr, LATE: gl.constexpr, PDL: gl.constexpr,
):
    rows, weights, ready, free = ring
    ahead = gl.minimum(steps, STAGES)
    for turn in range(0, ahead):
        _fetch_weights(w_tiles, weights, ready, turn, output, (first + turn) * COLUMNS, N, GATE, ROWS, OUTPUTS)
    wait_for_inputs(PDL)
    for turn in range(0, ahead):
        tma.async_copy_global_to_shared(x_tiles, [0, (first + turn) * COLUMNS], ready.index(turn), rows.index(turn))
    if LATE:
        release_dependents(PDL)
    for turn in range(ahead, steps):
        slot = turn % STAGES
        mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
        _fetch_weights(w_tiles, weights, ready, slot, output, (first + turn) * COLUMNS, N, GATE, ROWS, OUTPUTS)
        tma.async_copy_global_to_shared(x_tiles, [0, (first + turn) * COLUMNS], ready.index(slot), rows.index(slot))


@gluon.jit
def _start_product(slot, turn, acc, up, ring, GATE: gl.constexpr, STAGES: gl.constexpr):
    rows, weights, ready, free = ring
    mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
    x = rows.index(slot).permute((1, 0))
    if GATE:
        acc = warpgroup_mma(weights.index(slot * 2), x, acc, is_async=True)
        up = warpgroup_mma(weights.index(slot * 2 + 1), x, up, is_async=True)
    else:
        acc = warpgroup_mma(weights.index(slot), x, acc, is_async=True)
    return acc, up


@gluon.jit
def _finish_products(acc, up, OUTSTANDING: gl.constexpr, GATE: gl.constexpr):
    """Wait until the products of at most OUTSTANDING steps are still running; their sums can be used only after
    that."""
    if GATE:
        acc, up = warpgroup_mma_wait(2 * OUTSTANDING, deps=[acc, up])
    else:
        acc = warpgroup_mma_wait(OUTSTANDING, deps=[acc])
    return acc, up


@gluon.jit
def add_parts(part, SPLITS: gl.constexpr, STRIDE: gl.constexpr):
    """Add up the partial sums that the splits stored, in order. Other multiprocessors wrote them, so they are read from
    the L2 cache."""
    total = gl.load(part, cache_modifier=".cg")
    for split in gl.static_range(1, SPLITS):
        total += gl.load(part + split * STRIDE, cache_modifier=".cg")
    return total


@gluon.jit
def _multiply(
    out, out_stride, parts, counters, ring, tile, steps, M, N, GATE: gl.constexpr, ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):
    rows, weights, ready, free = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    up = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    acc, up = _start_product(0, 0, acc, up, ring, GATE, STAGES)
    acc, up = _finish_products(acc, up, 1, GATE)
    for turn in range(1, steps):
        acc, up = _start_product(turn % STAGES, turn, acc, up, ring, GATE, STAGES)
        acc, up = _finish_products(acc, up, 1, GATE)
        mbarrier.arrive(free.index((turn - 1) % STAGES), count=1)
    acc, up = _finish_products(acc, up, 0, GATE)
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    dtype: gl.constexpr = out.dtype.element_ty
    HALVES: gl.constexpr = 2 if GATE else 1
    is_last = True
    if SPLITS > 1:
        SIZE: gl.constexpr = OUTPUTS * ROWS
        part = parts + tile.to(gl.int64) * (SPLITS * HALVES * SIZE) + row[:, None] * ROWS + token[None, :]
        own = part + gl.program_id(1) * (HALVES * SIZE)
        gl.store(own, acc)
        if GATE:
            gl.store(own + SIZE, up)
        barrier()  # every thread's part is stored before one of them says so
        is_last = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            gl.store(counters + tile, 0)
            acc = add_parts(part, SPLITS, HALVES * SIZE)
            if GATE:
                up = add_parts(part + SIZE, SPLITS, HALVES * SIZE)
    if is_last:
        if GATE:
            # Rounded as the two products would be, had they been stored.
            acc = gated(acc.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), GATE)
        output = tile * OUTPUTS + row
        to = out + token.to(gl.int64)[None, :] * out_stride + output[:, None]
        gl.store(to, acc.to(dtype), mask=(token < M)[None, :] & (output < N)[:, None])


@TritonKernel
@gluon.jit(do_not_specialize=["out_stride", "M", "N", "num_steps"])
def _few_rows_kernel(
    x_tiles, w_tiles, out, parts, counters, out_stride, M, N, num_steps, GATE: gl.constexpr, ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, FETCH_REGS: gl.constexpr, LATE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply a tile of token rows with a tile of the weight. LATE: the next kernel starts only when every program has
    waited for the token rows, so it finds them complete."""
    if not LATE:
        release_dependents(PDL)
    dtype: gl.constexpr = x_tiles.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES * (2 if GATE else 1), OUTPUTS, COLUMNS], layout)
    ring = (rows, weights, make_barriers(STAGES, 1), make_barriers(STAGES, 1))
    fence_async_shared()
    barrier()
    tile = gl.program_id(0)
    first = gl.program_id(1) * num_steps // SPLITS
    steps = (gl.program_id(1) + 1) * num_steps // SPLITS - first
    gl.warp_specialize(
        [
            (_multiply, (out, out_stride, parts, counters, ring, tile, steps, M, N, GATE, ROWS, OUTPUTS, STAGES,
                         SPLITS)),
            (_fetch, (x_tiles, w_tiles, ring, tile * OUTPUTS, first, steps, N, GATE, ROWS, OUTPUTS, STAGES, LATE, PDL)),
        ],
        [1],
        [FETCH_REGS],
    )


@dataclass(frozen=True)
class FewRowsPlan:
    """The division of a product among programs."""

    rows: int  # token rows of a tile: 16, 32 or 64
    outputs: int  # weight rows of a tile: 64 or 128
    splits: int  # programs that share the inner dimension of a tile
    num_stages: int

    @property
    def registers(self) -> int:
        """The number of registers per thread with which two programs fit on a multiprocessor."""
        return 96 if self.outputs == 64 else 128


def padded_rows(num_rows: int) -> int:
    return next(rows for rows in _TILE_ROWS if num_rows <= rows)


def make_plan(rows: int, outputs: int, splits: int, is_gated: bool, ring_bytes: int) -> FewRowsPlan:
    stage_bytes = ((2 if is_gated else 1) * outputs + rows) * COLUMNS.value * 2
    return FewRowsPlan(rows, outputs, splits, ring_bytes // stage_bytes)


@lru_cache(maxsize=1024)
def plan_few_rows(num_rows: int, n: int, k: int, is_gated: bool, sms: int) -> FewRowsPlan | None:
    """Return the plan for a weight with n outputs (n pairs of outputs if gated), or None if another kernel was faster.

    All programs run at the same time, unless there are more tiles than fit. For a long inner dimension one program with
    a large ring of buffers on each multiprocessor is best: two are not placed evenly while the previous kernel still
    runs. The partial sums of splits are written and read again, so more token rows need longer splits.
    """
    rows, steps, tiles = padded_rows(num_rows), k // COLUMNS.value, cdiv(n, 64)
    small = 2 * n * k * (2 if is_gated else 1) <= SMALL_WEIGHT
    if tiles > sms:
        few = rows == 16 and 2 * tiles < 3 * sms
        return make_plan(rows, 64, 1, is_gated, LARGE_RING_BYTES if few else RING_BYTES)
    splits = 1 if is_gated else max(1, min(sms // tiles, MAX_SPLITS, steps // (rows // 2)))
    ring_bytes = LARGE_RING_BYTES if steps // splits > 20 else RING_BYTES
    if rows == 16 and steps // splits < 40 and not is_gated:
        splits, ring_bytes = max(1, min(2 * sms // tiles, MAX_SPLITS, steps // 8)), RING_BYTES
    fills_card = tiles * splits >= 0.7 * sms
    if small:
        return None if is_gated or rows > MAX_SMALL_ROWS else make_plan(rows, 64, splits, False, ring_bytes)
    if not fills_card or (rows == MAX_ROWS and splits > 2):
        return None
    return make_plan(rows, 64, splits, is_gated, ring_bytes)


@lru_cache(maxsize=1024)
def plan_wide(num_rows: int, n: int, k: int, sms: int) -> FewRowsPlan | None:
    """Return the plan for a product with float32 results, such as logits. Wide tiles read the token rows fewer
    times."""
    has_many_tiles = n >= 4 * 128 * sms and k >= MIN_HEAD_INNER
    return make_plan(padded_rows(num_rows), 128, 1, False, RING_BYTES) if has_many_tiles else None


def can_fetch(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copy engine can read x and the weight, and the inner dimension consists of whole tiles."""
    return (
        x.dtype == weight.dtype == torch.bfloat16 and is_hopper(x.device) and x.shape[1] % COLUMNS.value == 0
        and all(each.stride(1) == 1 and each.stride(0) % 8 == 0 and each.data_ptr() % 16 == 0 for each in (x, weight))
    )


def _may_serve(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        1 < x.shape[0] <= MAX_ROWS and weight.shape[1] >= MIN_INNER and 2 * weight.numel() >= MIN_BYTES
        and can_fetch(x, weight)
    )


def is_fastest(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return bias is None and _may_serve(x, weight) and _plan(x.shape[0], weight, False) is not None


def is_fastest_gated(x: torch.Tensor, weight: torch.Tensor, activation: str) -> bool:
    return _may_serve(x, weight) and _plan(x.shape[0], weight, True) is not None


def is_fastest_wide(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return _may_serve(x, weight) and plan_wide(x.shape[0], *weight.shape, num_sms(x.device)) is not None


def _plan(num_rows: int, weight: torch.Tensor, is_gated: bool) -> FewRowsPlan | None:
    n, k = weight.shape
    return plan_few_rows(num_rows, n // 2 if is_gated else n, k, is_gated, num_sms(weight.device))


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: None = None, *, plan: FewRowsPlan | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply x [rows, k] with weight [n, k] transposed, for 1 to 64 rows. Call it where `is_fastest` is true, or with
    a plan."""
    out = _new_output("few_rows_linear", x, weight, weight.shape[0], x.dtype)
    _launch(x, weight, out, 0, [plan or _plan(x.shape[0], weight, False), *_later_plans(weight, False)], pdl)
    return out


def few_rows_gated(
    x: torch.Tensor, weight: torch.Tensor, activation: str, *, plan: FewRowsPlan | None = None, pdl: bool | None = None
) -> torch.Tensor:
    """Return act(gate) * up [rows, n]; weight [2 * n, k] holds the gate rows, then the up rows."""
    require(activation in GATES, "few_rows_gated", "activation", f"is {activation!r}")
    out = _new_output("few_rows_gated", x, weight, weight.shape[0] // 2, x.dtype)
    plans = [plan or _plan(x.shape[0], weight, True), *_later_plans(weight, True)]
    _launch(x, weight, out, GATES[activation], plans, pdl)
    return out


def few_rows_wide(
    x: torch.Tensor, weight: torch.Tensor, *, plan: FewRowsPlan | None = None, pdl: bool | None = None
) -> torch.Tensor:
    """Multiply x [rows, k] with weight [n, k] transposed, and return the product in float32."""
    out = _new_output("few_rows_wide", x, weight, weight.shape[0], torch.float32)
    sizes = *weight.shape, num_sms(x.device)
    later = [plan_wide(rows, *sizes) for rows in _TILE_ROWS] if is_collecting() else []
    _launch(x, weight, out, 0, [plan or plan_wide(x.shape[0], *sizes), *later], pdl)
    return out


def _new_output(name: str, x: torch.Tensor, weight: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    require_tensor(name, "weight", weight, (None, None), x.device, (torch.bfloat16,))
    require_tensor(name, "x", x, (None, weight.shape[1]), x.device, (torch.bfloat16,))
    require(1 <= x.shape[0] <= MAX_ROWS, name, "x", f"has {x.shape[0]} rows, allowed are 1 to {MAX_ROWS}")
    return torch.empty(x.shape[0], n, dtype=dtype, device=x.device)


def _later_plans(weight: torch.Tensor, is_gated: bool) -> list[FewRowsPlan | None]:
    """Return the plans for other numbers of token rows, which later steps may have, so that their kernels are compiled
    together with this plan's."""
    return [_plan(rows, weight, is_gated) for rows in _TILE_ROWS] if is_collecting() else []


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gate: int,
            plans: Sequence[FewRowsPlan | None], pdl: bool | None) -> None:
    """Launch the kernel of the first plan; if launches are being collected, also those of the other plans."""
    (num_rows, k), n, device = x.shape, out.shape[1], x.device
    pdl = uses_pdl(device) if pdl is None else pdl
    # A large product still runs for microseconds when its token rows are complete: time enough for the next kernel to
    # start, and a kernel of adapters that reads the same token rows need not wait for the product. Behind a product
    # with a gate there is no kernel of adapters.
    late = gate == 0 and weight.numel() * weight.element_size() > SMALL_WEIGHT
    require(plans[0] is not None, "few_rows", "weight", f"has no plan with {num_rows} token rows: ask is_fastest first")
    for plan in plans:
        if plan is None:
            continue
        tiles = cdiv(n, plan.outputs)
        parts = counters = out  # unused, unless programs share the sums
        if plan.splits > 1:
            size = tiles * plan.splits * plan.outputs * plan.rows * (2 if gate else 1)
            parts = torch.empty(size, dtype=torch.float32, device=device)
            counters = counters_for(device, MIN_COUNTERS)
        _few_rows_kernel[(tiles, plan.splits)](
            _describe(x, plan.rows), _describe(weight, plan.outputs), out, parts, counters, out.stride(0), num_rows, n,
            k // COLUMNS.value, GATE=gate, ROWS=plan.rows, OUTPUTS=plan.outputs, STAGES=plan.num_stages,
            SPLITS=plan.splits, FETCH_REGS=FETCH_REGISTERS, LATE=late, PDL=pdl, num_warps=4, maxnreg=plan.registers,
            **pdl_options(pdl),
        )
        if late:
            note_product(x, parts)


def _describe(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Make a tensor descriptor with which the copy engine (TMA) reads a matrix; it writes zeros for what lies
    outside."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, COLUMNS.value], _LAYOUT)
