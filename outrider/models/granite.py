"""Granite 3: Llama with factors for the embedding, the attention scores, each layer's additions and the logits."""

from __future__ import annotations

import torch

from outrider.layers import DecoderLayer, ScaledLayer
from outrider.mixers import AttentionLayer
from outrider.models.config import ConfigReader
from outrider.models.llama import Llama


class Granite(Llama):
    """Model class for GraniteForCausalLM."""

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)
        self.logit_scale = 1 / read_factor(config, "logits_scaling")

    def embedding_scale(self, config: ConfigReader) -> float:
        return read_factor(config, "embedding_multiplier")

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        sizes, scale = self.sizes, read_factor(self.config, "attention_multiplier")
        return AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, scale, window)

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        attention, mlp = self.make_attention(layer), self.make_feed_forward(layer.index)
        return ScaledLayer(self.make_norm(), attention, self.make_norm(), mlp,
                           factor=read_factor(self.config, "residual_multiplier"))


def read_factor(config: ConfigReader, key: str) -> float:
    factor = config.get(key, float, 1.0)
    if factor <= 0:
        raise config.refusal(key, "it must be greater than 0")
    return factor
