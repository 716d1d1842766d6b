"""Command R, Command R+ and Command A: attention and MLP read the output of one norm, which subtracts the mean. The
rope rotates pairs of neighbouring dimensions.

In Command R7B and Command A (Cohere2) three layers of four have a window, and only these have a rope."""

from __future__ import annotations

import torch

from outrider.layers import (
    CenteredHeadNorm,
    CenteredNorm,
    CenteredNormAttention,
    DecoderLayer,
    ParallelLayer,
    RMSNorm,
    SelfAttention,
)
from outrider.mixers import AttentionLayer
from outrider.models.config import FULL, SLIDING, ConfigReader, layer_windows
from outrider.models.llama import Llama


class Cohere(Llama):
    """Model class for CohereForCausalLM."""

    default_tied = True
    default_theta = 500_000.0
    rotates_pairs = True

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config = config.with_values({"rms_norm_eps": config.get("layer_norm_eps", float, 1e-5)})
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)
        self.logit_scale = config.get("logit_scale", float, 0.0625)
        for key, only in (("position_embedding_type", "rope_gptj"), ("rotary_pct", 1.0), ("use_parallel_block", True),
                          ("use_gated_activation", True), ("use_embedding_sharing", self.sizes.is_tied),
                          ("order_of_interleaved_layers", "local_attn_first")):
            config.must_equal(key, only, default=only)
        config.passes_over("use_parallel_embedding")  # how the makers' ranks held the embedding

    def make_norm(self) -> RMSNorm:
        return CenteredNorm(self.hidden_size, self.sizes.eps, dtype=self.dtype, device=self.device)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        if not self.config.get("use_qk_norm", bool, False):
            return super().make_attention(layer)
        norm = CenteredHeadNorm(layer, self.sizes.eps, self.paired_dim, dtype=self.dtype, device=self.device)
        return CenteredNormAttention(layer, self.hidden_size, head_norm=norm, **self.attention_options())

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        made = ParallelLayer(self.make_norm(), self.make_attention(layer), self.make_feed_forward(layer.index))
        made.rotary = int(layer.index in self.without_rope)
        return made

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, False)
        return attention, attention, False


class Cohere2(Cohere):
    """Model class for Cohere2ForCausalLM."""

    default_theta = 10_000.0

    def windows(self, config: ConfigReader) -> list[int | None]:
        every = config.get("sliding_window_pattern", int, config.get("layer_switch", int, 4, least=1), least=1)
        kinds = [SLIDING if (index + 1) % every else FULL for index in range(self.num_layers)]
        return layer_windows(config, config.get("layer_types", list, kinds))

    def layers_without_rope(self, config: ConfigReader, windows: list[int | None]) -> set[int]:
        return {index for index, window in enumerate(windows) if window is None}

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        self.config.must_equal("use_qk_norm", False, default=False)
        return super().make_attention(layer)
