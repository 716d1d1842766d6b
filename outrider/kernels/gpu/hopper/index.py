"""The Hopper kernel of the indexer's scores, for steps with many token rows.

The indexer scores every cached position, so that sparse attention reads only the best ones. A program serves a tile of
8 token rows and every n-th tile of 64 keys. One warp fetches tiles of keys with the bulk copy engine into a ring. Two
groups of four warps take each tile: a group multiplies it with all heads of its 4 token rows at once, and sums up the
weighted heads in registers while the tensor cores multiply for the other group. Token rows of a tile that belong to
different requests are served one request after the other; those whose context has no more than top-k positions need no
scores.
"""

from __future__ import annotations

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.common import num_sms
from outrider.kernels.gpu.hopper.fetch import COLUMNS, copy_tile
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.hopper.prefill import is_hopper, make_barriers
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel
from outrider.kernels.latent import TokenContexts

KEYS = gl.constexpr(64)  # of a tile
GROUP_ROWS = gl.constexpr(4)  # token rows of one group of warps
ROWS = gl.constexpr(8)  # token rows of a tile
STAGES = gl.constexpr(4)  # tiles of keys that shared memory holds
MIN_TOKENS, MIN_ROWS = 256, 16  # token rows of a step, and of each of its requests on average
WAVES = 8  # programs for each multiprocessor, where there are keys enough
REGISTERS, FETCH_REGISTERS, SCORE_REGISTERS = 168, 40, 232
_INTS = ["request_of", "first", "stop", "page_table"]


@gluon.jit
def _load_rows(contexts, num_tokens, top_k):
    """Load (request, first position, end, whether it needs scores) of the token rows of a tile."""
    request_of, first, stop = contexts
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    token = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=layout)
    exists = token < num_tokens
    request = gl.load(request_of + token, mask=exists, other=-1).to(gl.int32)
    low = gl.load(first + token, mask=exists, other=0).to(gl.int32)
    high = gl.load(stop + token, mask=exists, other=0).to(gl.int32)
    return request, low, high, (high - low > top_k).to(gl.int32)


@gluon.jit
def _next_request(request, low, high, waits):
    """Return the next request to serve in a tile whose token rows belong to several requests: (the request of the first
    waiting token row, the first position that its token rows see, the end of what they see, this program's first tile
    of keys, which token rows still wait after it)."""
    row = gl.arange(0, ROWS, layout=request.type.layout)
    leader = gl.min(gl.where(waits > 0, row, ROWS), axis=0)
    owner = gl.max(gl.where(row == leader, request, -1), axis=0)
    is_own = (waits > 0) & (request == owner)
    lowest = gl.min(gl.where(is_own, low, 2147483647), axis=0)
    highest = gl.max(gl.where(is_own, high, 0), axis=0)
    begin = (gl.minimum(lowest, highest) // KEYS + gl.program_id(1)) * KEYS
    return owner, lowest, highest, begin, gl.where(is_own, 0, waits)


@gluon.jit
def _fetch(keys, page_table, contexts, ring, num_tokens, top_k, table_stride, D: gl.constexpr, PAGE: gl.constexpr):
    tiles, ready, free = ring
    request, low, high, waits = _load_rows(contexts, num_tokens, top_k)
    turn = 0
    for _ in range(ROWS):
        owner, lowest, highest, begin, waits = _next_request(request, low, high, waits)
        table = page_table + gl.maximum(owner, 0).to(gl.int64) * table_stride
        for start in range(begin, highest, gl.num_programs(1) * KEYS):
            copy_tile(keys, table, tiles, free, ready.index(turn % STAGES), turn, start, 0, lowest, highest, D, PAGE,
                      KEYS, STAGES)
            turn += 1


@gluon.jit
def _score(
    q, weights, contexts, scores, ring, queries, num_tokens, top_k, strides,
    GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
):
    """Return the scores of a group's token rows: the products of all heads, added up over the heads. Column `t * HEADS
    + h` of the products is head h of token row t."""
    WIDTH: gl.constexpr = GROUP_ROWS * HEADS
    q_token_stride, q_head_stride, weights_stride, scores_stride = strides
    multiplied: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles, ready, free = ring
    first_token = gl.program_id(0) * ROWS + GROUP_INDEX * GROUP_ROWS
    q_tile = queries.index(GROUP_INDEX)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, copied))
    of_token = first_token + column // HEADS
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, copied))
    asked = q + (of_token.to(gl.int64) * q_token_stride + column % HEADS * q_head_stride)[:, None] + dim[None, :]
    q_tile.store(gl.load(asked, mask=(of_token < num_tokens)[:, None], other=0.0))
    of_column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, multiplied))
    of_token = first_token + of_column // HEADS
    weight = gl.load(weights + of_token.to(gl.int64) * weights_stride + of_column % HEADS, mask=of_token < num_tokens,
                     other=0.0).to(gl.float32)
    fence_async_shared()
    barrier()
    request, low, high, waits = _load_rows(contexts, num_tokens, top_k)

    form: gl.constexpr = gl.sum(gl.zeros([KEYS, WIDTH], gl.float32, layout=multiplied).reshape(
        [KEYS, GROUP_ROWS, HEADS]), axis=2).type.layout
    request_of, first, stop = contexts
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, form))[:, None]
    token = (first_token + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(0, form)))[None, :]
    own_low = gl.load(first + token, mask=token < num_tokens, other=0).to(gl.int32)
    own_high = gl.load(stop + token, mask=token < num_tokens, other=0).to(gl.int32)
    own_request = gl.load(request_of + token, mask=token < num_tokens, other=-1).to(gl.int32)
    own_request = gl.where(own_high - own_low > top_k, own_request, -2)  # no request has this number
    to = scores + token.to(gl.int64) * scores_stride + key
    turn = 0
    for _ in range(ROWS):
        owner, lowest, highest, begin, waits = _next_request(request, low, high, waits)
        for start in range(begin, highest, gl.num_programs(1) * KEYS):
            slot = turn % STAGES
            mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
            product = gl.zeros([KEYS, WIDTH], gl.float32, layout=multiplied)
            product = warpgroup_mma(tiles.index(slot), q_tile.permute((1, 0)), product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(free.index(slot), count=1)
            product = gl.maximum(product, 0.0) * weight[None, :]
            score = gl.sum(product.reshape([KEYS, GROUP_ROWS, HEADS]), axis=2)
            score = gl.where(score == 0.0, 0.0, score)  # -0.0 and 0.0 are one score
            visible = (start + key >= own_low) & (start + key < own_high) & (own_request == owner)
            gl.store(to + start, score, mask=visible)
            turn += 1


@TritonKernel
@gluon.jit(do_not_specialize=["num_tokens", "top_k"], do_not_specialize_on_alignment=_INTS)
def _prompt_scores_kernel(
    q, weights, keys, page_table, request_of, first, stop, scores, num_tokens, top_k,
    q_token_stride, q_head_stride, weights_stride, table_stride, scores_stride,
    HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, FETCHES: gl.constexpr, SCORES: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS * HEADS, D], layout)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    ring = (tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 2))  # a tile has two readers
    fence_async_shared()
    barrier()
    contexts = (request_of, first, stop)
    strides = (q_token_stride, q_head_stride, weights_stride, scores_stride)
    gl.warp_specialize(
        [
            (_score, (q, weights, contexts, scores, ring, queries, num_tokens, top_k, strides, 0, HEADS, D)),
            (_score, (q, weights, contexts, scores, ring, queries, num_tokens, top_k, strides, 1, HEADS, D)),
            (_fetch, (keys, page_table, contexts, ring, num_tokens, top_k, table_stride, D, PAGE)),
        ],
        [4, 1],
        [SCORES, FETCHES],
    )


def takes_prompts(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
                  chosen: torch.Tensor, scales: torch.Tensor | None = None,
                  counters: torch.Tensor | None = None) -> bool:
    """Whether the kernel serves these queries [tokens, heads, dim] and keys [pages, page tokens, dim] and is worth it,
    which it is if neighbouring token rows belong to one request."""
    return (q.shape[0] >= max(MIN_TOKENS, MIN_ROWS * contexts.page_table.shape[0]) and scales is None
            and can_score(q, keys))


def can_score(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernels of this package serve this GPU and these shapes."""
    num_heads, head_dim = q.shape[1:]
    return (
        is_hopper(q.device) and num_heads in (16, 32, 64) and head_dim in (64, 128)
        and q.stride(2) == keys.stride(2) == 1 and keys.data_ptr() % 16 == q.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in (*q.stride()[:2], *keys.stride()[:2])) and keys.shape[1] >= 8
    )


def launch_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, top_k: int,
    scores: torch.Tensor, num_splits: int | None = None,
) -> None:
    """Write scores [tokens, positions] float32 of the visible positions. Only token rows that see more than top_k
    positions are scored. The arguments are those of `kernels.latent.choose_positions`."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, _ = keys.shape
    tiles = triton.cdiv(num_tokens, ROWS.value)
    most = triton.cdiv(scores.shape[1], 16 * KEYS.value)
    splits = num_splits or max(1, min(most, triton.cdiv(WAVES * num_sms(q.device), tiles)))
    pages = TensorDescriptor(keys, [num_pages, page_size, head_dim], [keys.stride(0), keys.stride(1), 1],
                             [1, min(page_size, KEYS.value), COLUMNS.value], gl.NVMMASharedLayout(128, 16, rank=3))
    _prompt_scores_kernel[(tiles, splits)](
        q, weights, pages, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, scores, num_tokens,
        top_k, q.stride(0), q.stride(1), weights.stride(0), contexts.page_table.stride(0), scores.stride(0),
        HEADS=num_heads, D=head_dim, PAGE=page_size, FETCHES=FETCH_REGISTERS, SCORES=SCORE_REGISTERS, num_warps=4,
        maxnreg=REGISTERS,
    )
