"""Falcon-H1: attention and Mamba-2 side by side in every layer, both reading one norm; then a gated MLP. Factors from
the config scale the input and output of each part.

A layer keeps keys and values and also a recurrent state. Its Mamba-2 part has a separate layer index, after those of
all attention layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.formats import activate
from outrider.kernels import ops
from outrider.layers import (
    Angles,
    GatedMLP,
    LayerNames,
    Mamba2,
    Mamba2Shape,
    Module,
    PreNormLayer,
    SelfAttention,
    StepContext,
    TokenMixer,
)
from outrider.mixers import AttentionLayer, RecurrentLayer
from outrider.models.base import DecoderNames
from outrider.models.config import ConfigReader, Sizes, read_rope, refuse_unsupported
from outrider.models.granite import read_factor
from outrider.models.hybrid import HybridDecoder, read_limits


class ScaledMamba2(Mamba2):
    """Mamba-2 with a factor for its input and one for each part of the first projection: z, x, B, C and time steps. The
    norm before the output may be missing; the gate is then applied without it."""

    def __init__(self, index: int, hidden_size: int, shape: Mamba2Shape, eps: float, *, has_norm: bool,
                 factors: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(index, hidden_size, shape, eps, dtype=dtype, device=device)
        self.has_norm, self.factors, self.dtype, self.device = has_norm, factors, dtype, device

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [part for part in super().parts() if self.has_norm or part[1] is not self.norm]

    def finalize(self) -> None:
        super().finalize()
        shape = self.mixer.shape
        widths = (shape.inner_size, shape.inner_size, shape.group_width, shape.group_width, shape.num_heads)
        # [features of the first projection that this rank holds]
        self.column_factors = torch.cat([torch.full((width,), factor, dtype=self.dtype, device=self.device)
                                         for width, factor in zip(widths, self.factors[1:], strict=True)])

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        projected = self.enter(x * self.factors[0], context) * self.column_factors
        z, conv_in, dt = projected.split(self.sizes, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        y = recurrent(conv_in, (dt,))
        return self.out(self.norm(y, z) if self.has_norm else ops.silu_mul(torch.cat((z, y), dim=1)), context)


class SideBySide(TokenMixer):
    """The scaled sum of attention and Mamba-2 over the same token rows."""

    def __init__(self, attention: SelfAttention, mamba: ScaledMamba2, factors: tuple[float, float, float]) -> None:
        """factors: the multipliers of the attention's input, the attention's output and Mamba-2's output."""
        self.attention, self.mamba, self.factors = attention, mamba, factors

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("self_attn", self.attention), ("mamba", self.mamba)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        into, out, of_mamba = self.factors
        mixed = self.mamba(x, angles, context) * of_mamba
        return mixed.add_(self.attention(x * into, angles, context) * out)


