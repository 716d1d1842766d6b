"""Products of token rows with the experts they chose, in fixed shapes: nothing is read on the host.

A pair is one (token row, chosen expert). Each program takes a tile of pairs of one expert and a tile of its outputs. In
a small batch a program searches the ids for its pairs; otherwise the pairs are sorted by expert first. A pair's result
does not depend on other pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from outrider.kernels.activations import CLAMPED, limited_silu, silu_limit
from outrider.kernels.gpu.common import (
    FLOATS,
    add_product,
    cdiv,
    gated,
    limited,
    next_power_of_two,
    num_sms,
    pdl_options,
    refuse,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.elements.activation import gelu_tanh_mul, limited_silu_mul, relu2, silu_mul
from outrider.kernels.gpu.experts.biases import clamped_swiglu
from outrider.kernels.gpu.experts.pairs import (
    FEW_PAIRS,
    Pairs,
    find_few_pairs,
    find_sorted_tile,
    max_tiles,
    sort_pairs,
    sorted_tiles,
)
from outrider.kernels.gpu.experts.rows import MAX_PAIRS, expert_rows, mix_rows
from outrider.kernels.gpu.launch.triton_kernel import is_collecting, kernel
from outrider.kernels.moe import ExpertBiases

METHODS = ("rows", "few", "tiles", "library")
LIBRARY_PAIRS_PER_EXPERT = 64  # from here on a product is bound by arithmetic, and the library's is the faster one

_SILU, _GELU_TANH, _RELU2 = (tl.constexpr(i) for i in range(1, 4))
ACTIVATIONS = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "relu2": 3}
_COLUMNS = 1024
PROGRAMS_PER_SM = 8  # that multiply tiles of sorted pairs, each several where there are more


@triton.jit
def _load_weight(pointer, mask, FEW: tl.constexpr):
    if FEW:
        # Read once: it need not stay in the cache.
        return tl.load(pointer, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _multiply_tile(
    x, weight, out, expert, pairs, exists, output_tile, x_stride, expert_stride, weight_stride, out_stride, N,
    K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, FEW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Multiply BLOCK_M pairs of one expert with BLOCK_N of its outputs."""
    GATED: tl.constexpr = (ACTIVATION == _SILU) or (ACTIVATION == _GELU_TANH)
    row = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < N
    weight_row = weight + expert * expert_stride + row.to(tl.int64)[:, None] * weight_stride
    up_row = weight_row + N * weight_stride
    x_row = x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        if K % BLOCK_K == 0:
            x_mask, w_mask = exists[:, None], in_rows[:, None]
        else:
            x_mask, w_mask = exists[:, None] & (column < K), in_rows[:, None] & (column < K)
        value = tl.load(x_row + column, mask=x_mask, other=0.0)
        w = _load_weight(weight_row + column, w_mask, FEW)
        acc = add_product(acc, value, tl.trans(w))
        if GATED:
            w = _load_weight(up_row + column, w_mask, FEW)
            up = add_product(up, value, tl.trans(w))
    if GATED:
        if LIMIT > 0:
            acc, up = limited(acc, up, LIMIT)
        acc = gated(acc, up, ACTIVATION == _GELU_TANH)
    elif ACTIVATION == _RELU2:
        # Not a maximum with zero, which would turn NaN into a number.
        acc = tl.where(acc < 0, 0.0, acc * acc)
    mask = exists[:, None] & in_rows[None, :]
    out_row = out + pairs.to(tl.int64)[:, None] * out_stride
    tl.store(out_row + row[None, :], acc.to(out.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["P"])
def _few_pairs_kernel(
    x, weight, out, ids, x_stride, expert_stride, weight_stride, out_stride, P, N, K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Do what `_expert_kernel` does, for pairs that are not sorted by expert: each program searches for the pairs of
    its expert."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    expert, pairs, exists, is_tile = find_few_pairs(ids, tl.program_id(1), P, PAIRS, BLOCK_M)
    if is_tile:
        _multiply_tile(x, weight, out, expert, pairs, exists, tl.program_id(0), x_stride, expert_stride, weight_stride,
                       out_stride, N, K, PAIRS_PER_ROW, ACTIVATION, LIMIT, True, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def _multiply_sorted(
    x, weight, out, order, expert, first, last, output_tile, x_stride, expert_stride, weight_stride, out_stride, N,
    K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Multiply the tile of the sorted pairs at positions first to last - 1."""
    position = first + tl.arange(0, BLOCK_M)
    exists = position < last
    pairs = tl.load(order + position, mask=exists, other=0)
    _multiply_tile(x, weight, out, expert, pairs, exists, output_tile, x_stride, expert_stride, weight_stride,
                   out_stride, N, K, PAIRS_PER_ROW, ACTIVATION, LIMIT, False, BLOCK_M, BLOCK_N, BLOCK_K)


@kernel(do_not_specialize=["first_expert"])
def _expert_kernel(
    x, weight, out, order, ends, x_stride, expert_stride, weight_stride, out_stride, first_expert, E, N,
    K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, TALL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TALL_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a projection of every pair: out[pair] = activation(x[pair // PAIRS_PER_ROW] @ weight[expert of the
    pair].T), with weights [rows, K] and N outputs.

    With a gated activation weight rows 0 to N are the gate and the next N are what it gates. Weights are those of E
    experts from `first_expert` on; other pairs are left out. A fixed number of programs goes through the tiles in turn,
    because only the device knows how many tiles there are. All tiles of outputs for some pairs come before the next
    pairs, so programs that run together share a tile of x and read one expert's weights."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    tiles_end, tiles, start, end, size = sorted_tiles(ends, first_expert, E, EXPERTS, BLOCK_M, TALL_M)
    output_tiles = tl.cdiv(N, BLOCK_N)
    for place in range(tl.program_id(0), tl.sum(tiles, axis=0) * output_tiles, tl.num_programs(0)):
        expert, first, last = find_sorted_tile(place // output_tiles, tiles_end, tiles, start, end, size)
        if TALL_M > BLOCK_M:
            if last - first > BLOCK_M:
                _multiply_sorted(
                    x, weight, out, order, expert, first, last, place % output_tiles, x_stride, expert_stride,
                    weight_stride, out_stride, N, K, PAIRS_PER_ROW, ACTIVATION, LIMIT, TALL_M, BLOCK_N, TALL_K,
                )
            else:
                _multiply_sorted(
                    x, weight, out, order, expert, first, last, place % output_tiles, x_stride, expert_stride,
                    weight_stride, out_stride, N, K, PAIRS_PER_ROW, ACTIVATION, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K,
                )
        else:
            _multiply_sorted(
                x, weight, out, order, expert, first, last, place % output_tiles, x_stride, expert_stride,
                weight_stride, out_stride, N, K, PAIRS_PER_ROW, ACTIVATION, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K,
            )


@kernel
def _spread_kernel(x, place, out, x_stride, out_stride, width, K: tl.constexpr, COLUMNS: tl.constexpr,
                   PDL: tl.constexpr):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    for slot in tl.static_range(K):
        row = tl.load(place + token * K + slot).to(tl.int64)
        tl.store(out + row * out_stride + column, value, mask=inside)


@kernel
def _combine_kernel(
    made, weights, place, added, bias, ids, out, made_stride, added_stride, bias_stride, out_stride, width,
    K: tl.constexpr, HAS_PLACE: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for slot in tl.static_range(K):
        pair = token * K + slot
        row = pair
        weight = tl.load(weights + pair)
        if HAS_PLACE:
            row = tl.load(place + pair).to(tl.int64)
        value = tl.load(made + row * made_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            own = bias + tl.load(ids + pair) * bias_stride + column
            value += tl.load(own, mask=inside, other=0.0).to(tl.float32)
        total += weight * value
    if HAS_ADDED:
        total = total.to(out.dtype.element_ty).to(tl.float32)  # as if it had been stored
        total += tl.load(added + token * added_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class TileConfig:
    """Pairs, outputs and inputs per tile, and options of the compiler. A gated product has two tiles of outputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tall_m: int = 0  # pairs per tile of experts with more than block_m, where pairs are sorted; 0: block_m as well
    tall_k: int = 64  # inputs per tile there

    @property
    def most_pairs(self) -> int:
        """The most pairs (token row, expert) in one tile."""
        return self.tall_m or self.block_m


@lru_cache(maxsize=1024)
def tile_config(num_pairs: int, num_experts: int, n: int, is_gated: bool, sms: int,
                dtype: torch.dtype = torch.bfloat16) -> TileConfig:
    """Return the tile for these shapes, without reading ids. With few pairs per expert, reading weights takes all of
    the time, and narrow tiles spread the reads over all multiprocessors. With many, large tiles reuse the weights that
    they have read. Tiles of an expert with many more pairs than the others are tall."""
    if dtype == torch.float32:  # a tile's inputs are summed by themselves: as many in every tile, or bits would differ
        return replace(tile_config(num_pairs, num_experts, n, is_gated, sms), block_k=64, tall_k=64)
    rows = num_pairs / num_experts
    if rows <= 32:
        block_m = 16 if rows <= 8 else 32
        sizes = (32, 16) if is_gated else (64, 32, 16)
        block_n = next((size for size in sizes if min(num_pairs, num_experts) * n >= 2 * sms * size), sizes[-1])
        return TileConfig(block_m, block_n, 128, 4, 4, tall_m=64)
    if rows <= 128:
        return TileConfig(64, 64 if is_gated else 128, 64, 4, 4)
    return TileConfig(128, 64 if is_gated else 128, 64, 8, 3)


def spread(x: torch.Tensor, place: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """Copy token rows to the places of their pairs after sorting by expert: x [tokens, width] -> [pairs, width]. place
    [pairs] int32: the row of each pair in the result. Every token row is read once, while a gather would read it once
    per pair."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name, (num_tokens, width), num_pairs = "spread", x.shape, place.numel()
    require_tensor(name, "x", x, (None, None), place.device, FLOATS)
    require_tensor(name, "place", place, (num_pairs,), x.device, (torch.int32,))
    if num_tokens == 0 or num_pairs % num_tokens:
        refuse(name, "place", f"has {num_pairs} pairs of {num_tokens} tokens")
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    _spread_kernel[(num_tokens, cdiv(width, _COLUMNS))](
        x, place, out, x.stride(0), out.stride(0), width, K=num_pairs // num_tokens,
        COLUMNS=min(_COLUMNS, next_power_of_two(width)), PDL=pdl, num_warps=4, **pdl_options(pdl),
    )
    return out


def combine(
    made: torch.Tensor, weights: torch.Tensor, place: torch.Tensor | None = None, added: torch.Tensor | None = None,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None, *, pdl: bool | None = None,
) -> torch.Tensor:
    """Return each token row's weighted sum of its experts' results: made [pairs, width], weights [tokens, k] float32 ->
    [tokens, width]. The sum is in the order of k, with `added` [tokens, width] last. place: the row of each pair in
    `made`, if rows are not in the order of pairs. bias: (biases [experts, width], ids [tokens, k]): the chosen experts'
    biases are added to their results."""
    pdl = uses_pdl(made.device) if pdl is None else pdl
    name, (num_tokens, top_k), width = "combine", weights.shape, made.shape[1]
    require_tensor(name, "made", made, (num_tokens * top_k, width), weights.device, FLOATS)
    require_tensor(name, "weights", weights, (num_tokens, top_k), made.device, (torch.float32,), inner_contiguous=2)
    if place is not None:
        require_tensor(name, "place", place, (num_tokens * top_k,), made.device, (torch.int32,))
    if added is not None:
        require_tensor(name, "added", added, (num_tokens, width), made.device, (made.dtype,))
    own, ids = (made, weights) if bias is None else bias
    if bias is not None:
        require_tensor(name, "bias", own, (None, width), made.device, FLOATS)
        require_tensor(name, "ids", ids, (num_tokens, top_k), made.device, (torch.int64,), inner_contiguous=2)
    out = torch.empty(num_tokens, width, dtype=made.dtype, device=made.device)
    grid = (num_tokens, cdiv(width, _COLUMNS))
    last = made if added is None else added
    _combine_kernel[grid](
        made, weights, weights if place is None else place, last, own, ids, out, made.stride(0), last.stride(0),
        own.stride(0), out.stride(0), width, K=top_k, HAS_PLACE=place is not None, HAS_ADDED=added is not None,
        HAS_BIAS=bias is not None, COLUMNS=min(_COLUMNS, next_power_of_two(width)), PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )
    return out


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, added: torch.Tensor | None = None, biases: ExpertBiases | None = None, *,
    method: str | None = None, up_config: TileConfig | None = None, down_config: TileConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each token row's experts; see `kernels.moe.experts` for the arguments.

    method: "rows" (each pair by itself), "few" (each program searches for its pairs), "tiles" (pairs are sorted first),
    "library" (torch's grouped product on sorted rows), or None to choose by shapes.
    """
    name, device, (num_experts, hidden, width) = "experts", x.device, down.shape
    check_activation(name, activation, biases)
    rows = width if activation == "relu2" else 2 * width
    require_tensor(name, "x", x, (None, hidden), device, FLOATS)
    require_tensor(name, "gate_up", gate_up, (num_experts, rows, hidden), device, (x.dtype,))
    require_tensor(name, "down", down, (num_experts, hidden, width), device, (x.dtype,))
    require_tensor(name, "ids", ids, (x.shape[0], None), device, (torch.int64,), inner_contiguous=2)
    require_tensor(name, "weights", weights, ids.shape, device, (torch.float32,), inner_contiguous=2)
    if method is not None and method not in METHODS:
        refuse(name, "method", f"is {method!r}, known are {list(METHODS)}")
    if ids.numel() == 0:
        return torch.empty_like(x) if added is None else added
    if activation == CLAMPED:  # in three steps: no kernel adds biases between the products
        pairs = None if ids.numel() <= FEW_PAIRS else sort_pairs(ids, num_experts, pdl=pdl)
        projected = _product(x, gate_up, ids, pairs, ids.shape[1], rows, None, up_config, pdl)
        made = activate_pairs(projected, ids, activation, biases, pdl)
        made = _product(made, down, ids, pairs, 1, hidden, None, down_config, pdl)
        return combine(made, weights, added=added, bias=bias_of_down(biases, ids), pdl=pdl)
    if method is None:
        method = choose_method(ids.numel(), gate_up, down)
        for other in methods_of_class(ids.numel(), gate_up, down) - {method} if is_collecting() else ():
            experts(x, ids, weights, gate_up, down, activation, added, method=other, pdl=pdl)
    if method == "rows":
        return mix_rows(expert_rows(x, gate_up, ids, width, activation_code(activation), pdl), down, ids, weights, pdl,
                        added=added)
    pairs = None if method == "few" else sort_pairs(ids, num_experts, pdl=pdl)
    if method == "library":
        assert pairs is not None
        return combine(_library(x, pairs, gate_up, down, activation), weights, pairs.place, added)
    made = _product(x, gate_up, ids, pairs, ids.shape[1], width, activation, up_config, pdl)
    return combine(_product(made, down, ids, pairs, 1, hidden, None, down_config, pdl), weights, added=added)


def exact_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str, added: torch.Tensor | None = None, biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Compute `experts` without the library, whose order of additions is unspecified. A pair's result is one chain of
    additions in a tile of any size, rounded at the same places."""
    method = "few" if ids.numel() <= FEW_PAIRS else "tiles"
    return experts(x, ids, weights, gate_up, down, activation, added, biases, method=method)


def check_activation(name: str, activation: str, biases: ExpertBiases | None) -> None:
    if activation not in ACTIVATIONS and activation != CLAMPED and silu_limit(activation) is None:
        refuse(name, "activation", f"is {activation!r}, known are {[*ACTIVATIONS, CLAMPED, limited_silu(10.0)][1:]}")
    if biases is not None and activation != CLAMPED:
        refuse(name, "biases", f"are served with the activation {CLAMPED!r} alone")


def activation_code(activation: str | None) -> tuple[int, float]:
    """Return (the number by which the kernels know the activation, its limit); the limit is 0 if it has none."""
    limit = None if activation is None else silu_limit(activation)
    return (ACTIVATIONS[activation], 0.0) if limit is None else (ACTIVATIONS["silu"], limit)


def activate_pairs(projected: torch.Tensor, ids: torch.Tensor, activation: str, biases: ExpertBiases | None,
                   pdl: bool) -> torch.Tensor:
    """Apply the activation to pairs' first projections [pairs, gate | up] in a separate kernel. Returns [pairs,
    width]."""
    if (limit := silu_limit(activation)) is not None:
        return limited_silu_mul(projected, limit, pdl=pdl)
    return clamped_swiglu(projected, ids, biases and biases.gate_up, pdl=pdl)


def bias_of_down(biases: ExpertBiases | None, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the biases of the experts' second projection in the form that `combine` takes."""
    return None if biases is None or biases.down is None else (biases.down, ids)


def choose_method(num_pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> str:
    if num_pairs <= MAX_PAIRS:
        return "rows"
    if num_pairs <= FEW_PAIRS:
        return "few"
    is_large = num_pairs >= LIBRARY_PAIRS_PER_EXPERT * down.shape[0]
    return "library" if is_large and _library_serves(gate_up, down) else "tiles"


def methods_of_class(num_pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> set[str]:
    """Return the methods that `experts` would choose for any number of pairs up to the same power of two. Their tiles
    are compiled together with this call's, before a step needs them."""
    most = next_power_of_two(num_pairs)
    return {choose_method(pairs, gate_up, down) for pairs in (most // 2 + 1, num_pairs, most)}


def _product(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, pairs: Pairs | None, pairs_per_row: int, n: int,
    activation: str | None, config: TileConfig | None, pdl: bool,
) -> torch.Tensor:
    """Multiply token rows with the weights of their chosen experts. Row p of the result [pairs, n] is pair p, made from
    row p // pairs_per_row of x."""
    # By powers of two: a batch of another size is no reason to compile anew.
    config = config or tile_config(next_power_of_two(ids.numel()), weight.shape[0], n, weight.shape[1] == 2 * n,
                                   num_sms(x.device), x.dtype)
    out = torch.empty(ids.numel(), n, dtype=x.dtype, device=x.device)
    multiply_pairs(x, weight, ids, pairs, pairs_per_row, out, activation, config, pdl)
    return out


def product_of_pairs(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, pairs: Pairs | None, pairs_per_row: int, n: int,
    pdl: bool,
) -> torch.Tensor:
    """Multiply token rows with the weights of their chosen experts, without an activation. Row p of the result [pairs,
    n] is pair p, made from row p // pairs_per_row of x."""
    return _product(x, weight, ids, pairs, pairs_per_row, n, None, None, pdl)


def multiply_pairs(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, pairs: Pairs | None, pairs_per_row: int,
    out: torch.Tensor, activation: str | None, config: TileConfig, pdl: bool, first_expert: int = 0,
) -> None:
    """Fill the rows of out [pairs, n] whose experts are in `weight`, which holds the experts from `first_expert` on. It
    may hold only some of all experts if pairs are sorted."""
    (num_pairs, n), num_experts, output_tiles = out.shape, weight.shape[0], cdiv(out.shape[1], config.block_n)
    code, limit = activation_code(activation)
    strides = (x.stride(0), weight.stride(0), weight.stride(1), out.stride(0))
    same = {"K": weight.shape[2], "PAIRS_PER_ROW": pairs_per_row, "ACTIVATION": code, "LIMIT": limit,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "PDL": pdl,
            "num_warps": config.num_warps, "num_stages": config.num_stages, **pdl_options(pdl)}
    if pairs is None:
        _few_pairs_kernel[(output_tiles, num_pairs)](x, weight, out, ids, *strides, num_pairs, n,
                                                     PAIRS=next_power_of_two(num_pairs), **same)
        return
    tiles = output_tiles * max_tiles(num_pairs, num_experts, config.most_pairs)
    _expert_kernel[(min(tiles, PROGRAMS_PER_SM * num_sms(x.device)),)](
        x, weight, out, pairs.order, pairs.ends, *strides, first_expert, num_experts, n,
        EXPERTS=next_power_of_two(num_experts), TALL_M=config.most_pairs,
        TALL_K=config.tall_k if config.tall_m else config.block_k, **same,
    )


def _library(
    x: torch.Tensor, pairs: Pairs, gate_up: torch.Tensor, down: torch.Tensor, activation: str
) -> torch.Tensor:
    """Multiply with torch's grouped product: [pairs, hidden] in sorted order."""
    projected = torch._grouped_mm(spread(x, pairs.place), gate_up.transpose(1, 2), offs=pairs.ends)
    match activation:
        case "silu":
            made = silu_mul(projected)
        case "gelu_pytorch_tanh":
            made = gelu_tanh_mul(projected)
        case "relu2":
            made = relu2(projected)
        case _:
            made = activate_pairs(projected, pairs.order, activation, None, False)
    result: torch.Tensor = torch._grouped_mm(made, down.transpose(1, 2), offs=pairs.ends)
    return result


@lru_cache(maxsize=16)
def _has_grouped_product(device: torch.device) -> bool:
    """Whether torch's grouped product is one kernel on this device. Elsewhere it is a loop, for which torch reads the
    offsets on the host."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _library_serves(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    is_aligned = all(size % 8 == 0 for size in (*gate_up.shape[1:], *down.shape[1:]))
    return gate_up.dtype == torch.bfloat16 and is_aligned and _has_grouped_product(gate_up.device)
