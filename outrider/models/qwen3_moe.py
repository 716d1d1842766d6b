"""Qwen3-MoE: Qwen3 with experts instead of the MLP in all layers, except those that the config leaves dense.

Experts are in `layers.moe`, which other families share."""

from __future__ import annotations

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import Experts, FeedForward, HeadNorm, MoE, PreNormLayer, RopeParams, Router, SelfAttention
from outrider.mixers import AttentionLayer
from outrider.models.base import Decoder
from outrider.models.config import ConfigReader, Sizes, read_rope, refuse_unsupported


class Qwen3Moe(Decoder):
    """Model class for Qwen3MoeForCausalLM."""

    has_turned_experts = False  # the files have one tensor of all experts for each projection, inputs before outputs
    default_theta = 10000.0  # for configs without a theta

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        sizes = Sizes.read(config)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.rotaries = [self.make_rotary(self.read_rope(config), max_len)]
        window = read_window(config)
        self.attention_layers = [self.attention_layer(index, window) for index in range(sizes.num_layers)]
        bias = config.get("attention_bias", bool, False)
        self.layers = [
            PreNormLayer(self.make_norm(), self._attention(layer, bias), self.make_norm(),
                         self._feed_forward(layer.index))
            for layer in self.attention_layers
        ]

    def _attention(self, layer: AttentionLayer, bias: bool) -> SelfAttention:
        norm = HeadNorm(layer.num_heads, layer.num_kv_heads, layer.head_dim, self.sizes.eps, dtype=self.dtype,
                        device=self.device)
        return SelfAttention(layer, self.sizes.hidden_size, qkv_bias=bias, out_bias=bias, head_norm=norm,
                             dtype=self.dtype, device=self.device)

    def _feed_forward(self, index: int) -> FeedForward:
        hidden_size, dtype, device = self.sizes.hidden_size, self.dtype, self.device
        if not is_sparse(self.config, index):
            return self.make_mlp(self.sizes.intermediate_size)
        rule = self.read_rule(self.config)
        width = self.config.required("moe_intermediate_size", int)
        return MoE(
            Router(index, hidden_size, rule, dtype=dtype, device=device),
            Experts(rule.num_experts, hidden_size, width, activation=self.activation,
                    is_fused=self.has_turned_experts, is_transposed=self.has_turned_experts, dtype=dtype,
                    device=device),
        )

    def read_rope(self, config: ConfigReader) -> RopeParams:
        return read_rope(config, self.sizes.head_dim, self.default_theta)

    def read_rule(self, config: ConfigReader) -> RouteRule:
        return read_rule(config)


def read_rule(config: ConfigReader) -> RouteRule:
    num_experts = config.required(_experts_key(config), int)
    top_k = config.required("num_experts_per_tok", int)
    if not 1 <= top_k <= num_experts:
        raise config.refusal("num_experts_per_tok", f"it must be from 1 to the number of experts ({num_experts})")
    return RouteRule(num_experts, top_k, renormalise=config.get("norm_topk_prob", bool, False))


def is_sparse(config: ConfigReader, index: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th layer has, except those in `mlp_only_layers`."""
    step = config.get("decoder_sparse_step", int, 1)
    if step < 1:
        raise config.refusal("decoder_sparse_step", "it must be at least 1")
    has_experts = config.get(_experts_key(config), int, 0) > 0
    return has_experts and (index + 1) % step == 0 and index not in config.get("mlp_only_layers", list, [])


def read_window(config: ConfigReader) -> int | None:
    """Read the window of all layers; None if they have full attention."""
    config.passes_over("max_window_layers")  # here all layers slide, or none
    if not config.get("use_sliding_window", bool, False):
        config.passes_over("sliding_window")
        return None
    window = config.optional("sliding_window", int)
    if window is not None and window < 1:
        raise config.refusal("sliding_window", "it must be at least 1")
    return window


def _experts_key(config: ConfigReader) -> str:
    """Return the key of the number of experts, which newer versions of transformers save under another name."""
    return "num_experts" if config.has("num_experts") else "num_local_experts"
