"""Gemma 2: Gemma 3's layers without norms of q and k, every second one with a window, and soft limits of scores and
logits.
"""

from __future__ import annotations

from outrider.layers import RopeParams
from outrider.models.config import ConfigReader, read_rope
from outrider.models.gemma3 import Gemma3


class Gemma2(Gemma3):
    """Gemma2ForCausalLM."""

    has_head_norm = False
    sliding_pattern = 2
    default_softcaps = (30.0, 50.0)

    def read_rope(self, config: ConfigReader, kind: str) -> RopeParams:
        """All layers have one rope."""
        return read_rope(config, self.sizes.head_dim)
