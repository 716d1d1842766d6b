"""LFM2 and LFM2-MoE: short convolutions and a few attention layers with norms of q and k, all with a gated MLP. In the
sparse models all layers but the first have experts instead.

Files have their own names for the parts of attention, MLPs and experts, which `slot_name` translates.
"""

from __future__ import annotations

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import (
    Experts,
    FeedForward,
    HeadNorm,
    LayerNames,
    MoE,
    PreNormLayer,
    Router,
    SelfAttention,
    ShortConv,
    TokenMixer,
)
from outrider.models.base import DecoderNames
from outrider.models.config import FULL, ConfigReader, Sizes, read_rope, refuse_unsupported
from outrider.models.hybrid import HybridDecoder

CONV = "conv"
TENSORS = {".self_attn.out_proj.": ".self_attn.o_proj.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.",
           ".w2.": ".down_proj."}
BIAS = "expert_bias"  # in files beside the router, whose correction it is
ROPE_THETA = 1e6  # of configs without one


class Lfm2(HybridDecoder):
    """Model class for Lfm2ForCausalLM."""

    names = DecoderNames(norm="model.embedding_norm")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config = _in_common_words(config)
        sizes = Sizes.read(config, is_tied=True)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.rotaries = [self.make_rotary(read_rope(config, sizes.head_dim), max_len)]
        self.conv_width = config.get("conv_L_cache", int, 3, least=1)
        self.conv_bias = config.get("conv_bias", bool, False)
        kinds = self._read_kinds()
        self.attention_layers = [self.attention_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        mixers = [self._conv(i) if kind == CONV else self._attention(i) for i, kind in enumerate(kinds)]
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, ShortConv)}
        self.layers = [self._layer(mixer, self.make_feed_forward(index)) for index, mixer in enumerate(mixers)]

    def slot_name(self, name: str) -> str:
        return next((name.replace(theirs, own) for theirs, own in TENSORS.items() if theirs in name), name)

    def _read_kinds(self) -> list[str]:
        """Read the kind of each layer: `layer_types`, or attention in the layers of `full_attn_idxs`."""
        config, num_layers = self.config, self.num_layers
        attending = config.get("full_attn_idxs", list[int], list(range(num_layers)))
        kinds = config.get("layer_types", list[str], [FULL if i in attending else CONV for i in range(num_layers)])
        if len(kinds) != num_layers or set(kinds) - {CONV, FULL}:
            raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers: "
                                                f"{CONV} or {FULL}")
        return kinds

    def _layer(self, mixer: TokenMixer, feed_forward: FeedForward) -> PreNormLayer:
        name = "conv" if isinstance(mixer, ShortConv) else "self_attn"
        names = LayerNames("operator_norm", name, "ffn_norm", "feed_forward")
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), feed_forward, names)

    def make_feed_forward(self, index: int) -> FeedForward:
        return self.make_mlp(self._inner_size())

    def _inner_size(self) -> int:
        config, size = self.config, self.sizes.intermediate_size
        factor = config.get("block_ffn_dim_multiplier", float, 1.0)
        multiple = config.get("block_multiple_of", int, 256, least=1)
        if not config.get("block_auto_adjust_ff_dim", bool, True):
            return size
        return -(-int(factor * int(2 * size / 3)) // multiple) * multiple

    def _conv(self, index: int) -> ShortConv:
        return ShortConv(index, self.sizes.hidden_size, self.conv_width, bias=self.conv_bias, dtype=self.dtype,
                         device=self.device)

    def _attention(self, index: int) -> SelfAttention:
        sizes, dtype, device = self.sizes, self.dtype, self.device
        norm = HeadNorm(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.eps, dtype=dtype, device=device,
                        names=("q_layernorm", "k_layernorm"))
        return SelfAttention(self.attention_layer(index), sizes.hidden_size, qkv_bias=False, out_bias=False,
                             head_norm=norm, dtype=dtype, device=device)


class Lfm2Moe(Lfm2):
    """Model class for Lfm2MoeForCausalLM."""

    def slot_name(self, name: str) -> str:
        if name.endswith(f".feed_forward.{BIAS}"):
            return name.replace(f".{BIAS}", f".gate.{BIAS}")
        return super().slot_name(name)

    def make_feed_forward(self, index: int) -> FeedForward:
        config, options = self.config, {"dtype": self.dtype, "device": self.device}
        if index < config.get("num_dense_layers", int, 2):
            return self.make_mlp(self.sizes.intermediate_size)
        rule, width = self._read_rule(), config.required("moe_intermediate_size", int)
        has_bias = config.get("use_expert_bias", bool, True)
        router = Router(index, self.hidden_size, rule, has_bias=has_bias, bias_name=BIAS, **options)
        return MoE(router, Experts(rule.num_experts, self.hidden_size, width, activation=self.activation, **options))

    def _read_rule(self) -> RouteRule:
        config = self.config
        num_experts, top_k = config.required("num_experts", int), config.required("num_experts_per_tok", int)
        if top_k > num_experts:
            raise config.refusal("num_experts_per_tok", f"it must be at most num_experts ({num_experts})")
        return RouteRule(num_experts, top_k, scoring="sigmoid", renormalise=config.get("norm_topk_prob", bool, True),
                         scale=config.get("routed_scaling_factor", float, 1.0))


def _in_common_words(config: ConfigReader) -> ConfigReader:
    hidden_size, eps = config.required("hidden_size", int), config.get("norm_eps", float, 1e-5)
    for key, only in (("block_dim", hidden_size), ("conv_dim", hidden_size), ("conv_dim_out", hidden_size),
                      ("num_heads", config.required("num_attention_heads", int)), ("block_norm_eps", eps),
                      ("block_use_swiglu", True), ("use_pos_enc", True)):
        config.must_equal(key, only, default=only)
    config.passes_over("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init")
    # Older files have other names, which win.
    inner, tied = config.optional("block_ff_dim", int, least=1), config.optional("tie_embedding", bool)
    values: dict[str, object] = {"rms_norm_eps": eps}
    if inner is not None:
        config.passes_over("intermediate_size")
        values["intermediate_size"] = inner
    if tied is not None:
        config.passes_over("tie_word_embeddings")
        values["tie_word_embeddings"] = tied
    if not config.has("rope_theta") and not config.has("rope_parameters"):
        values["rope_theta"] = ROPE_THETA
    return config.with_values(values)
