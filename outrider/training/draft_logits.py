"""DraftLogits: computes the target's logits, restricted to the tokens of the draft vocabulary, from the target's final
hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels import ops
from outrider.kernels.vendor_products import wide_product
from outrider.layers import NothingAttends, StepContext
from outrider.models.base import Decoder, Model

LOGIT_ROWS = 2048  # token rows whose logits over the whole vocabulary are held at once


class DraftLogits:
    def __init__(self, model: Model, ids: torch.Tensor) -> None:
        """ids: the tokens of the draft vocabulary, on the model's device."""
        self._model, self._ids = model, ids
        # The output rows of the drafter's tokens alone, where logits are nothing but their products. Otherwise logits
        # of the whole vocabulary are computed.
        self._rows: torch.Tensor | None = None
        if isinstance(model, Decoder) and type(model).logits is Decoder.logits:
            weight = None if model.lm_head.declared.has_bias else model.lm_head.format.dense()
            self._rows = None if weight is None else weight[ids.to(weight.device)].to(model.device, model.dtype).clone()

    @torch.no_grad()
    def __call__(self, final: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, draft vocabulary] float32. final: [tokens, hidden]"""
        if self._rows is None:
            parts = [self._whole(rows)[:, self._ids].float() for rows in final.split(LOGIT_ROWS)]
            return torch.cat(parts) if parts else final.new_empty(0, len(self._ids), dtype=torch.float32)
        assert isinstance(self._model, Decoder)
        is_narrow = final.is_cuda and self._rows.dtype in (torch.bfloat16, torch.float16)
        logits = wide_product(final, self._rows) if is_narrow else F.linear(final, self._rows)
        if self._model.logit_scale is not None:
            logits = logits.mul_(self._model.logit_scale)
        logits = logits if self._model.softcap is None else ops.cap_logits(logits, self._model.softcap)
        return logits.float()

    @torch.no_grad()
    def best(self, final: torch.Tensor) -> torch.Tensor:
        """Return [tokens]: the likeliest token of the whole vocabulary, not only of the draft vocabulary."""
        parts = [self._whole(rows).argmax(dim=-1) for rows in final.split(LOGIT_ROWS)]
        return torch.cat(parts) if parts else final.new_empty(0, dtype=torch.int64)

    def _whole(self, final: torch.Tensor) -> torch.Tensor:
        context = StepContext(NothingAttends(), torch.zeros(len(final), dtype=torch.int64, device=final.device))
        return self._model.logits(final, context)
