"""Token embedding. A head tied to it is a `Linear` that shares its weight.

The scale that Gemma applies is rounded to the weight's dtype, as its reference does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.layers.linear import WeightSlot


class Embedding:
    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}.weight": WeightSlot.of(self.weight)}

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64. Returns [tokens, hidden]."""
        x = F.embedding(tokens, self.weight)
        return x if self.scale is None else x * self.scale
