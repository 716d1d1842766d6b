"""Linear layers in exact mode: a token row has the same bits for every number of token rows.

Each output is one chain of additions over the inner dimension, from its first column to its last, on tensor cores that
take 16 columns at a time. Tiles differ in their token rows, outputs, first operand and loads ahead; none of this
changes the chain (docs/decisions.md has what was compared on an H200). A deep and narrow weight has several chains,
over ranges of columns that depend only on its shape; their sums are added in order. With few token rows each chain has
programs of its own; with many, one program goes through all chains. Hopper GPUs have another kernel for many token
rows, with the same chains. Activations are separate operations after rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, arrive, counters_for
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.elements.activation import gelu_tanh_mul, relu2, silu_mul
from outrider.kernels.gpu.hopper.products import HOPPER_TILES, launch_product, takes_product
from outrider.kernels.gpu.launch.triton_kernel import is_collecting, kernel
from outrider.kernels.gpu.linear.thin import is_small, prefetch_rows

HOPPER_ROWS = 512  # token rows from which on the kernel for Hopper cards is faster
_GROUP = 8  # tiles of token rows that pass by the same weights while those are in the cache


@triton.jit
def _load_tile(at, exists, is_there, WHOLE: tl.constexpr):
    """Load the columns that are there of the rows that exist. The rest is zero, which changes no sum."""
    return tl.load(at, mask=exists[:, None] if WHOLE else exists[:, None] & is_there[None, :], other=0.0)


@triton.jit
def _chain(
    x_at, w_at, in_tokens, in_rows, begin, end, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):
    """Return the sums over columns `begin` to `end`. The pointers point to the tile of columns at `begin`."""
    column = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        w = _load_tile(w_at, in_rows, start + column < K, K % BLOCK_K == 0)
        value = _load_tile(x_at, in_tokens, start + column < K, K % BLOCK_K == 0)
        if WEIGHT_FIRST:
            acc = tl.dot(w, tl.trans(value), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, tl.trans(w), acc, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    return acc


@kernel(do_not_specialize=["M"])
def _tile_kernel(
    x, weight, bias, out, parts, counters, x_stride, weight_stride, out_stride, M, N, K: tl.constexpr,
    CHAIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply a tile of token rows with a tile of the weight. WEIGHT_FIRST: the weight is the first operand, of which
    tensor cores take 64 rows, even if there are few token rows. SHARED: one program for each chain of CHAIN columns,
    and all token rows in one tile; the last of them adds up."""
    release_dependents(PDL)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * n_tiles) * GROUP
    height = tl.minimum(m_tiles - first, GROUP)
    inside = program % (GROUP * n_tiles)
    token = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    in_tokens, in_rows = token < M, row < N
    begin = tl.program_id(1) * CHAIN
    if PDL:
        prefetch_rows(weight + begin, row, weight_stride, N, K)
    wait_for_inputs(PDL)
    column = tl.arange(0, BLOCK_K)
    x_at = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    w_at = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    if CHAIN >= K:
        total = _chain(x_at, w_at, in_tokens, in_rows, 0, K, K, BLOCK_M, BLOCK_N, BLOCK_K, WEIGHT_FIRST)
    elif SHARED:
        total = _chain(x_at + begin, w_at + begin, in_tokens, in_rows, begin, tl.minimum(begin + CHAIN, K), K,
                       BLOCK_M, BLOCK_N, BLOCK_K, WEIGHT_FIRST)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, K, CHAIN):
            total += _chain(x_at + start, w_at + start, in_tokens, in_rows, start, tl.minimum(start + CHAIN, K), K,
                            BLOCK_M, BLOCK_N, BLOCK_K, WEIGHT_FIRST)
    if WEIGHT_FIRST:
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
        if HAS_BIAS:
            total += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        tl.store(out + token.to(tl.int64)[:, None] * out_stride + row[None, :], total.to(out.dtype.element_ty),
                 mask=inside_out)


