"""Samples drafts from a drafter's logits with the target's own noise, so that drafter and target mostly pick the same
token."""

from __future__ import annotations

import torch

from outrider.core.draft_confidence import LEVEL_BITS, MOST_PLACES, TOP_LEVEL
from outrider.kernels.drafting import DraftSamplingKeys
from outrider.kernels.ops import Exactness, Operation, triton_kernel
from outrider.kernels.ops.operation import FLOAT32
from outrider.sample.philox import gumbel


def _draw_drafts(logits: torch.Tensor, keys: DraftSamplingKeys, index: int, *, target_ids: torch.Tensor | None,
                 any_sampled: bool, out: torch.Tensor, levels: torch.Tensor) -> None:
    """Write a draft of every request to `out` [requests]. The draft is the likeliest token of logits [requests,
    outputs], or, with a temperature, the token that the noise of draft `index` selects. target_ids: the target's id of
    each of the drafter's tokens, if they differ. levels [requests]: the draft's confidence level
    (`core/draft_confidence.py`) is packed beside those of earlier drafts; draft 0 overwrites it."""
    scores = logits
    if any_sampled:
        temperature = keys.temperature[:, None].to(logits.dtype)
        noise = gumbel(keys.seed, keys.sample_index, keys.positions[index], target_ids, logits.shape[1], logits.dtype)
        scores = torch.where(temperature > 0, logits / temperature + noise, logits)
    best = scores.argmax(dim=1)
    out.copy_(best if target_ids is None else target_ids[best])
    if index < MOST_PLACES:
        level = _levels(logits, best) << LEVEL_BITS * index
        levels.copy_(level if index == 0 else levels | level)


def _levels(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return [requests] the confidence level of each chosen token, from its probability at temperature 1. The request's
    own temperature is not used, because the probability at 1 predicts best whether the target picks the token. The
    level is 1 if logits are not finite."""
    mass = (logits - logits.gather(1, chosen[:, None])).exp_().sum(dim=1)  # infinite for a token that has hardly any
    return 1 + (TOP_LEVEL / mass).nan_to_num(0.0).long().clamp_max(TOP_LEVEL - 1)


draw_drafts = Operation(
    _draw_drafts, triton_kernel("outrider.kernels.gpu.drafts.passes:draw_drafts", FLOAT32), name="draw_drafts",
    exact=Exactness.DRAFTS,
)
