"""Granite 4 hybrid: Mamba-2 layers and a few attention layers, mostly without positions, with the factors of Granite 3;
a shared MLP in every layer, with or without experts beside it.

Its files have their own names for the parts of MLPs and experts, which `slot_name` translates.
"""

from __future__ import annotations

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import (
    Experts,
    FeedForward,
    GatedMLP,
    LayerNames,
    Mamba2,
    MoE,
    RopeParams,
    Rotary,
    Router,
    ScaledLayer,
    SelfAttention,
    TokenMixer,
)
from outrider.mixers import AttentionLayer
from outrider.models.bamba import SHAPE_KEYS, read_shape
from outrider.models.config import FULL, ConfigReader, Sizes, read_rope, refuse_unsupported
from outrider.models.granite import read_factor
from outrider.models.hybrid import LINEAR, HybridDecoder
from outrider.models.nemotron_h import OLD_NAMES, UnplacedAttention

EXPERTS, SHARED = "block_sparse_moe", "shared_mlp"
EXPERT_TENSORS = {"router.layer.weight": "gate.weight", "router.weight": "gate.weight",
                  "input_linear.weight": "experts.gate_up_proj",
                  "output_linear.weight": "experts.down_proj"}
MLP_TENSORS = {"input_linear.weight": "gate_up_proj.weight", "output_linear.weight": "down_proj.weight"}


class GraniteHybrid(HybridDecoder):
    """Model class for GraniteMoeHybridForCausalLM."""

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config = config.with_defaults({"num_local_experts": 8})  # small models name 0
        config.must_equal("normalization_function", "rmsnorm", default="rmsnorm")
        if not config.get("num_local_experts", int, 0):
            config.passes_over("num_experts_per_tok", "intermediate_size")
        sizes = Sizes.read(config.with_values({"intermediate_size": config.get("intermediate_size", int, 0)}))
        scale = read_factor(config, "embedding_multiplier")
        super().__init__(config, sizes, dtype=dtype, device=device, embedding_scale=scale)
        self.logit_scale = 1 / read_factor(config, "logits_scaling")
        self.score_scale = read_factor(config, "attention_multiplier")
        self.num_experts = config.get("num_local_experts", int, 0)
        self.is_placed = config.must_equal("position_embedding_type", "rope", "nope", None) == "rope"
        self.rotaries = [self._read_rotary(max_len)]
        kinds = self._read_kinds()
        if LINEAR not in kinds:  # the small dense models of the family attend in every layer
            config.passes_over(*SHAPE_KEYS)
        self.attention_layers = [self.attention_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        mixers = [self._mamba(i) if kind == LINEAR else self._attention(i) for i, kind in enumerate(kinds)]
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, Mamba2)}
        self.layers = [self._layer(index, mixer) for index, mixer in enumerate(mixers)]

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        sizes = self.sizes
        return AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, self.score_scale, window)

    def slot_name(self, name: str) -> str:
        prefix, found, rest = name.partition(f".{EXPERTS}.")
        if found and rest in EXPERT_TENSORS:
            return f"{prefix}.{EXPERTS}.{EXPERT_TENSORS[rest]}"
        prefix, found, rest = name.partition(f".{SHARED}.")
        if found and rest in MLP_TENSORS:
            owner = f"{EXPERTS}.{SHARED}" if self.num_experts else SHARED
            return f"{prefix}.{owner}.{MLP_TENSORS[rest]}"
        return name

    def _read_rotary(self, max_len: int | None) -> Rotary:
        if self.is_placed:
            return self.make_rotary(read_rope(self.config, self.sizes.head_dim), max_len)
        self.config.passes_over("rope_theta", "rope_scaling", "rope_parameters")
        # A rope of no dimensions: layers are given angles and ignore them.
        return self.make_rotary(RopeParams("default", 1.0, 0, self.sizes.max_positions), max_len)

    def _read_kinds(self) -> list[str]:
        """Read the kind of each layer: `layer_types`, or `layers_block_type` in other files."""
        config, num_layers = self.config, self.num_layers
        key = "layer_types" if config.has("layer_types") else "layers_block_type"
        config.passes_over("layers_block_type")  # the other key wins
        kinds = [OLD_NAMES.get(kind, kind) for kind in config.get(key, list[str], [LINEAR] * num_layers)]
        if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
            raise config.refusal(key, f"it must list the kind of each of the {num_layers} layers: mamba or attention")
        return kinds

    def _layer(self, index: int, mixer: TokenMixer) -> ScaledLayer:
        names = LayerNames(mixer="mamba" if isinstance(mixer, Mamba2) else "self_attn",
                           mlp=EXPERTS if self.num_experts else SHARED)
        return ScaledLayer(self.make_norm(), mixer, self.make_norm(), self._feed_forward(index), names,
                           factor=read_factor(self.config, "residual_multiplier"))

    def _feed_forward(self, index: int) -> FeedForward:
        config, hidden_size, dtype, device = self.config, self.sizes.hidden_size, self.dtype, self.device
        shared = GatedMLP(hidden_size, config.required("shared_intermediate_size", int), activation=self.activation,
                          bias=False, is_packed=True, dtype=dtype, device=device)
        if not self.num_experts:
            return shared
        top_k = config.required("num_experts_per_tok", int)
        if top_k > self.num_experts:
            raise config.refusal("num_experts_per_tok", "it must be at most the number of experts "
                                                        f"({self.num_experts})")
        rule = RouteRule(self.num_experts, top_k, scoring="softmax", renormalise=True)
        experts = Experts(self.num_experts, hidden_size, config.required("intermediate_size", int),
                          activation=self.activation, dtype=dtype, device=device)
        return MoE(Router(index, hidden_size, rule, dtype=dtype, device=device), experts, shared=shared,
                   shared_name=SHARED)

    def _attention(self, index: int) -> SelfAttention:
        bias = self.config.get("attention_bias", bool, False)
        block = SelfAttention if self.is_placed else UnplacedAttention
        return block(self.attention_layer(index), self.sizes.hidden_size, qkv_bias=bias, out_bias=bias, head_norm=None,
                     dtype=self.dtype, device=self.device)

    def _mamba(self, index: int) -> Mamba2:
        shape = read_shape(self.config, self.sizes.hidden_size)
        return Mamba2(index, self.sizes.hidden_size, shape, self.sizes.eps, dtype=self.dtype, device=self.device)
