"""Qwen3-Next: gated delta layers, every fourth a gated attention layer, and experts beside a gated shared expert.

Qwen3.5's class derives from this one."""

from __future__ import annotations

import torch

from outrider.formats import HeadLayout
from outrider.layers import (
    DecoderLayer,
    Experts,
    FeedForward,
    FusedLinear,
    GatedDelta,
    GatedDeltaShape,
    HeadNorm,
    LayerNames,
    Linear,
    MoE,
    OutputGatedAttention,
    PreNormLayer,
    Router,
    TokenMixer,
)
from outrider.mixers import AttentionLayer
from outrider.models.config import FULL, ConfigReader, Sizes, refuse_unsupported
from outrider.models.hybrid import LINEAR, HybridDecoder, partial_rope
from outrider.models.qwen3_moe import is_sparse, read_rule

ROTARY_FACTOR = 0.25  # default for configs without one
# Keys of `read_shape`, which say nothing about a model without gated delta layers.
SHAPE_KEYS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
              "linear_conv_kernel_dim")


class GatedAttention(OutputGatedAttention):
    """Attention with an output scaled by a sigmoid. The files store q and gate head by head in `q_proj`; here all gates
    come before q, so that q and k heads are adjacent."""

    def __init__(self, layer: AttentionLayer, hidden_size: int, eps: float, *, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        norm = HeadNorm(*heads, eps, dtype=dtype, device=device, offset=True)
        super().__init__(layer, hidden_size, qkv_bias=bias, out_bias=bias, head_norm=norm, dtype=dtype, device=device)
        stored = self.qkv.stored | {"q_proj": 2 * layer.num_heads * layer.head_dim}
        layout = HeadLayout(layer.num_heads, (layer.head_dim, layer.head_dim), is_reversed=True)
        self.qkv = FusedLinear(hidden_size, stored, bias=bias, dtype=dtype, device=device, layouts={"q_proj": layout})


class Qwen3Next(HybridDecoder):
    """Model class for Qwen3NextForCausalLM."""

    norm_offset = True
    is_interleaved = True  # projections of gated delta layers in the files: two, key head by key head

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config.must_equal("attn_output_gate", True, default=True)
        config.must_equal("output_gate_type", "swish", "silu", default="swish")
        config = config.with_values({"intermediate_size": config.get("intermediate_size", int, 0)})
        sizes = Sizes.read(config, head_dim=256)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.rotaries = [self.make_rotary(partial_rope(config, sizes.head_dim, ROTARY_FACTOR), max_len)]
        kinds = read_kinds(config)
        self.attention_layers = [self.attention_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        mixers = [self._delta(index) if kind == LINEAR else self._attention(index) for index, kind in enumerate(kinds)]
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, GatedDelta)}
        mlps = [self._feed_forward(index, is_sparse(config, index)) for index in range(sizes.num_layers)]
        self.layers = [self._layer(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]

    def full_layers(self, index: int) -> tuple[list[DecoderLayer], list[AttentionLayer]]:
        """Return one more layer with attention, and with experts if any layer has them."""
        all_sparse = self.config.with_values({"decoder_sparse_step": 1, "mlp_only_layers": []})
        mlp = self._feed_forward(index, is_sparse(all_sparse, index))
        return [self._layer(self._attention(index), mlp)], [self.attention_layer(index)]

    def _layer(self, mixer: TokenMixer, mlp: FeedForward) -> PreNormLayer:
        name = "linear_attn" if isinstance(mixer, GatedDelta) else "self_attn"
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), mlp, LayerNames(mixer=name))

    def _feed_forward(self, index: int, has_experts: bool) -> FeedForward:
        if not has_experts:
            return self.make_mlp(self.config.required("intermediate_size", int))
        return make_experts(self, index)

    def _attention(self, index: int) -> GatedAttention:
        bias = self.config.get("attention_bias", bool, False)
        return GatedAttention(self.attention_layer(index), self.sizes.hidden_size, self.sizes.eps, bias=bias,
                              dtype=self.dtype, device=self.device)

    def _delta(self, index: int) -> GatedDelta:
        return GatedDelta(index, self.sizes.hidden_size, read_shape(self.config), self.sizes.eps,
                          is_interleaved=self.is_interleaved, dtype=self.dtype, device=self.device)


def make_experts(model: HybridDecoder, index: int) -> MoE:
    """Return the experts of layer `index`, beside a shared expert with its own gate."""
    config, hidden_size, dtype, device = model.config, model.hidden_size, model.dtype, model.device
    rule = read_rule(config.with_values({"norm_topk_prob": config.get("norm_topk_prob", bool, True)}))
    width = config.required("moe_intermediate_size", int)
    shared = config.required("shared_expert_intermediate_size", int)
    return MoE(
        Router(index, hidden_size, rule, dtype=dtype, device=device),
        Experts(rule.num_experts, hidden_size, width, activation=model.activation, dtype=dtype, device=device),
        shared=model.make_mlp(shared),
        shared_name="shared_expert",
        shared_gate=Linear(hidden_size, 1, bias=False, dtype=dtype, device=device),
    )


def read_kinds(config: ConfigReader) -> list[str]:
    """Read the kind of each layer: `layer_types`, or attention in every `full_attention_interval`-th layer."""
    num_layers = config.required("num_hidden_layers", int)
    interval = config.get("full_attention_interval", int, 4, least=1)
    default = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers)]
    kinds = config.get("layer_types", list[str], default)
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers: {LINEAR} "
                                            f"or {FULL}")
    if LINEAR not in kinds:
        config.passes_over(*SHAPE_KEYS)
    return kinds


def read_shape(config: ConfigReader) -> GatedDeltaShape:
    shape = GatedDeltaShape(
        num_key_heads=config.required("linear_num_key_heads", int),
        num_value_heads=config.required("linear_num_value_heads", int),
        key_dim=config.required("linear_key_head_dim", int),
        value_dim=config.required("linear_value_head_dim", int),
        conv_width=config.get("linear_conv_kernel_dim", int, 4, least=1),
    )
    if shape.num_key_heads < 1 or shape.num_value_heads % shape.num_key_heads:
        raise config.refusal("linear_num_key_heads", "it must divide linear_num_value_heads")
    return shape
