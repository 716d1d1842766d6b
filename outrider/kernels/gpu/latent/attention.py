"""Attention over the latent cache in flat token space: over whole contexts, or over positions that an indexer chose.

All heads of a token row share one cache entry per position, so the heads are the rows of the matrix products. One
program serves some heads of a tile of token rows and one split of their positions; a second kernel merges the splits of
each head. On Hopper GPUs `hopper/latent_decode.py` computes the splits of usual shapes. If token rows of a tile belong
to different requests, the program serves one request after the other, so tiles need no plan. Contexts are read on the
device; sizes that the host knows only set the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.attention.core import add_sinks, no_sums, weigh_scores
from outrider.kernels.gpu.common import (
    LOG2E,
    cdiv,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.hopper.latent import can_attend
from outrider.kernels.gpu.hopper.latent_decode import launch_splits as launch_hopper_splits
from outrider.kernels.gpu.latent.checks import check_latents
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.fp8 import fit_latent_queries, load_halves
from outrider.kernels.latent import TokenContexts

# Rows of a program's products. With 64, some tiles of Triton 3.6 read memory that is not theirs on a card. The cause is
# not known: `tests/kernels/descriptors.py` finds no wrong descriptor in tiles of 64 rows, but cannot follow addresses
# that are chosen while the kernel runs.
MAX_ROWS = 32
MOST_SPLITS = 64  # of one token row
HOPPER_SPLIT = 64  # least positions of a split there; of long contexts, splits have at least twice as many
FEW_TOKENS = 16  # up to here short splits pay, since multiprocessors would be idle
LEAST_INNER = tl.constexpr(16)  # columns that a product sums over: matrix instructions take no fewer
_INTS = ["page_table", "request_of", "first", "stop", "positions", "sinks"]
_VARYING = ["num_tokens", "max_count", "num_splits", "min_split"]


@dataclass(frozen=True)
class LatentConfig:
    """Positions per tile, token rows per tile, positions per split, and options of the compiler."""

    block_n: int
    q_tile: int
    min_split: int
    num_warps: int
    num_stages: int


def latent_config(num_tokens: int, num_heads: int, width: int, itemsize: int, *, is_dense: bool) -> LatentConfig:
    """Return the configuration for these sizes, measured for 16 bits on an H200. Token rows share a tile only if all of
    them attend to everything."""
    is_prompt = is_dense and num_tokens > 4 * FEW_TOKENS
    q_tile = 2 if is_prompt and num_heads == MAX_ROWS // 2 else 1
    if itemsize > 2:
        return LatentConfig(16 if width > 256 else 32, q_tile, 32, 8, 1)
    if num_tokens <= FEW_TOKENS:
        return LatentConfig(32, q_tile, 32, 8, 2)
    return LatentConfig(64, q_tile, 64, 8, 3)  # two programs just fit into a multiprocessor's shared memory


@triton.jit
def _next_request(
    served, row, request, low, high, max_count, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, CHOSEN: tl.constexpr
):
    """Return the token rows to serve next: (first row, request, rows, whether they choose). This is the request of the
    first token row not yet served, with all its token rows of the tile. A token row with chosen positions of its own is
    served alone."""
    leader = tl.min(tl.where(served > 0, BLOCK_M, row), axis=0)
    owner = tl.sum(tl.where(row == leader, request, 0), axis=0)
    is_own = (served == 0) & (request == owner)
    is_long = False
    if CHOSEN:
        chooses = high - low > max_count
        is_long = tl.sum(tl.where((row == leader) & chooses, 1, 0), axis=0) > 0
        is_own = is_own & tl.where(is_long, row // BLOCK_H == leader // BLOCK_H, ~chooses)
    return leader, owner, is_own, is_long


@triton.jit
def _attend_entries(
    q_latent, q_rope, acc, peak, total, is_own, low, high, begin, end, lowest, chosen, is_long, cache, table,
    page_stride, entry_stride, scale, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CHOSEN: tl.constexpr,
):
    """Add entries [begin, end) of a request to (acc, peak, total) of its rows, as `attend_keys` does with keys. Entry i
    is at position lowest + i, or if `is_long` at position chosen[i]."""
    latent, rope = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    IN_FP8: tl.constexpr = cache.dtype.element_ty == tl.float8e4nv and q_rope.dtype == tl.float16
    PAIRED: tl.constexpr = IN_FP8 and L % 2 == 0 and L_PAD // 2 >= LEAST_INNER  # halves are summed over by products
    if PAIRED:
        q_even, q_odd = tl.split(q_latent.reshape(acc.shape[0], L_PAD // 2, 2))
        even, odd = tl.split(acc.reshape(acc.shape[0], L_PAD // 2, 2))
    for start in range(begin, end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        inside = index < end
        position = lowest + index
        if CHOSEN:
            listed = tl.load(chosen + index, mask=inside & is_long, other=0).to(tl.int32)
            position = tl.where(is_long, listed, position)
            inside = inside & (position >= 0)  # the last places of a list may be empty
        page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        entry = cache + (page * page_stride + (position % PAGE) * entry_stride)[:, None]
        if PAIRED:
            k_even, k_odd = load_halves(entry, inside, L, L_PAD)
            score = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
            score = tl.dot(q_odd, tl.trans(k_odd), score, input_precision="ieee")
        else:
            k_latent = tl.load(entry + latent[None, :], mask=inside[:, None] & (latent < L)[None, :], other=0.0)
            score = tl.dot(q_latent, tl.trans(k_latent.to(q_latent.dtype)), input_precision="ieee")
        if R > 0:
            k_rope = tl.load(entry + L + rope[None, :], mask=inside[:, None] & (rope < R)[None, :], other=0.0)
            score = tl.dot(q_rope, tl.trans(k_rope.to(q_rope.dtype)), score, input_precision="ieee")
        score *= scale * LOG2E
        visible = inside[None, :] & is_own[:, None]
        visible = visible & (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        score = tl.where(visible, score, float("-inf"))
        weight, shrink, peak, total = weigh_scores(score, peak, total)
        if PAIRED:
            even = tl.dot(weight.to(tl.float16), k_even, even * shrink[:, None], input_precision="ieee")
            odd = tl.dot(weight.to(tl.float16), k_odd, odd * shrink[:, None], input_precision="ieee")
        else:
            k_latent = k_latent.to(q_latent.dtype)
            acc = tl.dot(weight.to(k_latent.dtype), k_latent, acc * shrink[:, None], input_precision="ieee")
    if PAIRED:
        acc = tl.join(even, odd).reshape(acc.shape[0], L_PAD)
    return acc, peak, total


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _latent_attention_kernel(
    q, cache, page_table, request_of, first, stop, positions, sinks, out, part_lse, scale, num_tokens, max_count,
    num_splits, min_split, q_token_stride, q_head_stride, page_stride, entry_stride, table_stride, positions_stride,
    out_token_stride, out_head_stride, out_split_stride,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, PAGE: tl.constexpr, Q_TILE: tl.constexpr, BLOCK_N: tl.constexpr, CHOSEN: tl.constexpr,
    SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):
    """Row `t * BLOCK_H + h` of a program's matrix products is head h of token row t of its tile."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    BLOCK_M: tl.constexpr = Q_TILE * BLOCK_H
    split = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    head = tl.program_id(0) * BLOCK_H + row % BLOCK_H
    token = tl.program_id(1) * Q_TILE + row // BLOCK_H
    exists = (token < num_tokens) & (head < HEADS)
    request = tl.load(request_of + token, mask=token < num_tokens, other=0).to(tl.int32)
    low = tl.load(first + token, mask=token < num_tokens, other=0).to(tl.int32)
    high = tl.load(stop + token, mask=token < num_tokens, other=0).to(tl.int32)
    latent, rope = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    at = q + token.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride
    q_latent = tl.load(at + latent[None, :], mask=exists[:, None] & (latent < L)[None, :], other=0.0)
    q_rope = tl.load(at + L + rope[None, :], mask=exists[:, None] & (rope < R)[None, :], other=0.0)
    q_latent, q_rope, scale = fit_latent_queries(q_latent, q_rope, scale, cache)
    acc, peak, total = no_sums(BLOCK_M, L_PAD)
    served = tl.full([BLOCK_M], 0, dtype=tl.int32)
    for _ in range(0, Q_TILE):
        leader, owner, is_own, is_long = _next_request(
            served, row, request, low, high, max_count, BLOCK_M, BLOCK_H, CHOSEN
        )
        chosen = positions
        if CHOSEN:
            chosen += (tl.program_id(1) * Q_TILE + leader // BLOCK_H).to(tl.int64) * positions_stride
        served = tl.where(is_own, 1, served)
        lowest = tl.min(tl.where(is_own & (high > low), low, 2147483647), axis=0)
        highest = tl.max(tl.where(is_own & (high > low), high, 0), axis=0)
        count = tl.minimum(tl.maximum(highest - lowest, 0), max_count)
        size = tl.maximum(min_split, tl.cdiv(tl.cdiv(count, num_splits), BLOCK_N) * BLOCK_N)
        end = tl.minimum(count, (split + 1) * size)
        table = page_table + owner.to(tl.int64) * table_stride
        acc, peak, total = _attend_entries(
            q_latent, q_rope, acc, peak, total, is_own, low, high, split * size, end, lowest, chosen, is_long, cache,
            table, page_stride, entry_stride, scale, L, L_PAD, R, R_PAD, PAGE, BLOCK_N, CHOSEN,
        )
    # The sinks of splits are added where the splits are merged.
    total = add_sinks(sinks, head, exists, peak, total, HAS_SINKS and not SPLIT)
    divisor = tl.where(total > 0, total, 1.0)
    result = acc / divisor[:, None]
    to = out + token.to(tl.int64)[:, None] * out_token_stride + head[:, None] * out_head_stride + latent[None, :]
    if SPLIT:
        to += split * out_split_stride
        lse = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
        tl.store(part_lse + (token.to(tl.int64) * HEADS + head) * num_splits + split, lse, mask=exists)
    tl.store(to, result.to(out.dtype.element_ty), mask=exists[:, None] & (latent < L)[None, :])


@triton.jit
def merged_splits(
    part_out, part_lse, sinks, part, num_splits, head, column, L: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge some columns of one head of one token row over all its splits, each of which is read once. part: the first
    split."""
    split = tl.arange(0, SPLITS)
    lse = tl.load(part_lse + part + split, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    # A split without positions has weight 0, and its result may not have been written.
    value = tl.load(part_out + (part + split)[:, None] * L + column[None, :],
                    mask=(weight > 0)[:, None] & (column < L)[None, :], other=0.0)
    total = add_sinks(sinks, head, True, peak, tl.sum(weight, axis=0), HAS_SINKS)
    return tl.sum(weight[:, None] * value, axis=0) / tl.where(total > 0, total, 1.0)


@kernel(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks"])
def _merge_kernel(
    part_out, part_lse, sinks, out, num_splits, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    result = merged_splits(part_out, part_lse, sinks, (token * HEADS + head) * num_splits, num_splits, head, column, L,
                           SPLITS, HAS_SINKS)
    to = out + token * out_token_stride + head * out_head_stride + column
    tl.store(to, result.to(out.dtype.element_ty), mask=column < L)


def latent_attention(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor, scale: float,
    latent_dim: int, sinks: torch.Tensor | None = None, *, config: LatentConfig | None = None,
    num_splits: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Attend to chosen positions; see `kernels.latent.latent_attention` for the arguments. Reads `positions` only for
    token rows that have to choose; a context with no more positions than can be chosen is attended to as a whole."""
    require_tensor("latent_attention", "positions", positions, (q.shape[0], None), q.device,
                   (torch.int32, torch.int64))
    return _attention("latent_attention", q, cache, contexts, positions, positions.shape[1], scale, latent_dim, sinks,
                      config, num_splits, pdl)


def dense_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, num_positions: int, scale: float, latent_dim: int,
    sinks: torch.Tensor | None = None, *, config: LatentConfig | None = None, num_splits: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Attend to all visible positions; see `kernels.latent.dense_latent_attention` for the arguments."""
    return _attention("dense_latent_attention", q, cache, contexts, None, num_positions, scale, latent_dim, sinks,
                      config, num_splits, pdl)


def _attention(
    name: str, q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None,
    max_count: int, scale: float, latent_dim: int, sinks: torch.Tensor | None, config: LatentConfig | None,
    num_splits: int | None, pdl: bool | None,
) -> torch.Tensor:
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_heads = q.shape[:2]
    made, lse = attend_splits(name, q, cache, contexts, positions, max_count, scale, latent_dim, sinks, config,
                              num_splits, pdl)
    if lse is None:
        return made
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    merge_splits(made, lse, out, pdl, sinks)
    return out


def merge_splits(made: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, pdl: bool,
                 sinks: torch.Tensor | None = None) -> None:
    """Merge results of splits, made [tokens, heads, splits, dim], by their log-sum-exp lse [tokens, heads, splits],
    into out [tokens, heads, dim]. sinks [heads]: the score of one more key, whose value is 0."""
    num_tokens, num_heads, dim = out.shape
    columns = min(128, next_power_of_two(dim))
    _merge_kernel[(num_tokens, num_heads, cdiv(dim, columns))](
        made, lse, lse if sinks is None else sinks, out, lse.shape[2], out.stride(0), out.stride(1), HEADS=num_heads,
        L=dim, COLUMNS=columns, SPLITS=next_power_of_two(lse.shape[2]), HAS_SINKS=sinks is not None, PDL=pdl,
        num_warps=4, **pdl_options(pdl),
    )


def attend_splits(
    name: str, q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None,
    max_count: int, scale: float, latent_dim: int, sinks: torch.Tensor | None, config: LatentConfig | None,
    num_splits: int | None, pdl: bool, least_splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (the output [tokens, heads, latent], None), or (results of splits [tokens, heads, splits, latent] in
    float32, their log-sum-exp [tokens, heads, splits]), which the caller must merge, including the sinks."""
    num_tokens, num_heads, width = check_latents(name, q, cache, contexts, latent_dim, sinks)
    on_hopper = config is None and q.element_size() == 2 and can_attend(q, cache, latent_dim)
    config = config or latent_config(num_tokens, num_heads, width, q.element_size(), is_dense=positions is None)
    q_tile, min_split = (1, HOPPER_SPLIT) if on_hopper else (config.q_tile, config.min_split)
    programs = cdiv(num_heads, _heads_per_program(num_heads)) * cdiv(num_tokens, q_tile)
    full_split = 2 * min_split if on_hopper else min_split
    splits = max(least_splits, num_splits or _num_splits(programs, max_count, full_split, num_sms(q.device)))
    if num_tokens == 0 or splits == 1:
        made, lse = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device), None
    else:
        made = torch.empty(num_tokens, num_heads, splits, latent_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_tokens, num_heads, splits, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return made, lse
    if on_hopper:
        launch_hopper_splits(q, cache, contexts, positions, max_count, scale, splits, min_split, made, lse, pdl, sinks)
    else:
        launch_splits(q, cache, contexts, positions, max_count, scale, config, splits, made, lse, pdl, sinks)
    return made, lse


def launch_splits(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None, max_count: int,
    scale: float, config: LatentConfig, splits: int, made: torch.Tensor, lse: torch.Tensor | None, pdl: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launch the splits of latent attention. Without `lse` the kernel writes the output [tokens, heads, latent] to
    `made`. With `lse` [tokens, heads, splits] it writes results of splits [tokens, heads, splits, latent], which are to
    be merged. Sinks are included only in the output."""
    (num_tokens, num_heads, width), latent_dim = q.shape, made.shape[-1]
    block_h = _heads_per_program(num_heads)
    strides = (*made.stride()[:2], 0) if lse is None else made.stride()[:3]
    chosen = contexts.request_of if positions is None else positions
    _latent_attention_kernel[(cdiv(num_heads, block_h), cdiv(num_tokens, config.q_tile), splits)](
        q, cache, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, chosen,
        q if sinks is None else sinks, made, made if lse is None else lse, scale, num_tokens, max_count, splits,
        config.min_split, q.stride(0), q.stride(1), cache.stride(0), cache.stride(1), contexts.page_table.stride(0),
        chosen.stride(0), *strides, HEADS=num_heads, BLOCK_H=block_h, L=latent_dim,
        L_PAD=max(16, next_power_of_two(latent_dim)), R=width - latent_dim,
        R_PAD=max(16, next_power_of_two(width - latent_dim)), PAGE=cache.shape[1], Q_TILE=config.q_tile,
        BLOCK_N=config.block_n, CHOSEN=positions is not None, SPLIT=lse is not None,
        HAS_SINKS=sinks is not None and lse is None, PDL=pdl, num_warps=config.num_warps,
        num_stages=config.num_stages, **pdl_options(pdl),
    )


def _heads_per_program(num_heads: int) -> int:
    return min(MAX_ROWS, max(16, next_power_of_two(num_heads)))


def _num_splits(programs: int, max_count: int, min_split: int, sms: int) -> int:
    """Return how many splits to make: two programs for each multiprocessor, if there are enough positions."""
    return max(1, min(cdiv(max_count, min_split), 2 * sms // programs if programs else 1, MOST_SPLITS))
