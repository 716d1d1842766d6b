"""The Hopper kernel of attention over the latent cache for few token rows. It works like `latent.py`, with the
positions of a token row split over several programs.

Each program serves one split of a token row's positions, and at most 32 of its heads. `latent/attention.py` merges the
splits.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from outrider.kernels.gpu.common import cdiv, pdl_options
from outrider.kernels.gpu.hopper.dependent_launch import release_dependents, wait_for_inputs
from outrider.kernels.gpu.hopper.latent import HEADS_AT_ONCE, TILE, add_sinks, attend_entries, store_rows
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel
from outrider.kernels.latent import TokenContexts

_INTS = ["page_table", "request_of", "first", "stop", "positions", "sinks"]
_VARYING = ["max_count", "num_splits", "min_split", "table_stride", "positions_stride"]


@TritonKernel
@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _split_kernel(
    q, cache, page_table, request_of, first, stop, positions, sinks, out, part_lse, scale, max_count, num_splits,
    min_split, q_token_stride, q_head_stride, page_stride, entry_stride, table_stride, positions_stride,
    out_token_stride, out_head_stride, out_split_stride,
    NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINKS: gl.constexpr, PDL: gl.constexpr,
):
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    column: gl.constexpr = gl.SliceLayout(0, multiplied)
    release_dependents(PDL)
    wait_for_inputs(PDL)
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
        acc, divisor, peak, rows = attend_entries(
            q, cache, table, positions + token * positions_stride, token, low, begin, end, is_long, scale,
            (q_token_stride, q_head_stride, page_stride, entry_stride), NUM_HEADS, HEADS, L, R, PAGE)
        # The sinks of splits are added where the splits are merged.
        divisor = add_sinks(sinks, divisor, peak, HAS_SINKS and not SPLIT, NUM_HEADS, HEADS)
        result = acc / divisor[None, :]
        if SPLIT:
            gl.store(lse_at, peak + gl.log2(divisor), mask=head < NUM_HEADS)
            row = gl.arange(0, L, layout=gl.SliceLayout(1, multiplied))[:, None]
            to = out + token * out_token_stride + split * out_split_stride + (head * out_head_stride)[None, :] + row
            gl.store(to, result, mask=(head < NUM_HEADS)[None, :])
        else:
            store_rows(out + token * out_token_stride, result, rows, out_head_stride, NUM_HEADS)


def launch_splits(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None, max_count: int,
    scale: float, splits: int, min_split: int, made: torch.Tensor, lse: torch.Tensor | None, pdl: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launch attention for each split of the positions. Without `lse`, made is the output [tokens, heads, latent]. With
    `lse` [tokens, heads, splits], made gets each split's result [tokens, heads, splits, latent] in float32, which the
    caller must merge. A split without positions writes only `lse`. Sinks are included only in the output."""
    (num_tokens, num_heads, width), latent_dim = q.shape, made.shape[-1]
    heads = heads_at_once(num_heads)
    strides = (*made.stride()[:2], 0) if lse is None else made.stride()[:3]
    chosen = contexts.page_table if positions is None else positions  # no list is read where no context is longer
    _split_kernel[(cdiv(num_heads, heads), num_tokens, splits)](
        q, cache, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, chosen,
        q if sinks is None else sinks, made, made if lse is None else lse, scale, max_count, splits, min_split,
        q.stride(0), q.stride(1), cache.stride(0), cache.stride(1), contexts.page_table.stride(0), chosen.stride(0),
        *strides, NUM_HEADS=num_heads, HEADS=heads, L=latent_dim, R=width - latent_dim, PAGE=cache.shape[1],
        SPLIT=lse is not None, HAS_SINKS=sinks is not None and lse is None, PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )


def heads_at_once(num_heads: int) -> int:
    """Return how many heads a program serves."""
    return HEADS_AT_ONCE if num_heads > HEADS_AT_ONCE // 2 else HEADS_AT_ONCE // 2
