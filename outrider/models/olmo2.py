"""OLMo 2 and OLMo 3: norms after attention and MLP, and one norm over all q heads and one over all k heads.

In OLMo 3 three layers of four have a window; only the others scale their rope.
"""

from __future__ import annotations

import torch

from outrider.layers import DecoderLayer, PostNormLayer, RopeParams, SelfAttention, WidthNormAttention
from outrider.mixers import AttentionLayer
from outrider.models.config import FULL, SLIDING, ConfigReader, layer_windows, rope_params
from outrider.models.llama import Llama

ROPES = (FULL, SLIDING)  # the order of OLMo 3's rotaries


class Olmo2(Llama):
    """Model class for Olmo2ForCausalLM."""

    default_eps = 1e-5

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        return WidthNormAttention(layer, self.hidden_size, self.sizes.eps, **self.attention_options())

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        return PostNormLayer(self.make_attention(layer), self.make_norm(), self.make_feed_forward(layer.index),
                             self.make_norm())

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, False)
        return attention, attention, False


class Olmo3(Olmo2):
    """Model class for Olmo3ForCausalLM."""

    default_theta = 500_000.0

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)
        self.rotaries.append(self.make_rotary(self._rope(config, SLIDING), max_len))

    def read_rope(self, config: ConfigReader) -> RopeParams:
        return self._rope(config, FULL)

    def _rope(self, config: ConfigReader, kind: str) -> RopeParams:
        """Return the rope of a layer type, from `rope_parameters` or from the `rope_scaling` of older configs, which is
        for full layers only."""
        theta = config.get("rope_theta", float, self.default_theta)
        rope = ConfigReader({}, f"{config.source}: rope")
        if config.raw("rope_parameters"):
            rope = config.section("rope_parameters").section_or_empty(kind)
        elif kind == FULL and config.raw("rope_scaling"):
            rope = config.section("rope_scaling")
        return rope_params(config, rope, self.sizes.head_dim, theta)

    def windows(self, config: ConfigReader) -> list[int | None]:
        kinds = [SLIDING if (index + 1) % 4 else FULL for index in range(self.num_layers)]
        return layer_windows(config, config.get("layer_types", list, kinds))

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        made = super().make_layer(layer)
        made.rotary = ROPES.index(FULL if layer.window is None else SLIDING)
        return made
