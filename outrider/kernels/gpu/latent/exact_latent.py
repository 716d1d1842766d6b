"""Latent attention in exact mode: a token row has the same bits alone and among any other rows.

The kernels are those of ordinary mode, with one tile for every number of token rows. The positions of a token row,
chosen or all, are divided into splits of SPLIT_POSITIONS, however long the other contexts of the batch are. Every split
is stored, and one kernel merges the splits in order. Whole contexts run the code of chosen positions, so that a context
short enough to be taken whole has the same bits in both.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.attention.core import add_sinks
from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.index.choice import choose_positions
from outrider.kernels.gpu.index.scores import ScoreConfig
from outrider.kernels.gpu.latent.attention import LatentConfig, launch_splits
from outrider.kernels.gpu.latent.checks import check_latents
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import TokenContexts

SPLIT_POSITIONS = 256
MAX_PART_ELEMENTS = 1 << 28  # of the splits' results, 1 GiB, that exist at a time


def exact_latent_config(width: int, itemsize: int, split: int = SPLIT_POSITIONS) -> LatentConfig:
    if itemsize > 2:
        return LatentConfig(16 if width > 256 else 32, 1, split, 8, 1)
    return LatentConfig(64, 1, split, 8, 3)


def exact_score_config(itemsize: int) -> ScoreConfig:
    return ScoreConfig(1, 32, 4, 1) if itemsize > 2 else ScoreConfig(1, 128, 4, 3)


@kernel(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks"])
def _merge_in_order_kernel(
    part_out, part_lse, sinks, out, num_splits, out_token_stride, out_head_stride,
    HEADS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, GROUP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one head of one token row, GROUP at a time. Splits without positions add zeros, so the result
    does not depend on their number."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = (token * HEADS + head) * num_splits
    peak = float("-inf")
    for start in range(0, num_splits, GROUP):
        index = start + tl.arange(0, GROUP)
        lse = tl.load(part_lse + part + index, mask=index < num_splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse, axis=0))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    dim = tl.arange(0, L_PAD)
    acc = tl.zeros([L_PAD], dtype=tl.float32)
    total = 0.0
    for start in range(0, num_splits, GROUP):
        index = start + tl.arange(0, GROUP)
        weight = tl.exp2(tl.load(part_lse + part + index, mask=index < num_splits, other=float("-inf")) - base)
        value = tl.load(part_out + (part + index)[:, None] * L + dim[None, :],
                        mask=(weight > 0)[:, None] & (dim < L)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * value, axis=0)
        total += tl.sum(weight, axis=0)
    total = add_sinks(sinks, head, True, peak, total, HAS_SINKS)
    result = acc / tl.where(total > 0, total, 1.0)
    to = out + token * out_token_stride + head * out_head_stride + dim
    tl.store(to, result.to(out.dtype.element_ty), mask=dim < L)


def exact_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor, scale: float,
    latent_dim: int, sinks: torch.Tensor | None = None, *, split: int = SPLIT_POSITIONS, pdl: bool | None = None,
) -> torch.Tensor:
    """Attend to chosen positions in exact mode; see `kernels.latent.latent_attention` for the arguments."""
    require_tensor("exact_latent_attention", "positions", positions, (q.shape[0], None), q.device,
                   (torch.int32, torch.int64))
    return _attention("exact_latent_attention", q, cache, contexts, positions, positions.shape[1], scale, latent_dim,
                      sinks, split, pdl)


def exact_dense_latent_attention(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, num_positions: int, scale: float, latent_dim: int,
    sinks: torch.Tensor | None = None, *, split: int = SPLIT_POSITIONS, pdl: bool | None = None,
) -> torch.Tensor:
    """Attend to all visible positions in exact mode; see `kernels.latent.dense_latent_attention` for the arguments."""
    nothing_listed = contexts.request_of[:, None]  # never read, as no context is longer than num_positions
    return _attention("exact_dense_latent_attention", q, cache, contexts, nothing_listed, num_positions, scale,
                      latent_dim, sinks, split, pdl)


def _attention(
    name: str, q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor, max_count: int,
    scale: float, latent_dim: int, sinks: torch.Tensor | None, split: int, pdl: bool | None,
) -> torch.Tensor:
    """Attend for some token rows at a time, as many as fit into the memory for the results of their splits."""
    pdl = uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_heads, width = check_latents(name, q, cache, contexts, latent_dim, sinks)
    config = exact_latent_config(width, q.element_size(), split)
    splits = max(1, cdiv(max_count, split))
    out = torch.empty(num_tokens, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    step = max(1, min(num_tokens, MAX_PART_ELEMENTS // (num_heads * splits * latent_dim)))
    parts = torch.empty(step, num_heads, splits, latent_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(step, num_heads, splits, dtype=torch.float32, device=q.device)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        launch_splits(q[rows], cache, contexts.cut(rows), positions[rows], max_count, scale, config, splits, parts, lse,
                      pdl)
        made = out[rows]
        _merge_in_order_kernel[(made.shape[0], num_heads)](
            parts, lse, lse if sinks is None else sinks, made, splits, out.stride(0), out.stride(1), HEADS=num_heads,
            L=latent_dim, L_PAD=max(16, next_power_of_two(latent_dim)), GROUP=8, HAS_SINKS=sinks is not None, PDL=pdl,
            num_warps=4, **pdl_options(pdl),
        )
    return out


def exact_choose_positions(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, contexts: TokenContexts,
                           chosen: torch.Tensor, scales: torch.Tensor | None = None,
                           counters: torch.Tensor | None = None, *, pdl: bool | None = None) -> None:
    """Choose positions in exact mode; see `kernels.latent.choose_positions` for the arguments. Each score is one chain
    of additions, and heads are added in a fixed order."""
    choose_positions(q, weights, keys, contexts, chosen, scales, counters, config=exact_score_config(q.element_size()),
                     pdl=pdl)
