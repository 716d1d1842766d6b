"""OLMo Hybrid: gated delta layers with norms before their halves, and every fourth an attention layer of OLMo 3, with
norms behind them. Published models have no rope.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.layers import (
    DecoderLayer,
    GatedDeltaShape,
    LayerNames,
    PostNormLayer,
    PreNormLayer,
    Rotary,
    SplitGatedDelta,
    StillRotary,
    WidthNormAttention,
)
from outrider.models.config import FULL, ConfigReader, Sizes, read_rope, refuse_unsupported
from outrider.models.hybrid import HybridDecoder
from outrider.models.qwen3_next import read_kinds, read_shape

# Names of norms in the files, by which a layer's kind is not known.
NORMS = {".attention_layer_norm.": ".input_layernorm.", ".feedforward_layer_norm.": ".post_attention_layernorm."}
DELTA_EPS = 1e-5  # of the norms of gated delta heads, whatever the model's own is
LARGEST_BETA = 2.0  # of a model whose states may turn around


class OlmoHybrid(HybridDecoder):
    """Model class for OlmoHybridForCausalLM."""

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config.passes_over("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
                           "linear_dt_init_floor")  # of training
        sizes = Sizes.read(config)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.rotaries = [self._read_rotary(max_len)]
        kinds = read_kinds(config)
        self.attention_layers = [self.attention_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        deltas = {index: self._delta(index) for index, kind in enumerate(kinds) if kind != FULL}
        self.recurrent_layers = {index: delta.mixer for index, delta in deltas.items()}
        self.layers = [self._delta_layer(deltas[index]) if index in deltas else self._attention_layer(index)
                       for index in range(sizes.num_layers)]

    def slot_name(self, name: str) -> str:
        return next((name.replace(theirs, own) for theirs, own in NORMS.items() if theirs in name), name)

    def _read_rotary(self, max_len: int | None) -> Rotary:
        """Return the rope, or one that rotates by zero for a config whose theta is null."""
        config = self.config
        rope = config.section_or_empty("rope_parameters")
        rope.passes_over("rope_type")  # without a rope its type says nothing
        owner = rope if "rope_theta" in rope.values else config
        if "rope_theta" in owner.values and not owner.has("rope_theta"):
            return StillRotary(self.sizes.head_dim, max_len=max_len or self.max_positions, dtype=self.dtype,
                               device=self.device)
        return self.make_rotary(read_rope(config, self.sizes.head_dim), max_len)

    def _delta(self, index: int) -> SplitGatedDelta:
        return SplitGatedDelta(index, self.hidden_size, self._read_shape(), DELTA_EPS, dtype=self.dtype,
                               device=self.device)

    def _read_shape(self) -> GatedDeltaShape:
        """Return the sizes of a gated delta layer. Configs may leave them out, as transformers' config class does."""
        config, heads = self.config, self.sizes.num_heads
        key_heads = config.get("linear_num_key_heads", int, heads, least=1)
        key_dim = config.get("linear_key_head_dim", int, int(0.75 * self.hidden_size / key_heads), least=1)
        given = {"linear_num_key_heads": key_heads, "linear_key_head_dim": key_dim,
                 "linear_num_value_heads": config.get("linear_num_value_heads", int, heads, least=1),
                 "linear_value_head_dim": config.get("linear_value_head_dim", int, 2 * key_dim, least=1)}
        may_turn = config.get("linear_allow_neg_eigval", bool, True)
        return replace(read_shape(config.with_values(given)), max_beta=LARGEST_BETA if may_turn else 1.0)

    def _delta_layer(self, delta: SplitGatedDelta) -> DecoderLayer:
        return PreNormLayer(self.make_norm(), delta, self.make_norm(), self.make_mlp(self.sizes.intermediate_size),
                            LayerNames(mixer="linear_attn"))

    def _attention_layer(self, index: int) -> DecoderLayer:
        bias = self.config.get("attention_bias", bool, False)
        attention = WidthNormAttention(self.attention_layer(index), self.hidden_size, self.sizes.eps, qkv_bias=bias,
                                       out_bias=bias, dtype=self.dtype, device=self.device)
        return PostNormLayer(attention, self.make_norm(), self.make_mlp(self.sizes.intermediate_size),
                             self.make_norm())
