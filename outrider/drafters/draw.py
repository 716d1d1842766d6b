"""Draws drafts from a drafter's logits with the target's own noise, so that both mostly pick the same token."""

from __future__ import annotations

import torch

from outrider.kernels.drafting import DraftSamplingKeys
from outrider.kernels.ops import Exactness, Operation, triton_kernel
from outrider.kernels.ops.operation import FLOAT32
from outrider.sample.philox import gumbel


def _draw_drafts(logits: torch.Tensor, keys: DraftSamplingKeys, index: int, *, target_ids: torch.Tensor | None,
                 any_sampled: bool, out: torch.Tensor) -> None:
    """Write to `out` [requests] the likeliest tokens of logits [requests, outputs]; for a request with a temperature,
    the tokens that the noise of draft `index` favours. target_ids: the drafter's tokens as the target's ids, if they
    differ."""
    if any_sampled:
        heat = keys.temperature[:, None].to(logits.dtype)
        noise = gumbel(keys.seed, keys.sample_index, keys.positions[index], target_ids, logits.shape[1], logits.dtype)
        logits = torch.where(heat > 0, logits / heat + noise, logits)
    best = logits.argmax(dim=1)
    out.copy_(best if target_ids is None else target_ids[best])


draw_drafts = Operation(
    _draw_drafts, triton_kernel("outrider.kernels.triton.draft:draw_drafts", FLOAT32), name="draw_drafts",
    exact=Exactness.DRAFTS,
)
