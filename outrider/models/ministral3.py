"""Ministral 3: Mistral whose queries are scaled up with their position beyond the length that the rope was trained
for."""

from __future__ import annotations

from outrider.layers import RopeParams, Rotary, SelfAttention, TemperedAttention, TemperedRotary
from outrider.mixers import AttentionLayer
from outrider.models.config import ConfigReader
from outrider.models.llama import Mistral


class TemperedMistral(Mistral):
    """Mistral whose queries may be scaled up with their position (`TemperedAttention`). They are scaled only if the
    rope's config has a strength for it."""

    strength = 0.0

    def read_rope(self, config: ConfigReader) -> RopeParams:
        rope = config.section_or_empty("rope_parameters")
        rope.passes_over("max_position_embeddings")  # of the model, once more
        self.strength = rope.get("llama_4_scaling_beta", float, 0.0)
        return super().read_rope(config)

    def make_rotary(self, rope: RopeParams, max_len: int | None) -> Rotary:
        made = super().make_rotary(rope, max_len)
        if not self.strength:
            return made
        return TemperedRotary(made, interval=rope.original_len, strength=self.strength, counts_itself=False,
                              max_len=max_len or self.max_positions)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        if not self.strength:
            return super().make_attention(layer)
        return TemperedAttention(layer, self.hidden_size, head_norm=None, **self.attention_options())


class Ministral3(TemperedMistral):
    """Model class for Ministral3ForCausalLM."""

    default_head_dim = 128
    default_theta = 1_000_000.0
    default_eps = 1e-5

    def read_rope(self, config: ConfigReader) -> RopeParams:
        if not config.has("rope_scaling"):
            config.required("rope_parameters", dict)  # transformers' default is a rope of one checkpoint
        return super().read_rope(config)
