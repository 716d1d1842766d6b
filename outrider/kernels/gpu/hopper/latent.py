"""The Hopper kernel of attention over the latent cache, over chosen positions or whole contexts, for many token rows.

Each program serves one token row and at most 32 of its heads. Positions are the rows of its matrix products and heads
the columns, so that few heads leave no part of a matrix instruction empty. A tile of 64 entries is gathered into shared
memory once: the product with the queries uses it as keys, and the product with the weights uses its latent part as
values. Two programs share a multiprocessor, and one multiplies while the other gathers, so neither needs a second tile.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from outrider.kernels.gpu.common import require_tensor
from outrider.kernels.gpu.hopper.attend import LOG2E
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import is_hopper
from outrider.kernels.gpu.latent.checks import check_latents
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel
from outrider.kernels.latent import TokenContexts

TILE = gl.constexpr(64)  # positions
HEADS_AT_ONCE = 32
MIN_TOKENS = 256  # with fewer token rows than programs that run at a time, splits of a row's positions pay
_INTS = ["page_table", "request_of", "first", "stop", "positions", "sinks"]


@gluon.jit
def position_at(own, index, low, count, is_long):
    """Return the positions at these indices of a token row's list of chosen positions. Indices past its end stand for
    the first position."""
    listed = gl.load(own + index, mask=(index < count) & is_long, other=0).to(gl.int32)
    return gl.where(index < count, gl.where(is_long, listed, low + index), low)


@gluon.jit
def _add_tile(
    acc, peak, total, start, count, factor, tiles, queries,
    HEADS: gl.constexpr, L: gl.constexpr,
):
    """Add the weighted values of the tile of entries that has arrived. Peaks are in base 2."""
    entries, ropes, shares = tiles
    layout: gl.constexpr = acc.type.layout
    score = gl.zeros([TILE, HEADS], gl.float32, layout=layout)
    score = warpgroup_mma(entries, queries[0].permute((1, 0)), score, use_acc=False, is_async=True)
    score = warpgroup_mma(ropes, queries[1].permute((1, 0)), score, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    place = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    score = gl.where((place < count)[:, None], score * factor, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(score, axis=0))  # every tile has a position
    weight = gl.exp2(score - new_peak[None, :])
    shrink = gl.exp2(peak - new_peak)
    total = total * shrink[None, :] + weight
    shares.store(weight.to(shares.dtype))
    acc = acc * shrink[None, :]
    fence_async_shared()
    barrier()
    acc = warpgroup_mma(entries.permute((1, 0)), shares, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    return acc, new_peak, total


@gluon.jit
def attend_entries(
    q, cache, table, own, token, low, begin, end, is_long, scale, strides,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
):
    """Attend to the entries [begin, end) of a token row's list of positions. Returns (weighted values [L, HEADS], their
    divisors, peaks), and the shared memory that held the queries' latent parts, with heads and columns in its order;
    `store_rows` writes the result through it."""
    q_token_stride, q_head_stride, page_stride, entry_stride = strides
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    entries = gl.allocate_shared_memory(dtype, [TILE, L], wide)
    ropes = gl.allocate_shared_memory(dtype, [TILE, R], wide)
    shares = gl.allocate_shared_memory(dtype, [TILE, HEADS], narrow)
    q_latent = gl.allocate_shared_memory(dtype, [HEADS, L], wide)
    q_rope = gl.allocate_shared_memory(dtype, [HEADS, R], wide)
    index = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, copied))
    latent = gl.arange(0, L, layout=gl.SliceLayout(0, copied))[None, :]
    rope = gl.arange(0, R, layout=gl.SliceLayout(0, copied))[None, :]
    # Positions are asked for two tiles ahead, and page numbers one tile ahead.
    position = position_at(own, index, low, end, is_long)
    is_live = (index >= 0) & (begin < end)
    page = gl.load(table + position // PAGE, mask=is_live, other=0)
    next_position = position_at(own, TILE + index, low, end, is_long)
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, copied))
    is_head = (head < NUM_HEADS)[:, None]
    asked = q + token * q_token_stride + (head * q_head_stride)[:, None]
    q_latent.store(gl.load(asked + latent, mask=is_head, other=0.0))
    q_rope.store(gl.load(asked + L + rope, mask=is_head, other=0.0))
    acc = gl.zeros([L, HEADS], gl.float32, layout=multiplied)
    total = gl.zeros([TILE, HEADS], gl.float32, layout=multiplied)
    peak = gl.full([HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, multiplied))
    for start in range(begin, end, TILE):
        cell = cache + (page.to(gl.int64) * page_stride + (position % PAGE) * entry_stride)[:, None]
        async_copy.async_copy_global_to_shared(entries, cell + latent)
        async_copy.async_copy_global_to_shared(ropes, cell + (L + rope))
        async_copy.commit_group()
        position = next_position
        page = gl.load(table + position // PAGE, mask=is_live, other=0)
        next_position = position_at(own, start - begin + 2 * TILE + index, low, end, is_long)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        acc, peak, total = _add_tile(acc, peak, total, start, end, scale * LOG2E, (entries, ropes, shares),
                                     (q_latent, q_rope), HEADS, L)
    divisor = gl.sum(total, axis=0)
    return acc, gl.where(divisor > 0, divisor, 1.0), peak, (q_latent, head, latent)


@gluon.jit
def add_sinks(sinks, divisor, peak, HAS_SINKS: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr):
    """Add the weight of an attention sink to the divisors. A sink is one more key, with value 0 and a score per head in
    `sinks`."""
    if HAS_SINKS:
        head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=divisor.type.layout)
        sink = gl.load(sinks + head, mask=head < NUM_HEADS, other=float("-inf"))
        divisor += gl.exp2(sink * LOG2E - gl.where(peak == float("-inf"), 0.0, peak))
    return divisor


@gluon.jit
def store_rows(out, result, rows, head_stride, NUM_HEADS: gl.constexpr):
    """Store result [L, HEADS] to out, one whole row per head. `rows` comes from `attend_entries`."""
    q_latent, head, latent = rows
    barrier()
    q_latent.permute((1, 0)).store(result.to(q_latent.dtype))
    barrier()
    to = out + (head * head_stride)[:, None] + latent
    gl.store(to, q_latent.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])), mask=(head < NUM_HEADS)[:, None])


@TritonKernel
@gluon.jit(do_not_specialize=["max_count", "table_stride", "positions_stride"], do_not_specialize_on_alignment=_INTS)
def _chosen_kernel(
    q, cache, page_table, request_of, first, stop, positions, sinks, out, scale, max_count,
    q_token_stride, q_head_stride, page_stride, entry_stride, table_stride, positions_stride, out_token_stride,
    out_head_stride,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):
    token = gl.program_id(1).to(gl.int64)
    low = gl.load(first + token).to(gl.int32)
    count = gl.maximum(gl.load(stop + token).to(gl.int32) - low, 0)
    is_long = count > max_count
    table = page_table + gl.load(request_of + token).to(gl.int64) * table_stride
    acc, divisor, peak, rows = attend_entries(
        q, cache, table, positions + token * positions_stride, token, low, 0, gl.minimum(count, max_count), is_long,
        scale, (q_token_stride, q_head_stride, page_stride, entry_stride), NUM_HEADS, HEADS, L, R, PAGE)
    divisor = add_sinks(sinks, divisor, peak, HAS_SINKS, NUM_HEADS, HEADS)
    store_rows(out + token * out_token_stride, acc / divisor[None, :], rows, out_head_stride, NUM_HEADS)


def takes_many_rows(q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, chosen: object, scale: float,
                    latent_dim: int, sinks: torch.Tensor | None = None) -> bool:
    """Whether the kernel serves these queries [tokens, heads, latent | rope] and this cache, and is faster than other
    kernels."""
    return q.shape[0] >= MIN_TOKENS and can_attend(q, cache, latent_dim)


def can_attend(q: torch.Tensor, cache: torch.Tensor, latent_dim: int) -> bool:
    """Whether the kernels of this package serve this GPU and these shapes."""
    return (
        is_hopper(q.device) and cache.dtype == q.dtype and latent_dim in (256, 512) and q.shape[2] - latent_dim == 64
        and q.stride(2) == cache.stride(2) == 1 and cache.data_ptr() % 16 == q.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in (*q.stride()[:2], *cache.stride()[:2]))
    )


def latent_attention(q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor,
                     scale: float, latent_dim: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attend to the chosen positions of the latent cache; see `kernels.latent.latent_attention` for the arguments."""
    require_tensor("latent_attention", "positions", positions, (q.shape[0], None), q.device,
                   (torch.int32, torch.int64))
    return _attend("latent_attention", q, cache, contexts, positions, positions.shape[1], scale, latent_dim, sinks)