@dataclass(frozen=True)
class ExactTile:
    """Token rows, outputs and columns per tile, and options of the compiler."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    weight_first: bool = False


@dataclass(frozen=True)
class _ManyRows:
    """A tile for many token rows, and the time that one tile takes on an H200."""

    tile: ExactTile
    per_sm: int  # tiles that a multiprocessor holds
    seconds: float  # relative time until a full multiprocessor is done
    alone: float  # relative time of one tile


_SAMPLED_ROWS = (1, 64, *range(128, 4096, 128))  # numbers of token rows whose tiles are compiled at start-up
_NARROW = 3200  # outputs up to which few token rows leave multiprocessors idle unless chains are shared out
_MAX_CHAINS, _SHORTEST_CHAIN, _CHAIN_STEP = 3, 1024, 256  # three fit on an H200 at once with 64 token rows
_FEW_ROWS = 64  # token rows up to which each chain has its own programs
_WIDE = 16384  # outputs from which on few token rows have more tiles than the card has room for
_MANY_ROWS = (
    _ManyRows(ExactTile(256, 128, 64, 8, 3), 1, 57.7, 57.7),
    _ManyRows(ExactTile(128, 128, 64, 8, 4), 1, 33.0, 33.0),
    _ManyRows(ExactTile(64, 128, 64, 4, 4), 2, 37.0, 26.5),
    _ManyRows(ExactTile(64, 64, 128, 4, 3), 2, 19.0, 14.0),
)


def exact_tile(num_rows: int, n: int, k: int, sms: int, itemsize: int) -> ExactTile:
    """Return the fastest tile for these sizes on an H200."""
    if itemsize > 2:
        return ExactTile(32, 32, 32, 4, 3)
    if num_rows <= 16:
        if n >= _WIDE and k < 4096:
            return ExactTile(16, 128, 128, 4, 3, weight_first=True)
        return ExactTile(16, 64, 128, 4, 4, weight_first=True) if n >= 6000 else ExactTile(16, 32, 256, 4, 4)
    if num_rows <= 64:
        if n >= _WIDE:
            return ExactTile(64, 128, 64, 4, 4)
        return ExactTile(64, 64, 128, 4, 4) if n >= 6000 else ExactTile(64, 32, 128, 4, 4)
    # With several chains a tile has two sums for each output in registers: the largest has no room for them.
    fitting = _MANY_ROWS if chain_columns(n, k) == k else _MANY_ROWS[1:]
    return min(fitting, key=lambda choice: _cost(choice, num_rows, n, sms)).tile


def chain_columns(n: int, k: int) -> int:
    """Return how many columns each chain of additions of a weight [n, k] has; k if one chain is enough."""
    if n > _NARROW:
        return k
    chains = min(_MAX_CHAINS, k // _SHORTEST_CHAIN)
    return k if chains < 2 else cdiv(cdiv(k, chains), _CHAIN_STEP) * _CHAIN_STEP


def _cost(choice: _ManyRows, num_rows: int, n: int, sms: int) -> float:
    tiles = cdiv(num_rows, choice.tile.block_m) * cdiv(n, choice.tile.block_n)
    waves, rest = divmod(tiles, sms * choice.per_sm)
    return waves * choice.seconds + (0 if rest == 0 else choice.alone if rest <= sms else choice.seconds)


def exact_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None,
    tile: ExactTile | None = None, chain: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Multiply x [rows, k] with weight [n, k] transposed, plus bias [n]; any number of rows. chain: columns of each
    chain."""
    name, device, num_rows = "exact_linear", x.device, x.shape[0]
    require_tensor(name, "x", x, (None, None), device, FLOATS)
    n, k = weight.shape
    require_tensor(name, "weight", weight, (n, x.shape[1]), device, (x.dtype,))
    if bias is not None:
        require_tensor(name, "bias", bias, (n,), device, FLOATS)
    out = torch.empty(num_rows, n, dtype=out_dtype or x.dtype, device=device)
    if num_rows == 0:
        return out
    pdl = is_small(weight) and uses_pdl(device) if pdl is None else pdl
    chain = min(k, chain_columns(n, k) if chain is None else chain)
    sizes = n, k, num_sms(device), x.element_size()
    on_hopper = tile is None and takes_product(x, weight, bias, out.dtype)
    if on_hopper and num_rows >= HOPPER_ROWS:
        launch_product(x, weight, out, chain)
    else:
        tile = tile or exact_tile(num_rows, *sizes)
        _launch(x, weight, bias, out, tile, chain, _is_shared(num_rows, tile), pdl)
    if is_collecting():  # later steps have other numbers of token rows
        for each_tile in HOPPER_TILES[chain < k :] if on_hopper else ():
            launch_product(x, weight, out, chain, each_tile)
        tiles = [(exact_tile(rows, *sizes), rows) for rows in _SAMPLED_ROWS]
        for each, is_shared in {(each, _is_shared(rows, each)) for each, rows in tiles}:
            _launch(x, weight, bias, out, each, chain, is_shared, pdl)
    return out


def _is_shared(num_rows: int, tile: ExactTile) -> bool:
    """Whether each chain has programs of its own, which is so if all token rows fit into one tile."""
    return num_rows <= min(_FEW_ROWS, tile.block_m)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: ExactTile,
            chain: int, is_shared: bool, pdl: bool) -> None:
    num_rows, (n, k) = x.shape[0], weight.shape
    is_shared = is_shared and chain < k
    chains = cdiv(k, chain) if is_shared else 1
    parts = counters = out  # unused, unless programs share the sums
    if is_shared:
        parts = torch.empty(chains * num_rows * n, dtype=torch.float32, device=x.device)
        counters = counters_for(x.device, MIN_COUNTERS)
    require(chain == k or chain % tile.block_k == 0, "exact_linear", "chain", f"is no multiple of {tile.block_k}")
    _tile_kernel[(cdiv(num_rows, tile.block_m) * cdiv(n, tile.block_n), chains)](
        x, weight, x if bias is None else bias, out, parts, counters, x.stride(0), weight.stride(0), out.stride(0),
        num_rows, n, K=k, CHAIN=chain, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, GROUP=_GROUP, WEIGHT_FIRST=tile.weight_first, SHARED=is_shared,
        HAS_BIAS=bias is not None, PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(pdl),
    )


def exact_linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return exact_linear(x, weight, out_dtype=torch.float32)


def exact_gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up of the product; weight [2 * n, k] holds the gate rows, then the up rows."""
    require(activation in ("silu", "gelu_pytorch_tanh"), "exact_gated_linear", "activation", f"is {activation!r}")
    product = exact_linear(x, weight)
    return silu_mul(product) if activation == "silu" else gelu_tanh_mul(product)


def exact_relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return relu2(exact_linear(x, weight))
