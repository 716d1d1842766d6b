"""Linear layers for exact mode: a token row has the same bits for every number of token rows.

Each output is a chain of additions over the inner dimension, from its first column to its last, on tensor cores that
take 16 columns at a time. Tiles differ in token rows, outputs, in which of the two is the first operand, and in how far
ahead they load; none of this changes the chain. Weights that are deep and narrow have a chain for each of a few equal
parts of the inner dimension, as many as their shape says, and the parts are added in order: programs of their own
compute them for few token rows, one program for many. Activations come after rounding, as operations of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.activation import gelu_tanh_mul, relu2, silu_mul
from outrider.kernels.triton.attention import MIN_COUNTERS, arrive, counters_for
from outrider.kernels.triton.common import (
    FLOATS,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.triton.launch import is_collecting, kernel
from outrider.kernels.triton.thin_linear import is_small, prefetch_rows

MAX_SPLIT_ROWS = 256  # token rows up to which parts have programs of their own
_GROUP = 8  # tiles of token rows that pass by the same weights while those are in the cache


@triton.jit
def _load_tile(at, exists, is_there, WHOLE: tl.constexpr):
    """Rows that exist, and of them the columns that are there; zeros elsewhere, which change no sum."""
    return tl.load(at, mask=exists[:, None] if WHOLE else exists[:, None] & is_there[None, :], other=0.0)


@kernel(do_not_specialize=["M"])
def _tile_kernel(
    x, weight, bias, out, scratch, counters, x_stride, weight_stride, out_stride, M, N, K: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WEIGHT_FIRST: the weight is the first operand, which tensor cores take 64 rows of, however few token rows are.
    SPLIT: every part of the inner dimension has a program of its own, and the last to end adds them up."""
    release_dependents(PDL)
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * n_tiles) * GROUP
    height = tl.minimum(m_tiles - first, GROUP)
    inside = program % (GROUP * n_tiles)
    token = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    in_tokens, in_rows = token < M, row < N
    if PDL:
        prefetch_rows(weight, row, weight_stride, N, K)
    wait_for_inputs(PDL)
    x_row = x + token.to(tl.int64)[:, None] * x_stride
    w_row = weight + row.to(tl.int64)[:, None] * weight_stride
    at = token.to(tl.int64)[:, None] * N + row[None, :]
    mask = in_tokens[:, None] & in_rows[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    is_last = True
    if PARTS == 1:
        total = _chain(x_row, w_row, in_tokens, in_rows, 0, K, K % BLOCK_K == 0, BLOCK_M, BLOCK_N, BLOCK_K,
                       WEIGHT_FIRST)  # fmt: skip
    elif SPLIT:
        part = tl.program_id(1)
        own = _chain(x_row, w_row, in_tokens, in_rows, part * (K // PARTS), (part + 1) * (K // PARTS), True, BLOCK_M,
                     BLOCK_N, BLOCK_K, WEIGHT_FIRST)  # fmt: skip
        tl.store(scratch + part.to(tl.int64) * M * N + at, own, mask=mask)
        is_last = arrive(counters + program, PARTS)
        if is_last:
            for _ in tl.static_range(PARTS):
                # Parts come from other multiprocessors: they are read where all of them write.
                total += tl.load(scratch + at, mask=mask, other=0.0, cache_modifier=".cg")
                at += M.to(tl.int64) * N
    else:
        for part in range(PARTS):
            total += _chain(x_row, w_row, in_tokens, in_rows, part * (K // PARTS), (part + 1) * (K // PARTS), True,
                            BLOCK_M, BLOCK_N, BLOCK_K, WEIGHT_FIRST)  # fmt: skip
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        tl.store(out + token.to(tl.int64)[:, None] * out_stride + row[None, :], total.to(out.dtype.element_ty),
                 mask=mask)  # fmt: skip


@triton.jit
def _chain(
    x_row, w_row, in_tokens, in_rows, begin, end, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """Sums of products over columns [begin, end), in order: [BLOCK_M, BLOCK_N] float32."""
    acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        w = _load_tile(w_row + column[None, :], in_rows, column < end, WHOLE)
        value = _load_tile(x_row + column[None, :], in_tokens, column < end, WHOLE)
        if WEIGHT_FIRST:
            acc = tl.dot(w, tl.trans(value), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, tl.trans(w), acc, input_precision="ieee")
    return tl.trans(acc) if WEIGHT_FIRST else acc


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
    """A tile for many token rows, with what one costs on an H200."""

    tile: ExactTile
    per_sm: int  # tiles that a multiprocessor holds
    seconds: float  # relative time until a full multiprocessor is done
    alone: float  # relative time of one tile


_SAMPLED_ROWS = (1, 64, *range(128, 4096, 128))  # numbers of token rows whose tiles are compiled at start-up
_WIDE = 16384  # outputs from which on few token rows have more tiles than the card has room for
_MANY_ROWS = (
    _ManyRows(ExactTile(256, 128, 64, 8, 3), 1, 57.7, 57.7),
    _ManyRows(ExactTile(128, 128, 64, 8, 4), 1, 33.0, 33.0),
    _ManyRows(ExactTile(64, 128, 64, 4, 4), 2, 37.0, 26.5),
    _ManyRows(ExactTile(64, 64, 128, 4, 3), 2, 19.0, 14.0),
)


def exact_parts(n: int, k: int) -> int:
    """Parts of the inner dimension, by the weight's shape alone: more where its outputs do not fill the card."""
    parts = 1 if n > 4096 or k < 4096 else 4 if k >= 8192 else 2
    return parts if k % (parts * 256) == 0 else 1


def exact_tile(num_rows: int, n: int, k: int, sms: int, itemsize: int) -> ExactTile:
    """The fastest tile for these sizes on an H200."""
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
    if exact_parts(n, k) > 1 and num_rows <= MAX_SPLIT_ROWS:
        return ExactTile(64, 128, 64, 4, 4)
    # The sums of several parts take the registers of the largest tile.
    choices = _MANY_ROWS if exact_parts(n, k) == 1 else _MANY_ROWS[1:]
    return min(choices, key=lambda choice: _cost(choice, num_rows, n, sms)).tile


def _cost(choice: _ManyRows, num_rows: int, n: int, sms: int) -> float:
    tiles = triton.cdiv(num_rows, choice.tile.block_m) * triton.cdiv(n, choice.tile.block_n)
    waves, rest = divmod(tiles, sms * choice.per_sm)
    return waves * choice.seconds + (0 if rest == 0 else choice.alone if rest <= sms else choice.seconds)


def exact_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None,
    tile: ExactTile | None = None, parts: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n]; any number of rows. parts: those of the inner
    dimension, whose number changes the bits."""
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
    sizes = n, k, num_sms(device), x.element_size()
    parts = exact_parts(n, k) if parts is None else parts
    _launch(x, weight, bias, out, tile or exact_tile(num_rows, *sizes), parts, num_rows <= MAX_SPLIT_ROWS, pdl)
    if is_collecting():  # later steps have other numbers of token rows
        for rows in _SAMPLED_ROWS:
            _launch(x, weight, bias, out, exact_tile(rows, *sizes), parts, rows <= MAX_SPLIT_ROWS, pdl)
    return out


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: ExactTile,
            parts: int, is_split: bool, pdl: bool) -> None:
    num_rows, (n, k), scratch, counters = x.shape[0], weight.shape, out, out
    num_tiles, is_split = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(n, tile.block_n), is_split and parts > 1
    if is_split:
        scratch = torch.empty(parts, num_rows, n, dtype=torch.float32, device=x.device)
        counters = counters_for(x.device, max(MIN_COUNTERS, next_power_of_two(num_tiles)))
    _tile_kernel[(num_tiles, parts if is_split else 1)](
        x, weight, x if bias is None else bias, out, scratch, counters, x.stride(0), weight.stride(0), out.stride(0),
        num_rows, n, K=k, PARTS=parts, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=_GROUP,
        WEIGHT_FIRST=tile.weight_first, SPLIT=is_split, HAS_BIAS=bias is not None, PDL=pdl, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **pdl_options(pdl),
    )  # fmt: skip


def exact_linear_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return exact_linear(x, weight, out_dtype=torch.float32)


def exact_gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of the product: weight [2 * n, k] holds gate rows, then up rows."""
    require(activation in ("silu", "gelu_pytorch_tanh"), "exact_gated_linear", "activation", f"is {activation!r}")
    product = exact_linear(x, weight)
    return silu_mul(product) if activation == "silu" else gelu_tanh_mul(product)


def exact_relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return relu2(exact_linear(x, weight))
