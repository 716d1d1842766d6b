"""Loss for training draft heads: the cross-entropy of logits against the softmax of a target's logits, and its
gradient. Each logit is read twice and overwritten once, with its gradient. One program serves each row, in float32
throughout."""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import FLOATS, next_power_of_two, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

_COLUMNS = 4096  # of a row that are held at once


@kernel
def _distill_kernel(
    logits, target_logits, places, row_weights, losses, logits_stride, target_stride, vocab_size,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own_row = logits + row * logits_stride
    target_row = target_logits + tl.load(places + row) * target_stride
    row_weight = tl.load(row_weights + row)
    low = -3.0e38  # of logits that are -inf: a maximum that differences may be taken of
    own_top, own_sum = low, 0.0
    target_top, target_sum, product = low, 0.0, 0.0
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        valid = column < vocab_size
        own = tl.load(own_row + column, mask=valid, other=float("-inf")).to(tl.float32)
        target = tl.load(target_row + column, mask=valid, other=float("-inf")).to(tl.float32)
        top = tl.maximum(own_top, tl.max(own, axis=0))
        own_sum = own_sum * tl.exp(own_top - top) + tl.sum(tl.exp(own - top), axis=0)
        own_top = top
        top = tl.maximum(target_top, tl.max(target, axis=0))
        shrink = tl.exp(target_top - top)
        share = tl.exp(target - top)
        target_sum = target_sum * shrink + tl.sum(share, axis=0)
        product = product * shrink + tl.sum(share * tl.where(valid, own, 0.0), axis=0)
        target_top = top
    own_log = own_top + tl.log(own_sum)
    tl.store(losses + row, row_weight * (own_log - product / target_sum))
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        valid = column < vocab_size
        own = tl.load(own_row + column, mask=valid, other=0.0).to(tl.float32)
        target = tl.load(target_row + column, mask=valid, other=0.0).to(tl.float32)
        gradient = row_weight * (tl.exp(own - own_log) - tl.exp(target - target_top) / target_sum)
        tl.store(own_row + column, gradient.to(logits.dtype.element_ty), mask=valid)


def distill_rows(logits: torch.Tensor, target_logits: torch.Tensor, places: torch.Tensor,
                 row_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each row's cross-entropy, and overwrite the logits with the gradient; see
    `training.distillation.distill_rows` for the arguments. `places` are not checked to be rows of the target."""
    name, device = "distill_rows", logits.device
    require_tensor(name, "logits", logits, (None, None), device, FLOATS)
    num_rows, vocab_size = logits.shape
    require_tensor(name, "target_logits", target_logits, (None, vocab_size), device, (torch.float32,))
    require_tensor(name, "places", places, (num_rows,), device, (torch.int64,))
    require_tensor(name, "row_weights", row_weights, (num_rows,), device, (torch.float32,))
    losses = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        _distill_kernel[(num_rows,)](
            logits, target_logits, places, row_weights, losses, logits.stride(0), target_logits.stride(0), vocab_size,
            COLUMNS=min(_COLUMNS, next_power_of_two(vocab_size)), num_warps=8,
        )
    return losses, logits
