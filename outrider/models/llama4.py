"""Llama 4: three layers of four see only their chunk of the text and have a rope; the fourth sees all of it without
one.

In layers without a rope, queries are scaled by a factor that grows with the position. Layers with a rope norm the heads
of q and k. An expert's input is the token row times the expert's score; a shared expert runs beside. Only the text part
of the published checkpoints is served, not images."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import (
    Experts,
    FeedForward,
    HeadNorm,
    LayerNames,
    RopeParams,
    Rotary,
    Router,
    ScaledInputMoE,
    SelfAttention,
    TemperedAttention,
    TemperedRotary,
    Unrotated,
    UnscaledHeadNorm,
)
from outrider.mixers import AttentionLayer
from outrider.models.conditional import LanguagePart
from outrider.models.config import FULL, ConfigReader
from outrider.models.llama import Llama
from outrider.models.sources.quantization import KEY

CHUNKED = "chunked_attention"
UNSTRETCHED = ("default", "linear", "llama3")  # ropes that keep the length of what they turn


class Llama4(Llama):
    """Model class for Llama4ForCausalLM."""

    default_head_dim = 128
    default_theta = 500_000.0
    default_eps = 1e-5
    layer_names = LayerNames(mlp="feed_forward")
    rotates_pairs = True

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config.passes_over("for_llm_compressor")  # how a tool was to convert the experts
        # A model may have no layer with experts, or none without a rope, whose queries are tempered.
        config.passes_over("num_local_experts", "num_experts_per_tok", "floor_scale", "attn_scale")
        self.has_head_norm = config.get("use_qk_norm", bool, True)
        # The first files have the number of layers between two that are tempered.
        tempered = config.raw("attn_temperature_tuning")
        self.is_tempered = tempered is None or bool(tempered)
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def read_rope(self, config: ConfigReader) -> RopeParams:
        rope = super().read_rope(config)
        if rope.kind not in UNSTRETCHED:  # the norm behind it would undo its magnitude, and ours comes before it
            key = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
            raise config.refusal(key, f"supported rope types in this family: {', '.join(UNSTRETCHED)}")
        return rope

    def layers_without_rope(self, config: ConfigReader, windows: list[int | None]) -> set[int]:
        """Return the layers without a rope: the zeros of `no_rope_layers`, or every n-th layer if this list is empty,
        as in the first files."""
        interval = config.get("no_rope_layer_interval", int, 4, least=1)
        usual = [int((index + 1) % interval != 0) for index in range(self.num_layers)]
        turned = config.get("no_rope_layers", list[int], usual) or usual
        if len(turned) < self.num_layers:
            raise config.refusal("no_rope_layers", f"it must have one entry for each of the {self.num_layers} layers "
                                                   "(num_hidden_layers)")
        return {index for index in range(self.num_layers) if not turned[index]}

    def windows(self, config: ConfigReader) -> list[int | None]:
        """Return the chunk size of each layer. None for layers that see the whole text."""
        unturned = self.layers_without_rope(config, [])
        usual = [FULL if index in unturned else CHUNKED for index in range(self.num_layers)]
        kinds = config.get("layer_types", list, usual)
        if len(kinds) != self.num_layers or any(kind not in (FULL, CHUNKED) for kind in kinds):
            raise config.refusal("layer_types", f"it must list the kind of each of the {self.num_layers} layers: "
                                                f"{FULL} or {CHUNKED}")
        chunk = config.required("attention_chunk_size", int) if CHUNKED in kinds else None
        config.passes_over("attention_chunk_size")
        return [chunk if kind == CHUNKED else None for kind in kinds]

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        return replace(super().attention_layer(index, window), is_chunked=window is not None)

    def make_still_rotary(self, max_len: int) -> Rotary:
        interval = self.config.get("floor_scale", int, 8192, least=1)
        strength = self.config.get("attn_scale", float, 0.1)
        rope = Unrotated(self.sizes.head_dim, dtype=self.dtype, device=self.device)
        if not self.is_tempered:
            return rope
        return TemperedRotary(rope, interval=interval, strength=strength, counts_itself=True, max_len=max_len)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        if layer.index not in self.without_rope or not self.is_tempered:
            return super().make_attention(layer)
        return TemperedAttention(layer, self.hidden_size, head_norm=None, **self.attention_options())

    def make_head_norm(self, layer: AttentionLayer) -> HeadNorm | None:
        if not self.has_head_norm or layer.index in self.without_rope:
            return None
        return UnscaledHeadNorm(layer.num_heads, layer.num_kv_heads, layer.head_dim, self.sizes.eps, dtype=self.dtype,
                                device=self.device)

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, False)
        return attention, attention, False

    def make_feed_forward(self, index: int) -> FeedForward:
        config = self.config
        step = config.get("interleave_moe_layer_step", int, 1, least=1)
        sparse = config.get("moe_layers", list[int], [*range(step - 1, self.num_layers, step)])
        width = config.required("intermediate_size_mlp", int)
        if index not in sparse:
            return self.make_mlp(width)
        num_experts = config.required("num_local_experts", int)
        top_k = config.get("num_experts_per_tok", int, 1, least=1)
        if top_k > num_experts:
            raise config.refusal("num_experts_per_tok", f"it must be at most num_local_experts ({num_experts})")
        rule = RouteRule(num_experts, top_k, scoring="sigmoid", renormalise=False)
        # Tools that quantise the model store each expert's matrices by themselves, output by input.
        is_fused = not config.has(KEY)
        return ScaledInputMoE(
            Router(index, self.hidden_size, rule, dtype=self.dtype, device=self.device),
            Experts(num_experts, self.hidden_size, self.sizes.intermediate_size, activation=self.activation,
                    is_fused=is_fused, is_transposed=is_fused, dtype=self.dtype, device=self.device),
            shared=self.make_mlp(self.sizes.intermediate_size), shared_name="shared_expert", router_name="router",
        )


class Llama4Conditional(LanguagePart, Llama4):
    """Model class for Llama4ForConditionalGeneration."""
