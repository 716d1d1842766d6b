"""The Hopper kernel of the indexer's scores for few token rows. It computes what `gpu/index/scores.py` computes, and
fetches keys with the bulk copy engine.

Each program serves one token row and every n-th tile of 128 keys. Shared memory has room for several tiles that are
being copied, so that reading keys, which takes all of the time here, never stops.
"""

from __future__ import annotations

import torch
import triton
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

from outrider.kernels.gpu.common import num_sms, pdl_options
from outrider.kernels.gpu.hopper.dependent_launch import release_dependents, wait_for_inputs
from outrider.kernels.gpu.hopper.fetch import COLUMNS
from outrider.kernels.gpu.hopper.index import can_score
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel
from outrider.kernels.latent import TokenContexts

TILE, STAGES = 128, 3  # keys of a tile, and tiles that shared memory holds
PROGRAMS = 2  # that share a multiprocessor
MAX_TOKENS = 64  # with more, `index_scores` reads keys for several token rows at once
_INTS = ["request_of", "first", "stop", "page_table"]
_VARYING = ["top_k", "table_stride"]


@gluon.jit
def _page_numbers(table, start, low, high, PAGE: gl.constexpr, KEYS: gl.constexpr):
    """Load the page numbers of a tile of keys. The number is -1 where no query sees the page; the copy engine writes
    zeros for such pages."""
    COPY: gl.constexpr = min(PAGE, KEYS)
    numbers = ()
    for j in gl.static_range(KEYS // COPY):
        position = start + j * COPY
        is_seen = (position < high) & (position + COPY > low)
        numbers = numbers + (gl.load(table + position // PAGE, mask=is_seen, other=-1),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _ask(
    keys, tiles, ready, slot, start, numbers,
    D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
):
    """Start the copies of one tile of keys into a buffer that is not being read."""
    COPY: gl.constexpr = min(PAGE, KEYS)
    COPIES: gl.constexpr = KEYS // COPY
    PARTS: gl.constexpr = D // COLUMNS
    pieces = tiles._reinterpret(tiles.dtype, [SLOTS * PARTS * COPIES, 1, COPY, COLUMNS],
                                gl.NVMMASharedLayout(128, 16, rank=3))
    mbarrier.expect(ready.index(slot), KEYS * D * 2)
    for j in gl.static_range(COPIES):
        for c in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(keys, [numbers[j], (start + j * COPY) % PAGE, c * COLUMNS],
                                            ready.index(slot), pieces.index((slot * PARTS + c) * COPIES + j))


@TritonKernel
@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _decode_scores_kernel(
    q, weights, keys, page_table, request_of, first, stop, scores, top_k,
    q_token_stride, q_head_stride, weights_stride, table_stride, scores_stride,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_tile = gl.allocate_shared_memory(dtype, [HEADS, D], layout)
    tiles = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, D], layout)
    ready = make_barriers(SLOTS, 1)
    fence_async_shared()
    barrier()
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = gl.program_id(0).to(gl.int64)
    low = gl.load(first + token).to(gl.int32)
    high = gl.load(stop + token).to(gl.int32)
    table = page_table + gl.load(request_of + token).to(gl.int64) * table_stride
    if high - low > top_k:
        step = gl.num_programs(1) * KEYS
        begin = (low // KEYS + gl.program_id(1)) * KEYS
        for i in gl.static_range(SLOTS):
            if begin + i * step < high:
                numbers = _page_numbers(table, begin + i * step, low, high, PAGE, KEYS)
                _ask(keys, tiles, ready, i, begin + i * step, numbers, D, PAGE, KEYS, SLOTS)
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, copied))
        dim = gl.arange(0, D, layout=gl.SliceLayout(0, copied))
        q_tile.store(gl.load(q + token * q_token_stride + (head * q_head_stride)[:, None] + dim[None, :]))
        column = gl.arange(0, HEADS, layout=gl.SliceLayout(0, multiplied))
        weight = gl.load(weights + token * weights_stride + column).to(gl.float32)
        fence_async_shared()
        barrier()
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, multiplied))
        to = scores + token * scores_stride
        numbers = _page_numbers(table, begin + SLOTS * step, low, high, PAGE, KEYS)
        turn = 0
        for start in range(begin, high, step):
            slot = turn % SLOTS
            mbarrier.wait(ready.index(slot), (turn // SLOTS) & 1)
            product = gl.zeros([KEYS, HEADS], gl.float32, layout=multiplied)
            product = warpgroup_mma(tiles.index(slot), q_tile.permute((1, 0)), product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            barrier()  # all warps have read the tile
            if start + SLOTS * step < high:
                _ask(keys, tiles, ready, slot, start + SLOTS * step, numbers, D, PAGE, KEYS, SLOTS)
            numbers = _page_numbers(table, start + (SLOTS + 1) * step, low, high, PAGE, KEYS)
            score = gl.sum(gl.maximum(product, 0.0) * weight[None, :], axis=1)
            score = gl.where(score == 0.0, 0.0, score)  # -0.0 and 0.0 are one score
            visible = (start + key >= low) & (start + key < high)
            gl.store(to + start + key, score, mask=visible)
            turn += 1


def takes_few_rows(q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor | None) -> bool:
    """Whether the kernel serves these queries [tokens, heads, dim] and keys [pages, page tokens, dim], and is worth
    it."""
    return q.shape[0] <= MAX_TOKENS and q.element_size() == 2 and scales is None and can_score(q, keys)


def launch_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, top_k: int,
    scores: torch.Tensor, pdl: bool, *, tile: int = TILE, stages: int = STAGES, programs: int = PROGRAMS,
) -> None:
    """Compute the indexer's scores for few token rows; see `index_scores` in `gpu/index/scores.py` for the
    arguments."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, _ = keys.shape
    splits = max(1, min(triton.cdiv(scores.shape[1], tile), programs * num_sms(q.device) // num_tokens))
    pages = TensorDescriptor(keys, [num_pages, page_size, head_dim], [keys.stride(0), keys.stride(1), 1],
                             [1, min(page_size, tile), COLUMNS.value], gl.NVMMASharedLayout(128, 16, rank=3))
    _decode_scores_kernel[(num_tokens, splits)](
        q, weights, pages, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, scores, top_k,
        q.stride(0), q.stride(1), weights.stride(0), contexts.page_table.stride(0), scores.stride(0), HEADS=num_heads,
        D=head_dim, PAGE=page_size, KEYS=tile, SLOTS=stages, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )
