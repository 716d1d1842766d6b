"""The indexer's scores, by which sparse attention chooses positions. The score of a cached position is the weighted sum
over heads of relu(q . key), for each token row of the flat batch.

Each program serves a tile of token rows and every n-th tile of their keys, so that the grid does not grow with the
length. If token rows belong to different requests, the requests are served one after the other. Rows whose context has
no more than top-k positions are skipped, because they need no scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import TokenContexts

_INTS = ["page_table", "request_of", "first", "stop"]


@dataclass(frozen=True)
class ScoreConfig:
    """Token rows and keys per tile, and options of the compiler."""

    rows: int
    block_n: int
    num_warps: int
    num_stages: int


def score_config(num_tokens: int, itemsize: int) -> ScoreConfig:
    """Return the tile for these sizes. Several token rows in a tile share the keys that the program reads, which pays
    for prompts."""
    if itemsize > 2:
        return ScoreConfig(1 if num_tokens < 64 else 2, 32, 4, 1)
    return ScoreConfig(1, 128, 4, 3) if num_tokens <= 64 else ScoreConfig(4, 128, 8, 3)


@kernel(do_not_specialize=["num_tokens", "num_splits", "top_k"], do_not_specialize_on_alignment=_INTS)
def _scores_kernel(
    q, weights, keys, scales, page_table, request_of, first, stop, scores, num_tokens, num_splits, top_k,
    q_token_stride, q_head_stride, weights_stride, page_stride, key_stride, scale_page_stride, table_stride,
    scores_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the scores of a tile of token rows. Column `t * HEADS_PAD + h` of the matrix products is head h of token
    row t of the tile."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    row = tl.arange(0, ROWS)
    token = tl.program_id(0) * ROWS + row
    request = tl.load(request_of + token, mask=token < num_tokens, other=-1).to(tl.int32)
    low = tl.load(first + token, mask=token < num_tokens, other=0).to(tl.int32)
    high = tl.load(stop + token, mask=token < num_tokens, other=0).to(tl.int32)
    waits = (high - low > top_k).to(tl.int32)
    if tl.max(waits, axis=0) > 0:
        column = tl.arange(0, ROWS * HEADS_PAD)
        head = column % HEADS_PAD
        of_token = tl.program_id(0) * ROWS + column // HEADS_PAD
        exists = (head < HEADS) & (of_token < num_tokens)
        dim = tl.arange(0, D_PAD)
        queries = tl.load(
            q + of_token.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
            mask=exists[:, None] & (dim < D)[None, :], other=0.0,
        )
        weight = tl.load(weights + of_token.to(tl.int64) * weights_stride + head, mask=exists, other=0.0)
        for _ in range(0, ROWS):
            # The request of the first token row that waits, with all its token rows of the tile.
            leader = tl.min(tl.where(waits > 0, row, ROWS), axis=0)
            owner = tl.max(tl.where(row == leader, request, -1), axis=0)
            is_own = (waits > 0) & (request == owner)
            waits = tl.where(is_own, 0, waits)
            lowest = tl.min(tl.where(is_own, low, 2147483647), axis=0)
            highest = tl.max(tl.where(is_own, high, 0), axis=0)
            table = page_table + tl.maximum(owner, 0).to(tl.int64) * table_stride
            begin = (tl.minimum(lowest, highest) // BLOCK_N + tl.program_id(1)) * BLOCK_N
            for start in range(begin, highest, num_splits * BLOCK_N):
                position = start + tl.arange(0, BLOCK_N)
                inside = (position >= lowest) & (position < highest)
                page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
                at = keys + (page * page_stride + (position % PAGE) * key_stride)[:, None] + dim[None, :]
                key = tl.load(at, mask=inside[:, None] & (dim < D)[None, :], other=0.0)
                if SCALED:
                    key = key.to(queries.dtype)
                product = tl.dot(key, tl.trans(queries), input_precision="ieee")
                product = tl.maximum(product, 0.0) * weight[None, :]
                score = tl.sum(tl.reshape(product, [BLOCK_N, ROWS, HEADS_PAD]), axis=2)
                if SCALED:  # scales are positive, so they may come after relu
                    scale = tl.load(scales + page * scale_page_stride + position % PAGE, mask=inside, other=0.0)
                    score *= scale[:, None]
                score = tl.where(score == 0.0, 0.0, score)  # -0.0 and 0.0 are one score
                visible = is_own[None, :] & (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :])
                to = token.to(tl.int64)[None, :] * scores_stride + position[:, None]
                tl.store(scores + to, score, mask=visible)


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts, top_k: int,
    scores: torch.Tensor, scales: torch.Tensor | None = None, *, config: ScoreConfig | None = None,
    num_splits: int | None = None, pdl: bool | None = None,
) -> None:
    """Write scores [tokens, positions] float32 of the visible positions. Only token rows that see more than top_k
    positions are scored. The arguments are those of `kernels.latent.choose_positions`, which checks them."""
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_heads, head_dim = q.shape
    config = config or score_config(num_tokens, q.element_size())
    tiles, sms = cdiv(num_tokens, config.rows), num_sms(q.device)
    most = cdiv(scores.shape[1], config.block_n)
    splits = num_splits or max(1, min(most, 4 * sms // tiles))
    _scores_kernel[(tiles, splits)](
        q, weights, keys, weights if scales is None else scales, contexts.page_table, contexts.request_of,
        contexts.first, contexts.stop, scores, num_tokens, splits, top_k, q.stride(0), q.stride(1),
        weights.stride(0), keys.stride(0), keys.stride(1), 0 if scales is None else scales.stride(0),
        contexts.page_table.stride(0), scores.stride(0), HEADS=num_heads,
        HEADS_PAD=max(16 // config.rows, next_power_of_two(num_heads)), D=head_dim,
        D_PAD=max(16, next_power_of_two(head_dim)), PAGE=keys.shape[1], ROWS=config.rows, BLOCK_N=config.block_n,
        SCALED=scales is not None, PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages,
        **pdl_options(pdl),
    )
