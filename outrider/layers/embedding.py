"""Token embedding. A head tied to it is a `Linear` that shares its weight.

The scale that Gemma applies is rounded to the weight's dtype, as its reference does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from outrider.kernels.buffers import empty_weight
from outrider.layers.base import Module, Parameter
from outrider.layers.context import StepContext


class Embedding(Module):
    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        self.weight = empty_weight(vocab_size, hidden_size, dtype=dtype, device=device)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.weight)),)

    def __call__(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:
        """tokens: [tokens] int64. Returns [tokens, hidden]."""
        if context.stand_ins is not None:
            return context.stand_ins.look_up(tokens, self.weight, self.scale)
        return self.look_up(tokens)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embedding of the ids themselves."""
        x = F.embedding(tokens, self.weight)
        return x if self.scale is None else x * self.scale
