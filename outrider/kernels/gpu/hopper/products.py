"""The Hopper kernel of exact mode's linear layers for many token rows.

A program stays on its multiprocessor and computes every n-th tile of the result. One warp fetches tiles of token rows
and of the weight with the bulk copy engine into a ring; two groups of four warps multiply, 64 token rows each. An
output is the chain of additions that `linear/exact_linear.py` describes, or the sum of several chains in order, so its
bits are those of any other tile.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from outrider.kernels.gpu.common import cdiv, num_sms
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import is_hopper, make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel

ROWS = gl.constexpr(64)  # token rows of one group of warps
COLUMNS = gl.constexpr(64)  # of the inner dimension, of one tile: 128 bytes, the widest row that is swizzled
GROUP = gl.constexpr(8)  # tiles of token rows that pass by the same weights while those are in the cache
REGISTERS, FETCH_REGISTERS, MULTIPLY_REGISTERS = 168, 40, 232


@gluon.jit
def _place(index, M, N, BLOCK_N: gl.constexpr):
    """Return (first token row, first output) of a tile."""
    m_tiles, n_tiles = gl.cdiv(M, 2 * ROWS), gl.cdiv(N, BLOCK_N)
    first = index // (GROUP * n_tiles) * GROUP
    height = gl.minimum(m_tiles - first, GROUP)
    inside = index % (GROUP * n_tiles)
    return (first + inside % height) * (2 * ROWS), inside // height * BLOCK_N


@gluon.jit
def _fetch(
    x_tiles, w_tiles, ring, M, N, num_tiles,
    K: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    rows, weights, ready, free = ring
    turn = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token, output = _place(index, M, N, BLOCK_N)
        for start in range(0, K, COLUMNS):
            slot = turn % STAGES
            mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(slot), (2 * ROWS + BLOCK_N) * COLUMNS * 2)
            tma.async_copy_global_to_shared(x_tiles, [token, start], ready.index(slot), rows.index(slot * 2))
            tma.async_copy_global_to_shared(x_tiles, [token + ROWS, start], ready.index(slot), rows.index(slot * 2 + 1))
            tma.async_copy_global_to_shared(w_tiles, [output, start], ready.index(slot), weights.index(slot))
            turn += 1


@gluon.jit
def _chain(
    turn, columns, ring, GROUP_INDEX: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """Return one chain of additions: the sums over `columns` tiles of the inner dimension. Each product is started
    before the previous one has ended."""
    rows, weights, ready, free = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    mbarrier.wait(ready.index(turn % STAGES), (turn // STAGES) & 1)
    acc = warpgroup_mma(rows.index(turn % STAGES * 2 + GROUP_INDEX), weights.index(turn % STAGES).permute((1, 0)), acc,
                        is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    for at in range(turn + 1, turn + columns):
        slot = at % STAGES
        mbarrier.wait(ready.index(slot), (at // STAGES) & 1)
        acc = warpgroup_mma(rows.index(slot * 2 + GROUP_INDEX), weights.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((at - 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((turn + columns - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _multiply(
    out, out_stride, ring, M, N, num_tiles, GROUP_INDEX: gl.constexpr, K: gl.constexpr, CHAIN: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row = GROUP_INDEX * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    turn = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_token, first_output = _place(index, M, N, BLOCK_N)
        if CHAIN >= K:
            total = _chain(turn, K // COLUMNS, ring, GROUP_INDEX, BLOCK_N, STAGES)
            turn += K // COLUMNS
        else:
            total = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
            for start in range(0, K, CHAIN):
                columns = gl.minimum(CHAIN, K - start) // COLUMNS
                total += _chain(turn, columns, ring, GROUP_INDEX, BLOCK_N, STAGES)
                turn += columns
        token, output = first_token + row, first_output + column
        at = out + token.to(gl.int64)[:, None] * out_stride + output[None, :]
        gl.store(at, total.to(out.dtype.element_ty), mask=(token < M)[:, None] & (output < N)[None, :])


@TritonKernel
@gluon.jit(do_not_specialize=["M"])
def _product_kernel(
    x_tiles, w_tiles, out, out_stride, M, N, K: gl.constexpr, CHAIN: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, FETCH_REGS: gl.constexpr, MULTIPLY_REGS: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, COLUMNS], layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, COLUMNS], layout)
    ring = (rows, weights, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    fence_async_shared()
    barrier()
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N)
    gl.warp_specialize(
        [
            (_multiply, (out, out_stride, ring, M, N, num_tiles, 0, K, CHAIN, BLOCK_N, STAGES)),
            (_multiply, (out, out_stride, ring, M, N, num_tiles, 1, K, CHAIN, BLOCK_N, STAGES)),
            (_fetch, (x_tiles, w_tiles, ring, M, N, num_tiles, K, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [MULTIPLY_REGS, FETCH_REGS],
    )


@dataclass(frozen=True)
class HopperTile:
    """A tile of 128 token rows."""

    block_n: int  # outputs
    num_stages: int
    seconds: float  # of one tile, relative to the wide one


WIDE, NARROW = HOPPER_TILES = HopperTile(256, 4, 1.0), HopperTile(128, 6, 0.55)


def takes_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the kernel serves this product, for any number of token rows."""
    return (
        bias is None and x.dtype == out_dtype == torch.bfloat16 and is_hopper(x.device)
        and x.shape[1] % COLUMNS.value == 0
        and all(each.stride(1) == 1 and each.stride(0) % 8 == 0 and each.data_ptr() % 16 == 0 for each in (x, weight))
    )


def choose_tile(num_rows: int, n: int, k: int, chain: int, sms: int) -> HopperTile:
    """Return the fastest tile. With several chains a tile keeps two sums for each output in registers, so it is
    narrow."""
    if chain < k:
        return NARROW
    return min(HOPPER_TILES, key=lambda tile: tile.seconds * cdiv(cdiv(num_rows, 128) * cdiv(n, tile.block_n), sms))


def launch_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, chain: int,
                   tile: HopperTile | None = None) -> None:
    """Launch the kernel. `exact_linear` has checked the arguments, and they fit this kernel."""
    num_rows, (n, k) = x.shape[0], weight.shape
    sms = num_sms(x.device)
    tile = tile or choose_tile(num_rows, n, k, chain, sms)
    num_tiles = cdiv(num_rows, 128) * cdiv(n, tile.block_n)
    _product_kernel[(min(num_tiles, sms),)](
        _describe(x, ROWS.value), _describe(weight, tile.block_n), out, out.stride(0), num_rows, n, K=k, CHAIN=chain,
        BLOCK_N=tile.block_n, STAGES=tile.num_stages, FETCH_REGS=FETCH_REGISTERS, MULTIPLY_REGS=MULTIPLY_REGISTERS,
        num_warps=4, maxnreg=REGISTERS,
    )


def _describe(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Make a tensor descriptor with which the copy engine (TMA) reads a matrix; it writes zeros for what lies
    outside."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, COLUMNS.value],
                            gl.NVMMASharedLayout(128, 16, rank=2))
