"""Phi-3, Phi-3.5 and Phi-4: Llama with one tensor for q, k and v and one for gate and up. For long contexts each
frequency of the rope has its own divisor (longrope).

The length that an engine serves (`max_model_len`) selects the divisors. Beyond the original length the long divisors
are used for every text, because keys in the cache cannot change while a text grows.
"""

from __future__ import annotations

from outrider.layers import FeedForward, RopeParams, SelfAttention
from outrider.mixers import AttentionLayer
from outrider.models.config import ConfigReader
from outrider.models.hybrid import partial_rope
from outrider.models.llama import Mistral

OLD_TYPES = ("su", "yarn")  # what older files call longrope


class Phi3(Mistral):
    """Model class for Phi3ForCausalLM."""

    default_eps = 1e-5

    def read_rope(self, config: ConfigReader) -> RopeParams:
        config.passes_over("original_max_position_embeddings")  # of longrope, which reads it
        for key in ("full_attn_mod", "interpolate_factor"):
            config.must_equal(key, 1, default=1)
        for key in ("rope_scaling", "rope_parameters"):
            given = config.raw(key)
            if isinstance(given, dict) and given.get("rope_type", given.get("type")) in OLD_TYPES:
                config = config.with_values({key: {**given, "rope_type": "longrope", "type": "longrope"}})
        return partial_rope(config, self.sizes.head_dim, 1.0)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        return SelfAttention(layer, self.hidden_size, head_norm=None, is_packed=True, **self.attention_options())

    def make_feed_forward(self, index: int) -> FeedForward:
        return self.make_mlp(self.sizes.intermediate_size, is_packed=True)
