"""Bamba: Mamba-2 layers and a few attention layers with a rope on half of each head, all with a gated MLP."""

from __future__ import annotations

import torch

from outrider.layers import LayerNames, Mamba2, Mamba2Shape, PreNormLayer, SelfAttention, TokenMixer
from outrider.models.base import DecoderNames
from outrider.models.config import ConfigReader, Sizes, refuse_unsupported
from outrider.models.hybrid import HybridDecoder, partial_rope, read_limits

ROTARY_FACTOR = 0.5


class Bamba(HybridDecoder):
    """Model class for BambaForCausalLM."""

    names = DecoderNames(norm="model.final_layernorm")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        sizes = Sizes.read(config, eps=1e-5)
        super().__init__(config, sizes, dtype=dtype, device=device)
        rope = partial_rope(config, sizes.head_dim, ROTARY_FACTOR)
        config.must_equal("attn_rotary_emb", rope.rotary_dim, default=rope.rotary_dim)
        self.rotaries = [self.make_rotary(rope, max_len)]
        attending = set(config.get("attn_layer_indices", list[int], []))
        if attending - set(range(sizes.num_layers)):
            raise config.refusal("attn_layer_indices", f"its entries must be from 0 to {sizes.num_layers - 1}")
        self.attention_layers = [self.attention_layer(index) for index in sorted(attending)]
        mixers = [
            self._attention(index) if index in attending else self._mamba(index) for index in range(sizes.num_layers)
        ]
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, Mamba2)}
        self.layers = [self._layer(mixer) for mixer in mixers]

    def _layer(self, mixer: TokenMixer) -> PreNormLayer:
        name = "mamba" if isinstance(mixer, Mamba2) else "self_attn"
        mlp = self.make_mlp(self.sizes.intermediate_size, bias=self.config.get("mlp_bias", bool, False))
        names = LayerNames("input_layernorm", name, "pre_ff_layernorm", "feed_forward")
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), mlp, names)

    def _attention(self, index: int) -> SelfAttention:
        bias = self.config.get("attention_bias", bool, False)
        return SelfAttention(self.attention_layer(index), self.sizes.hidden_size, qkv_bias=bias, out_bias=bias,
                             head_norm=None, dtype=self.dtype, device=self.device)

    def _mamba(self, index: int) -> Mamba2:
        shape = read_shape(self.config, self.sizes.hidden_size)
        return Mamba2(index, self.sizes.hidden_size, shape, self.sizes.eps, dtype=self.dtype, device=self.device)


# Keys of `read_shape`, which say nothing about a model without Mamba-2 layers.
SHAPE_KEYS = ("mamba_n_heads", "mamba_expand", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
              "mamba_conv_bias", "mamba_proj_bias", "time_step_limit")


def read_shape(config: ConfigReader, hidden_size: int) -> Mamba2Shape:
    num_heads = config.required("mamba_n_heads", int)
    inner_size = config.get("mamba_expand", int, 2, least=1) * hidden_size
    if inner_size % num_heads:
        raise config.refusal("mamba_n_heads", f"it must divide mamba_expand * hidden_size ({inner_size})")
    config.must_equal("mamba_d_head", "auto", inner_size // num_heads, default="auto")
    num_groups = config.get("mamba_n_groups", int, 1)
    if num_groups < 1 or num_heads % num_groups:
        raise config.refusal("mamba_n_groups", f"it must divide mamba_n_heads ({num_heads})")
    return Mamba2Shape(
        num_heads=num_heads,
        head_dim=inner_size // num_heads,
        num_groups=num_groups,
        state_size=config.required("mamba_d_state", int),
        conv_width=config.get("mamba_d_conv", int, 4, least=1),
        conv_bias=config.get("mamba_conv_bias", bool, True),
        proj_bias=config.get("mamba_proj_bias", bool, False),
        dt_limits=read_limits(config, "time_step_limit"),
    )