class ScaledMLP(GatedMLP):
    """A gated MLP with a factor inside the gate's activation and one for the result."""

    factors = (1.0, 1.0)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        of_gate, of_result = self.factors
        gate_up = self.gate_up(x, context)
        gate_up[:, : gate_up.shape[1] // 2].mul_(of_gate)
        return self.down(activate(gate_up, self.activation), context).mul_(of_result)

    def add_to(self, residual: Tensor, x: Tensor, context: StepContext) -> None:
        residual.add_(self(x, context))


class FalconH1(HybridDecoder):
    """Model class for FalconH1ForCausalLM."""

    names = DecoderNames(norm="model.final_layernorm")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config.must_equal("mamba_use_mlp", True, default=True)
        config.must_equal("attn_layer_indices", None)
        config.passes_over("mlp_expansion_factor")  # the MLP's size is given
        sizes = Sizes.read(config, eps=1e-5)
        scale = read_factor(config, "embedding_multiplier")
        super().__init__(config, sizes, dtype=dtype, device=device, embedding_scale=scale)
        self.logit_scale = read_factor(config, "lm_head_multiplier")
        self.rotaries = [self.make_rotary(read_rope(config, sizes.head_dim), max_len)]
        self.attention_layers = [self.attention_layer(index) for index in range(sizes.num_layers)]
        mixers = [self._mixer(index) for index in range(sizes.num_layers)]
        self.recurrent_layers = {m.mamba.index: m.mamba.mixer for m in mixers}
        self.layers = [self._layer(mixer) for mixer in mixers]

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        """An attention layer. Its score scale includes the config's factor for the keys."""
        sizes, factor = self.sizes, read_factor(self.config, "key_multiplier")
        return AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim,
                              sizes.head_dim**-0.5 * factor, window)

    def _layer(self, mixer: SideBySide) -> PreNormLayer:
        mlp = ScaledMLP(self.hidden_size, self.sizes.intermediate_size, activation=self.activation,
                        bias=self.config.get("mlp_bias", bool, False), dtype=self.dtype, device=self.device)
        of_gate, of_result = read_factors(self.config, "mlp_multipliers", 2)
        mlp.factors = of_gate, of_result
        names = LayerNames("input_layernorm", "", "pre_ff_layernorm", "feed_forward")
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), mlp, names)

    def _mixer(self, index: int) -> SideBySide:
        config, hidden_size, dtype, device = self.config, self.sizes.hidden_size, self.dtype, self.device
        bias = config.get("attention_bias", bool, False)
        attention = SelfAttention(self.attention_layer(index), hidden_size, qkv_bias=bias, out_bias=bias,
                                  head_norm=None, dtype=dtype, device=device)
        has_norm = config.get("mamba_rms_norm", bool, False)
        if has_norm:
            config.must_equal("mamba_norm_before_gate", False, default=True)
        config.passes_over("mamba_norm_before_gate")  # without a norm there is no order
        factors = (read_factor(config, "ssm_in_multiplier"), *read_factors(config, "ssm_multipliers", 5))
        mamba = ScaledMamba2(self.num_layers + index, hidden_size, self._read_shape(has_norm), self.sizes.eps,
                             has_norm=has_norm, factors=factors, dtype=dtype, device=device)
        return SideBySide(attention, mamba, (read_factor(config, "attention_in_multiplier"),
                                             read_factor(config, "attention_out_multiplier"),
                                             read_factor(config, "ssm_out_multiplier")))

    def _read_shape(self, has_norm: bool) -> Mamba2Shape:
        config = self.config
        num_heads, num_groups = config.required("mamba_n_heads", int), config.get("mamba_n_groups", int, 1)
        inner_size = config.get("mamba_expand", int, 2, least=1) * self.sizes.hidden_size
        inner_size = config.get("mamba_d_ssm", int, inner_size, least=1)
        if inner_size % num_heads:
            raise config.refusal("mamba_n_heads", f"it must divide mamba_d_ssm ({inner_size})")
        config.must_equal("mamba_d_head", "auto", inner_size // num_heads, default="auto")
        if num_groups < 1 or num_heads % num_groups:
            raise config.refusal("mamba_n_groups", f"it must divide mamba_n_heads ({num_heads})")
        proj_bias = config.get("mamba_proj_bias", bool, False)
        config.must_equal("projectors_bias", proj_bias, default=False)
        return Mamba2Shape(num_heads, inner_size // num_heads, num_groups, config.required("mamba_d_state", int),
                           conv_width=config.get("mamba_d_conv", int, 4, least=1),
                           conv_bias=config.get("mamba_conv_bias", bool, True), proj_bias=proj_bias,
                           norm_groups=num_groups if has_norm else 1, dt_limits=read_limits(config, "time_step_limit"))


def read_factors(config: ConfigReader, key: str, count: int) -> list[float]:
    factors = config.get(key, list, [1.0] * count)
    if len(factors) != count or not all(isinstance(factor, int | float) for factor in factors):
        raise config.refusal(key, f"it must be a list of {count} numbers")
    return [float(factor) for factor in factors]
