"""The Hopper kernel of attention over the latent cache for few token rows: `hopper.latent` over splits of positions.

A program serves one split of a token row's positions, and at most 32 of its heads. Splits are merged by
`triton.latent_attention`.
"""

from __future__ import annotations

import torch

import triton.experimental.gluon.language as gl
from outrider.kernels.latent import TokenContexts
from outrider.kernels.triton.common import cdiv, pdl_options
from outrider.kernels.triton.hopper.attend import LOG2E
from outrider.kernels.triton.hopper.items import barrier
from outrider.kernels.triton.hopper.latent import HEADS_AT_ONCE, TILE, add_tile, position_at
from outrider.kernels.triton.launch import TritonKernel
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_INTS = ["page_table", "request_of", "first", "stop", "positions"]
_VARYING = ["max_count", "num_splits", "min_split"]


@gluon.jit
def _wait_for_inputs(PDL: gl.constexpr):
    """See `common.release_dependents` and `common.wait_for_inputs`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r,~{memory}", [], dtype=gl.int32,
                                  is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=gl.int32, is_pure=False,
                                  pack=1)


@TritonKernel
@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _split_kernel(
    q, cache, page_table, request_of, first, stop, positions, out, part_lse, scale, max_count, num_splits, min_split,
    q_token_stride, q_head_stride, page_stride, entry_stride, table_stride, positions_stride, out_token_stride,
    out_head_stride, out_split_stride,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS, 16, rank=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    column: gl.constexpr = gl.SliceLayout(0, multiplied)
    _wait_for_inputs(PDL)
    token, split = gl.program_id(1).to(gl.int64), gl.program_id(2)
    low = gl.load(first + token).to(gl.int32)
    count = gl.maximum(gl.load(stop + token).to(gl.int32) - low, 0)
    table = page_table + gl.load(request_of + token).to(gl.int64) * table_stride
    is_long = count > max_count
    count = gl.minimum(count, max_count)
    share = (count + num_splits - 1) // num_splits
    size = gl.maximum(min_split, (share + TILE - 1) // TILE * TILE)
    begin = split * size
    end = gl.minimum(count, begin + size)
    head = gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=column)
    lse_at = part_lse + (token * NUM_HEADS + head) * num_splits + split
    if SPLIT and begin >= end:
        # The result of a split without positions is not read.
        gl.store(lse_at, gl.full([HEADS], float("-inf"), gl.float32, layout=column), mask=head < NUM_HEADS)
    else:
        entries = gl.allocate_shared_memory(dtype, [TILE, L], wide)
        ropes = gl.allocate_shared_memory(dtype, [TILE, R], wide)
        shares = gl.allocate_shared_memory(dtype, [TILE, HEADS], narrow)
        q_latent = gl.allocate_shared_memory(dtype, [HEADS, L], wide)
        q_rope = gl.allocate_shared_memory(dtype, [HEADS, R], wide)
        own = positions + token * positions_stride
        index = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, copied))
        latent = gl.arange(0, L, layout=gl.SliceLayout(0, copied))[None, :]
        rope = gl.arange(0, R, layout=gl.SliceLayout(0, copied))[None, :]
        # Positions are asked for two tiles ahead, and page numbers one tile ahead.
        position = position_at(own, index, low, end, is_long)
        is_live = (index >= 0) & (count > 0)
        page = gl.load(table + position // PAGE, mask=is_live, other=0)
        next_position = position_at(own, TILE + index, low, end, is_long)
        asking = gl.program_id(0) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, copied))
        is_head = (asking < NUM_HEADS)[:, None]
        asked = q + token * q_token_stride + (asking * q_head_stride)[:, None]
        q_latent.store(gl.load(asked + latent, mask=is_head, other=0.0))
        q_rope.store(gl.load(asked + L + rope, mask=is_head, other=0.0))
        acc = gl.zeros([L, HEADS], gl.float32, layout=multiplied)
        total = gl.zeros([TILE, HEADS], gl.float32, layout=multiplied)
        peak = gl.full([HEADS], float("-inf"), gl.float32, layout=column)
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
            acc, peak, total = add_tile(acc, peak, total, start, end, scale * LOG2E, (entries, ropes, shares),
                                        (q_latent, q_rope), HEADS, L)
        divisor = gl.sum(total, axis=0)
        divisor = gl.where(divisor > 0, divisor, 1.0)
        result = acc / divisor[None, :]
        if SPLIT:
            gl.store(lse_at, peak + gl.log2(divisor), mask=head < NUM_HEADS)
            row = gl.arange(0, L, layout=gl.SliceLayout(1, multiplied))[:, None]
            to = out + token * out_token_stride + split * out_split_stride + (head * out_head_stride)[None, :] + row
            gl.store(to, result, mask=(head < NUM_HEADS)[None, :])
        else:
            barrier()
            q_latent.permute((1, 0)).store(result.to(dtype))  # to write whole rows
            barrier()
            to = out + token * out_token_stride + (asking * out_head_stride)[:, None] + latent
            gl.store(to, q_latent.load(copied), mask=is_head)


def launch_splits(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None, max_count: int,
    scale: float, splits: int, min_split: int, made: torch.Tensor, lse: torch.Tensor | None, pdl: bool,
) -> None:
    """made: the output [tokens, heads, latent], or with `lse` [tokens, heads, splits] the splits' results
    [tokens, heads, splits, latent] in float32, which are to be merged. A split without positions writes only `lse`."""
    (num_tokens, num_heads, width), latent_dim = q.shape, made.shape[-1]
    heads = heads_at_once(num_heads)
    strides = (*made.stride()[:2], 0) if lse is None else made.stride()[:3]
    chosen = contexts.page_table if positions is None else positions  # no list is read where no context is longer
    _split_kernel[(cdiv(num_heads, heads), num_tokens, splits)](
        q, cache, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, chosen, made,
        made if lse is None else lse, scale, max_count, splits, min_split, q.stride(0), q.stride(1), cache.stride(0),
        cache.stride(1), contexts.page_table.stride(0), chosen.stride(0), *strides, NUM_HEADS=num_heads, HEADS=heads,
        L=latent_dim, R=width - latent_dim, PAGE=cache.shape[1], SPLIT=lse is not None, PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )


def heads_at_once(num_heads: int) -> int:
    """Heads of a program."""
    return HEADS_AT_ONCE if num_heads > HEADS_AT_ONCE // 2 else HEADS_AT_ONCE // 2
