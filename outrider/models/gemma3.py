"""Gemma 3, text only: four norms a layer, and sliding and full layers with a different rope for each kind.

Checkpoints with a vision tower have another architecture name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.layers import (
    Angles,
    DecoderLayer,
    Delta,
    GatedMLP,
    HeadNorm,
    Module,
    RMSNorm,
    RopeParams,
    SelfAttention,
    StepContext,
    Unnormed,
)
from outrider.mixers import AttentionLayer
from outrider.models.base import Decoder
from outrider.models.config import (
    FULL,
    LEAST_SOFTCAP,
    SLIDING,
    ConfigReader,
    Sizes,
    layer_windows,
    refuse_unsupported,
    rope_params,
)

ACTIVATION = "gelu_pytorch_tanh"
ROPES = (FULL, SLIDING)  # the order of the model's rotaries
DEFAULT_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


class SandwichLayer(DecoderLayer):
    """Attention and MLP, each between two norms. The result of the second norm is added to the residual stream."""

    def __init__(self, attention: SelfAttention, mlp: GatedMLP, norms: Sequence[RMSNorm]) -> None:
        """norms: in the order in which they are applied."""
        self.attention, self.mlp = attention, mlp
        self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm = norms

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (
            ("input_layernorm", self.input_norm),
            ("self_attn", self.attention),
            ("post_attention_layernorm", self.attention_norm),
            ("pre_feedforward_layernorm", self.mlp_norm),
            ("mlp", self.mlp),
            ("post_feedforward_layernorm", self.output_norm),
        )

    def __call__(
        self, delta: Delta, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[Delta, torch.Tensor]:
        x, residual = self.input_norm.add_norm(delta, residual)
        attended = Unnormed(self.attention(x, angles, context), self.attention_norm.scale, self.attention_norm.eps)
        x, residual = self.mlp_norm.add_norm(attended, residual)
        return Unnormed(self.mlp(x, context), self.output_norm.scale, self.output_norm.eps), residual


class Gemma3Layer(SandwichLayer):
    def __init__(
        self, layer: AttentionLayer, sizes: Sizes, *, attention_bias: bool, has_head_norm: bool = True,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.rotary = ROPES.index(FULL if layer.window is None else SLIDING)
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        norm = HeadNorm(*heads, sizes.eps, dtype=dtype, device=device, offset=True) if has_head_norm else None
        attention = SelfAttention(layer, sizes.hidden_size, qkv_bias=attention_bias, out_bias=attention_bias,
                                  head_norm=norm, dtype=dtype, device=device)
        mlp = GatedMLP(sizes.hidden_size, sizes.intermediate_size, activation=ACTIVATION, bias=False, dtype=dtype,
                       device=device)
        super().__init__(attention, mlp, [RMSNorm(sizes.hidden_size, sizes.eps, dtype=dtype, device=device,
                                                  offset=True) for _ in range(4)])


class Gemma3(Decoder):
    """Model class for Gemma3ForCausalLM."""

    norm_offset = True
    has_head_norm = True
    sliding_pattern = 6  # for configs without one: every n-th layer has full attention
    default_softcaps: tuple[float | None, float | None] = (None, None)  # of logits and of scores, without the keys

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config, ACTIVATION, "hidden_activation")
        config.must_equal("use_bidirectional_attention", False, default=False)
        sizes = Sizes.read(config, head_dim=256, is_tied=True)
        super().__init__(config, sizes, dtype=dtype, device=device, embedding_scale=sizes.hidden_size**0.5)
        self.softcap = read_softcap(config, "final_logit_softcapping", self.default_softcaps[0])
        self.rotaries = [self.make_rotary(self.read_rope(config, kind), max_len) for kind in ROPES]
        scalar = config.get("query_pre_attn_scalar", float, 256.0)
        if scalar <= 0:
            raise config.refusal("query_pre_attn_scalar", "it must be greater than 0")
        softcap = read_softcap(config, "attn_logit_softcapping", self.default_softcaps[1])
        self.attention_layers = [
            AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, scalar**-0.5, window, softcap)
            for index, window in enumerate(read_windows(config, self.sliding_pattern))
        ]
        bias = config.get("attention_bias", bool, False)
        self.layers = [
            Gemma3Layer(layer, sizes, attention_bias=bias, has_head_norm=self.has_head_norm, dtype=dtype, device=device)
            for layer in self.attention_layers
        ]

    def read_rope(self, config: ConfigReader, kind: str) -> RopeParams:
        return read_rope(config, kind, self.sizes)


def read_softcap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """Read a soft cap. A null key means that there is none."""
    return config.optional(key, float, least=LEAST_SOFTCAP) if key in config.values else default


def read_windows(config: ConfigReader, every: int = 6) -> list[int | None]:
    """Read the windows from `layer_types`, or from the older `sliding_window_pattern`: every n-th layer has full
    attention."""
    num_layers = config.required("num_hidden_layers", int)
    own = config.get("_sliding_window_pattern", int, every, least=1)
    pattern = config.get("sliding_window_pattern", int, own, least=1)
    kinds = [SLIDING if (index + 1) % pattern else FULL for index in range(num_layers)]
    return layer_windows(config, config.get("layer_types", list, kinds))


def read_rope(config: ConfigReader, kind: str, sizes: Sizes) -> RopeParams:
    """Read the rope of a layer type from `rope_parameters`. Older configs have `rope_scaling` (for full layers only)
    and a theta for each type."""
    theta_key = "rope_theta" if kind == FULL else "rope_local_base_freq"
    theta = config.get(theta_key, float, DEFAULT_THETA[kind])
    rope = ConfigReader({}, f"{config.source}: rope")
    if config.raw("rope_parameters"):
        rope = config.section("rope_parameters").section_or_empty(kind)
    elif kind == FULL and config.raw("rope_scaling"):
        rope = config.section("rope_scaling")
    return rope_params(config, rope, sizes.head_dim, theta)
