"""Attention of few token rows over the latent cache, then the product with each head's value matrix, in two launches.

The second kernel merges the splits of a head and multiplies the result, so merging needs no launch of its own. It reads
its weight while attention still runs.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.latent.attention import LatentConfig, attend_splits, merged_splits
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import TokenContexts

MAX_TOKENS = 1  # with more, tensor cores multiply all of them with a weight that is read once
MAX_WIDTH = 512  # of a latent
COLUMNS = 16  # values of a program


@kernel(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks"])
def _merge_values_kernel(
    part_out, part_lse, sinks, weight, out, num_splits, weight_head_stride, weight_out_stride, out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):
    """Each program computes some values of one head of one token row."""
    release_dependents(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column, at = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, L_PAD)
    w = tl.load(weight + head * weight_head_stride + column[:, None] * weight_out_stride + at[None, :],
                mask=(column < N)[:, None] & (at < L)[None, :], other=0.0)
    wait_for_inputs(PDL)
    latent = merged_splits(part_out, part_lse, sinks, (token * HEADS + head) * num_splits, num_splits, head, at, L,
                           SPLITS, HAS_SINKS)
    latent = latent.to(out.dtype.element_ty).to(tl.float32)  # as if it had been stored
    value = tl.sum(w.to(tl.float32) * latent[None, :], axis=1)
    to = out + token * out_token_stride + head * out_head_stride + column
    tl.store(to, value.to(out.dtype.element_ty), mask=column < N)


def latent_values(
    q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None, num_positions: int,
    scale: float, to_values: torch.Tensor, sinks: torch.Tensor | None = None, *, config: LatentConfig | None = None,
    num_splits: int | None = None, columns: int = COLUMNS, pdl: bool | None = None,
) -> torch.Tensor:
    """Attend, and multiply each head's result with its value matrix; see `kernels.latent.latent_values` for the
    arguments. Accepts the calls for which `takes_few` is true."""
    name, pdl = "latent_values", uses_pdl(q.device) if pdl is None else pdl
    num_tokens, num_heads, _ = q.shape
    value_dim, latent_dim = to_values.shape[1:]
    require_tensor(name, "to_values", to_values, (num_heads, None, None), q.device, (q.dtype,))
    if positions is not None:
        require_tensor(name, "positions", positions, (num_tokens, None), q.device, (torch.int32, torch.int64))
        num_positions = positions.shape[1]
    made, lse = attend_splits(name, q, cache, contexts, positions, num_positions, scale, latent_dim, sinks,
                              config, num_splits, pdl, least_splits=2)
    assert lse is not None
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=q.dtype, device=q.device)
    _merge_values_kernel[(num_tokens, num_heads, cdiv(value_dim, columns))](
        made, lse, lse if sinks is None else sinks, to_values, out, lse.shape[2], to_values.stride(0),
        to_values.stride(1), out.stride(0), out.stride(1), HEADS=num_heads, L=latent_dim,
        L_PAD=next_power_of_two(latent_dim), N=value_dim, COLUMNS=columns, SPLITS=next_power_of_two(lse.shape[2]),
        HAS_SINKS=sinks is not None, PDL=pdl, num_warps=8, **pdl_options(pdl),
    )
    return out


def takes_few(q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts, positions: torch.Tensor | None,
              num_positions: int, scale: float, to_values: torch.Tensor,
              sinks: torch.Tensor | None = None) -> bool:
    """Whether token rows are so few that reading weights takes longer than multiplying."""
    return 0 < q.shape[0] <= MAX_TOKENS and to_values.shape[2] <= MAX_WIDTH and to_values.stride(2) == 1
