"""Mistral 4: DeepSeek-V3's latent attention with queries that are scaled up with their position, and experts chosen by
a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from outrider.layers import (
    Angles,
    DecoderLayer,
    LatentAttention,
    PreNormLayer,
    RopeParams,
    Rotary,
    Router,
    TemperedRotary,
)
from outrider.layers.tempered_attention import TemperedAngles
from outrider.mixers import LatentLayer
from outrider.models.config import ConfigReader
from outrider.models.deepseek_v3 import DeepseekV3
from outrider.models.nemotron_h import read_rule

STRENGTH = "llama_4_scaling_beta"


class TemperedLatentAttention(LatentAttention):
    """Latent attention for layers with a `TemperedRotary`: it multiplies queries by their factors."""

    def scaled_queries(self, queries: torch.Tensor, angles: Angles) -> torch.Tensor:
        assert isinstance(angles, TemperedAngles)
        return queries.mul_(angles.query_factors)


class Mistral4(DeepseekV3):
    """Model class for Mistral4ForCausalLM."""

    num_predicted = 0
    defaults: ClassVar[Mapping[str, Any]] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    fixed = (("rope_interleave", True),)
    default_routed_scale = 1.0
    strength = 0.0

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        rope = config.section("rope_parameters")  # transformers' default is the rope of one checkpoint
        rope.passes_over("partial_rotary_factor", "max_position_embeddings")  # said by other keys
        self.strength = rope.get(STRENGTH, float, 0.0)
        plain = {key: value for key, value in rope.values.items() if key != "partial_rotary_factor"}
        # The head's size is a default of newer files that no layer has.
        config = config.with_values({"rope_parameters": plain, "head_dim": None})
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def make_rotary(self, rope: RopeParams, max_len: int | None) -> Rotary:
        made = super().make_rotary(rope, max_len)
        if not self.strength:
            return made
        return TemperedRotary(made, interval=rope.original_len, strength=self.strength, counts_itself=False,
                              max_len=max_len or self.max_positions)

    def layer(self, attention: LatentLayer, is_sparse: bool) -> DecoderLayer:
        if not self.strength:
            return super().layer(attention, is_sparse)
        mixer = TemperedLatentAttention(attention, self.shape, dtype=self.dtype, device=self.device)
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), self.feed_forward(attention.index, is_sparse))

    def router(self, index: int) -> Router:
        rule = replace(read_rule(self.config), scoring="softmax")
        return Router(index, self.hidden_size, rule, dtype=self.dtype, device=self.device)
