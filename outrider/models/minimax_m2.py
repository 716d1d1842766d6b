"""MiniMax-M2: one norm over all q heads and one over all k heads, a rope on half of each head, and experts that are
chosen by corrected scores.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.layers import Experts, FeedForward, LayerNames, MoE, RopeParams, Router, SelfAttention, WidthNormAttention
from outrider.mixers import AttentionLayer
from outrider.models.config import ConfigReader
from outrider.models.hybrid import partial_rope
from outrider.models.llama import Llama
from outrider.models.mixtral import EXPERT_NAMES, SPARSE, published_name
from outrider.models.qwen3_moe import read_rule


class MiniMaxM2(Llama):
    """Model class for MiniMaxM2ForCausalLM."""

    default_head_dim = 128
    default_theta = 5_000_000.0
    layer_names = LayerNames(mlp=SPARSE)

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        for key, only in (("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid"),
                          ("use_routing_bias", True), ("shared_intermediate_size", 0), ("attn_window_size", None),
                          ("attention_bias", False), ("mlp_bias", False)):
            config.must_equal(key, only, default=only)
        kinds = config.get("attn_type_list", list[int], [])
        if set(kinds) - {1}:
            raise config.refusal("attn_type_list", "its entries must all be 1 (full attention)")
        for kind in ("full_attention", "linear_attention", "mlp"):
            for factor in ("alpha", "beta"):
                config.must_equal(f"layernorm_{kind}_{factor}", 1, default=1)
        # Modules that predict further tokens, which the published files lack, and parts that no layer has.
        config.passes_over("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size",
                           "shared_moe_mode", "swa_rope_theta")
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def read_rope(self, config: ConfigReader) -> RopeParams:
        head_dim = self.sizes.head_dim
        factor = config.get("rotary_dim", int, head_dim, least=2, most=head_dim) / head_dim
        theta = config.get("rope_theta", float, self.default_theta)
        return partial_rope(config.with_values({"rope_theta": theta}), head_dim, factor)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        return WidthNormAttention(layer, self.hidden_size, self.sizes.eps, **self.attention_options())

    def make_feed_forward(self, index: int) -> FeedForward:
        rule = replace(read_rule(self.config.with_values({"norm_topk_prob": True})), scoring="sigmoid")
        return MoE(
            Router(index, self.hidden_size, rule, has_bias=True, projection="gate", dtype=self.dtype,
                   device=self.device),
            Experts(rule.num_experts, self.hidden_size, self.sizes.intermediate_size, activation=self.activation,
                    names=EXPERT_NAMES, dtype=self.dtype, device=self.device),
            router_name="",
        )

    def slot_name(self, name: str) -> str:
        return published_name(name)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith("model.mtp_layers.")