def dense_latent_attention(q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, num_positions: int,
                           scale: float, latent_dim: int,
                           sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attend to all visible positions of the latent cache; see `kernels.latent.dense_latent_attention` for the
    arguments."""
    return _attend("dense_latent_attention", q, cache, contexts, None, num_positions, scale, latent_dim, sinks)


def _attend(name: str, q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None,
            max_count: int, scale: float, latent_dim: int, sinks: torch.Tensor | None) -> torch.Tensor:
    num_tokens, num_heads, width = check_latents(name, q, cache, contexts, latent_dim, sinks)
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    heads = HEADS_AT_ONCE if num_heads > HEADS_AT_ONCE // 2 else HEADS_AT_ONCE // 2
    chosen = contexts.page_table if positions is None else positions  # no list is read where no context is longer
    _chosen_kernel[(triton.cdiv(num_heads, heads), num_tokens)](
        q, cache, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, chosen,
        q if sinks is None else sinks, out, scale, max_count, q.stride(0), q.stride(1), cache.stride(0),
        cache.stride(1), contexts.page_table.stride(0), chosen.stride(0), out.stride(0), out.stride(1),
        NUM_HEADS=num_heads, HEADS=heads, L=latent_dim,
        R=width - latent_dim, PAGE=cache.shape[1], HAS_SINKS=sinks is not None, num_warps=4,
    )
    return out
