"""The loss of a drafter's logits against the target's distribution, with its gradient.

Logits of many token rows over a vocabulary are the largest tensors of training, so they are computed in chunks of rows.
The product, the loss and the gradient of a chunk are computed together. Only the gradient of the product's input, and
of its weight if that is trained, is kept until the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.kernels.ops.operation import UP_TO_FLOAT32, Exactness, Operation, triton_kernel
from outrider.trainable.named_layers import wide

CHUNK_ROWS = 4096  # token rows whose logits are held at once


def _distill_rows(logits: torch.Tensor, target_logits: torch.Tensor, places: torch.Tensor,
                  row_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([rows] losses, [rows, vocabulary] gradient of their sum). A row's loss is its weight times the
    cross-entropy of the softmax of its logits against the softmax of the target's. The gradient may overwrite the
    logits.

    logits [rows, vocabulary]; target_logits [places, vocabulary] float32; places [rows]: the index of each row's target
    logits; row_weights [rows] float32."""
    own, wanted = wide(logits), target_logits[places].softmax(dim=-1)
    sums = own.logsumexp(dim=-1)
    losses = row_weights * (sums - (wanted * own).sum(dim=-1))
    gradient = row_weights[:, None] * ((own - sums[:, None]).exp() - wanted)
    return losses, gradient.to(logits.dtype)


distill_rows = Operation(
    _distill_rows, triton_kernel("outrider.kernels.gpu.drafts.distillation:distill_rows", UP_TO_FLOAT32),
    name="distill_rows", exact=Exactness.DRAFTS,
)


def distillation_loss(states: torch.Tensor, weight: torch.Tensor, target_logits: torch.Tensor, places: torch.Tensor,
                      row_weights: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of `distill_rows` for logits = states @ weight', in autocast's precision if autocast is on.
    states [rows, hidden], weight [vocabulary, hidden]; both may need gradients."""
    is_narrow = torch.is_autocast_enabled(states.device.type)
    dtype = torch.get_autocast_dtype(states.device.type) if is_narrow else weight.dtype
    loss: torch.Tensor = _Distillation.apply(states, weight, target_logits, places, row_weights, dtype)
    return loss


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, target_logits: torch.Tensor,
                places: torch.Tensor, row_weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        for_states, for_weight = ctx.needs_input_grad[:2]
        with torch.autocast(states.device.type, enabled=False):
            product_weight = weight.to(dtype)
            state_gradient = torch.empty_like(states) if for_states else None
            weight_gradient = torch.zeros_like(weight) if for_weight else None
            total = torch.zeros((), dtype=wide(states).dtype, device=states.device)
            for start in range(0, len(states), CHUNK_ROWS):
                chunk = slice(start, start + CHUNK_ROWS)
                x = states[chunk].to(dtype)
                losses, gradient = distill_rows(x @ product_weight.t(), target_logits, places[chunk],
                                                row_weights[chunk])
                total += losses.sum()
                if state_gradient is not None:
                    state_gradient[chunk] = gradient @ product_weight
                if weight_gradient is not None:
                    weight_gradient += gradient.t() @ x
        ctx.save_for_backward(state_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        states, weight = (None if own is None else own * outer[0].to(own.dtype) for own in ctx.saved_tensors)
        return states, weight, None, None, None, None
