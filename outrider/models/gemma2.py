"""Gemma 2: Gemma 3's layers without norms of q and k, every second one with a window, and soft caps of scores and
logits.
"""

from __future__ import annotations

import torch

from outrider.layers import RopeParams
from outrider.models.config import ConfigReader, read_rope
from outrider.models.gemma3 import Gemma3


class Gemma2(Gemma3):
    """Model class for Gemma2ForCausalLM."""

    has_head_norm = False
    sliding_pattern = 2
    default_softcaps = (30.0, 50.0)

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config.passes_over("hidden_act")  # of older files, which mean hidden_activation
        config.must_equal("sliding_window_size", config.raw("sliding_window"), None)
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def read_rope(self, config: ConfigReader, kind: str) -> RopeParams:
        """Read the rope, which all layers share."""
        return read_rope(config, self.sizes.head_dim)
