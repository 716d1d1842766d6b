"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3.

One kind of layer; the architectures differ in biases, windows and norms of q and k, which their configs switch on.
"""

from __future__ import annotations

import torch

from outrider.layers import AttentionMLPLayer, GatedMLP, HeadNorm, RMSNorm, SelfAttention
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
    """Norm, attention, norm, MLP; each half adds to the residual stream."""

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
    """LlamaForCausalLM, and the base of those that differ from it by a switch."""

    default_head_dim: int | None = None  # for configs without a head_dim; None: hidden_size / heads
    has_head_norm = False

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        sizes = Sizes.read(config, head_dim=self.default_head_dim)
        super().__init__(config, sizes, dtype=dtype, device=device)
        rope = read_rope(config, sizes.head_dim)
        self.max_positions = max(self.max_positions, rope.reach)
        self.rotaries = [self.make_rotary(rope, max_len)]
        self.attention_layers = [self.attention_layer(*layer) for layer in enumerate(self.windows(config))]
        qkv_bias, out_bias, mlp_bias = self.biases(config)
        self.layers = [
            LlamaLayer(
                layer,
                sizes,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                mlp_bias=mlp_bias,
                has_head_norm=self.has_head_norm,
                dtype=dtype,
                device=device,
            )
            for layer in self.attention_layers
        ]

    def windows(self, config: ConfigReader) -> list[int | None]:
        num_layers = config.required("num_hidden_layers", int)
        layer_types = config.get("layer_types", list, [FULL] * num_layers)
        if SLIDING in layer_types:
            raise config.refusal("layer_types", f"{SLIDING} is off in this model")
        return layer_windows(config, layer_types)

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        """Which products have a bias: q, k and v; the attention's output; the MLP."""
        attention = config.get("attention_bias", bool, False)
        return attention, attention, config.get("mlp_bias", bool, False)


class Mistral(Llama):
    def windows(self, config: ConfigReader) -> list[int | None]:
        """Every layer slides where there is a window, unless `layer_types` says which do."""
        kind = SLIDING if config.has("sliding_window") else FULL
        num_layers = config.required("num_hidden_layers", int)
        return layer_windows(config, config.get("layer_types", list, [kind] * num_layers))

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        config.must_equal("attention_bias", False, default=False)
        config.must_equal("mlp_bias", False, default=False)
        return False, False, False


class Qwen2(Llama):
    def windows(self, config: ConfigReader) -> list[int | None]:
        """`layer_types`, or all layers from `max_window_layers` on; none unless `use_sliding_window`."""
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
