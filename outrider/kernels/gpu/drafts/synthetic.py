"""Acceptance of drafts at chosen rates, for benchmarks: one launch replaces sampled tokens so that drafts are accepted
or rejected at these rates.

`spec.synthetic.accept_at_rates` is the specification, integer for integer. This file does not depend on models or row
state."""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.drafting import DraftVerdicts
from outrider.kernels.gpu.common import cdiv, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

_BLOCK = 128  # logit rows of a program
_SLICES = ["request", "row", "draft_index", "position"]


@kernel(do_not_specialize=["num_logit_rows", "max_drafts"], do_not_specialize_on_alignment=_SLICES)
def _accept_kernel(
    sampled, request, row, draft_index, position, drafts, seed, thresholds, out, num_logit_rows, max_drafts, vocab,
    row_step, num_kinds, kind_stride, BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < num_logit_rows
    token = tl.load(sampled + at, mask=valid, other=0)
    index = tl.load(draft_index + at, mask=valid, other=0)
    has_draft = valid & (index < max_drafts)
    draft = tl.load(drafts + tl.load(request + at, mask=valid, other=0) * max_drafts + index, mask=has_draft, other=0)
    row = tl.load(row + at, mask=valid, other=0)
    key = tl.load(seed + row, mask=valid, other=0) + row * row_step
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    word1 = tl.load(position + at, mask=valid, other=0).to(tl.uint32)
    words = tl.philox(key, zero, word1, zero, zero)
    threshold = tl.load(thresholds + row % num_kinds * kind_stride + index, mask=has_draft, other=0)
    accepted = words[0].to(tl.int64) < threshold
    other = tl.where(token == draft, (draft + 1) % vocab, token)
    chosen = tl.where(accepted, draft, other)
    tl.store(out + at, tl.where(has_draft, chosen, token), mask=valid)


def accept_at_rates(
    sampled: torch.Tensor, verdicts: DraftVerdicts, seed: torch.Tensor, thresholds: torch.Tensor, *, vocab: int,
    row_step: int,
) -> torch.Tensor:
    """Return sampled [logit rows] with every token that decides about a draft replaced: by the draft itself if 32
    random bits are below its threshold (the draft is then accepted), otherwise by another token.

    thresholds [kinds, drafts]: row r is of kind r % kinds. The bits are word 0 of Philox with counter (0, position, 0,
    0) and key seed[row] + row * row_step.
    """
    name, device, int64 = "accept_at_rates", sampled.device, (torch.int64,)
    (num_logit_rows,), (requests, max_drafts) = sampled.shape, verdicts.drafts.shape
    require_tensor(name, "sampled", sampled, (None,), device, int64)
    for field, tensor in zip(verdicts._fields[:-1], verdicts[:-1], strict=True):
        require_tensor(name, f"verdicts.{field}", tensor, (num_logit_rows,), device, int64)
    inner = 2 if max_drafts else 1
    require_tensor(name, "verdicts.drafts", verdicts.drafts, (requests, max_drafts), device, int64, inner)
    require_tensor(name, "seed", seed, (None,), device, int64)
    require_tensor(name, "thresholds", thresholds, (None, None), device, int64)
    is_enough = thresholds.shape[0] > 0 and thresholds.shape[1] >= max_drafts
    require(is_enough, name, "thresholds", f"are not enough for {max_drafts} drafts")
    out = torch.empty_like(sampled)
    if num_logit_rows:
        _accept_kernel[(cdiv(num_logit_rows, _BLOCK),)](
            sampled, *verdicts, seed, thresholds, out, num_logit_rows, max_drafts, vocab, row_step,
            thresholds.shape[0], thresholds.stride(0), BLOCK=_BLOCK, num_warps=4,
        )
    return out
