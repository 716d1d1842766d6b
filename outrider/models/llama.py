"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3.

There is one kind of layer. The architectures differ in biases, windows and norms of q and k.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.layers import (
    AttentionMLPLayer,
    DecoderLayer,
    FeedForward,
    GatedMLP,
    HeadNorm,
    LayerNames,
    PreNormLayer,
    RMSNorm,
    RopeParams,
    Rotary,
    SelfAttention,
    StillRotary,
)
from outrider.mixers import AttentionLayer
from outrider.models.base import Decoder
from outrider.models.config import (
    FULL,
    SLIDING,
    ConfigReader,
    Sizes,
    layer_windows,
    read_rope,
    refuse_unsupported,
)


class LlamaLayer(AttentionMLPLayer):
    """Norm, attention, norm, MLP; each half adds to the residual stream. EAGLE heads use this layer too."""

    def __init__(
        self,
        layer: AttentionLayer,
        sizes: Sizes,
        *,
        qkv_bias: bool,
        out_bias: bool,
        mlp_bias: bool,
        has_head_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        attention = SelfAttention(
            layer,
            sizes.hidden_size,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            head_norm=HeadNorm(*heads, sizes.eps, dtype=dtype, device=device) if has_head_norm else None,
            dtype=dtype,
            device=device,
        )
        input_norm, mlp_norm = (RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device) for _ in range(2))
        mlp = GatedMLP(
            sizes.hidden_size, sizes.intermediate_size, activation="silu", bias=mlp_bias, dtype=dtype, device=device
        )
        super().__init__(input_norm, attention, mlp_norm, mlp)


class Llama(Decoder):
    """Model class for LlamaForCausalLM, and base class of families with small differences. Subclasses override methods
    that read the config (`windows`, `biases`, ..) and methods that make parts (`make_...`)."""

    default_head_dim: int | None = None  # for configs without a head_dim; None: hidden_size / heads
    default_theta = 10000.0  # for configs without a theta
    default_eps = 1e-6  # of norms, for configs without one
    default_tied = False  # for configs that do not say whether the head is the embedding
    has_head_norm = False
    layer_names = LayerNames()
    rotates_pairs = False  # the checkpoint's rope turns neighbouring dimensions of a head together, not its halves

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        sizes = Sizes.read(config, head_dim=self.default_head_dim, is_tied=self.default_tied, eps=self.default_eps)
        scale = self.embedding_scale(config)
        super().__init__(config, sizes, dtype=dtype, device=device, embedding_scale=scale)
        rope = self.read_rope(config)
        self.paired_dim = rope.rotary_dim if self.rotates_pairs else 0
        self.max_positions = max(self.max_positions, rope.reach)
        self.rotaries = [self.make_rotary(rope, max_len)]
        windows = self.windows(config)
        self.without_rope = self.layers_without_rope(config, windows)
        if self.without_rope:
            self.rotaries.append(self.make_still_rotary(max_len or self.max_positions))
        self.attention_layers = [self.attention_layer(*layer) for layer in enumerate(windows)]
        self.layers = [self.make_layer(layer) for layer in self.attention_layers]

    def make_layer(self, layer: AttentionLayer) -> DecoderLayer:
        """Return the decoder layer around an attention layer, which may also be an extra layer of a draft head."""
        attention, mlp = self.make_attention(layer), self.make_feed_forward(layer.index)
        made: DecoderLayer
        if type(attention) is SelfAttention and isinstance(mlp, GatedMLP):
            made = AttentionMLPLayer(self.make_norm(), attention, self.make_norm(), mlp, self.layer_names)
        else:
            made = PreNormLayer(self.make_norm(), attention, self.make_norm(), mlp, self.layer_names)
        made.rotary = int(layer.index in self.without_rope)
        return made

    def make_still_rotary(self, max_len: int) -> Rotary:
        """Return a rope that rotates by zero, for layers without a rope."""
        return StillRotary(self.sizes.head_dim, max_len=max_len, dtype=self.dtype, device=self.device)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        return SelfAttention(layer, self.hidden_size, head_norm=self.make_head_norm(layer), **self.attention_options())

    def attention_options(self) -> dict[str, Any]:
        qkv_bias, out_bias, _ = self.biases(self.config)
        return {"qkv_bias": qkv_bias, "out_bias": out_bias, "paired_dim": self.paired_dim, "dtype": self.dtype,
                "device": self.device}

    def make_head_norm(self, layer: AttentionLayer) -> HeadNorm | None:
        if not self.has_head_norm:
            return None
        return HeadNorm(layer.num_heads, layer.num_kv_heads, layer.head_dim, self.sizes.eps, dtype=self.dtype,
                        device=self.device)

    def make_feed_forward(self, index: int) -> FeedForward:
        return self.make_mlp(self.sizes.intermediate_size, bias=self.biases(self.config)[2])

    def embedding_scale(self, config: ConfigReader) -> float | None:
        return None

    def read_rope(self, config: ConfigReader) -> RopeParams:
        return read_rope(config, self.sizes.head_dim, self.default_theta)

    def layers_without_rope(self, config: ConfigReader, windows: list[int | None]) -> set[int]:
        return set()

    def windows(self, config: ConfigReader) -> list[int | None]:
        num_layers = config.required("num_hidden_layers", int)
        layer_types = config.get("layer_types", list, [FULL] * num_layers)
        if SLIDING in layer_types:
            raise config.refusal("layer_types", f"layers of type {SLIDING} are not supported in this family")
        return layer_windows(config, layer_types)

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        """Return which matrices have a bias: (q, k and v; the attention's output; those of the MLP)."""
        attention = config.get("attention_bias", bool, False)
        return attention, attention, config.get("mlp_bias", bool, False)


class Mistral(Llama):
    def windows(self, config: ConfigReader) -> list[int | None]:
        """Return the window of each layer. If the config has a window, every layer slides, unless `layer_types` says
        which layers do."""
        kind = SLIDING if config.has("sliding_window") else FULL
        num_layers = config.required("num_hidden_layers", int)
        return layer_windows(config, config.get("layer_types", list, [kind] * num_layers))

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        config.must_equal("attention_bias", False, default=False)
        config.must_equal("mlp_bias", False, default=False)
        return False, False, False


class Qwen2(Llama):
    def windows(self, config: ConfigReader) -> list[int | None]:
        """Return the window of each layer: none unless `use_sliding_window` is set. Otherwise `layer_types` says which
        layers slide, or all from `max_window_layers` on do."""
        if not config.get("use_sliding_window", bool, False) or not config.has("sliding_window"):
            config.passes_over("sliding_window", "max_window_layers")
            return super().windows(config)
        num_layers = config.required("num_hidden_layers", int)
        first = config.get("max_window_layers", int, 28)
        kinds = [SLIDING if index >= first else FULL for index in range(num_layers)]
        return layer_windows(config, config.get("layer_types", list, kinds))

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        return True, False, False


class Qwen3(Qwen2):
    default_head_dim = 128
    has_head_norm = True

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, False)
        return attention, attention, False
