"""The gated delta layer of Qwen3-Next and Qwen3.5: one projection, the mixer, a gated norm of each head, output.

The projection's rows have the order q | k | v | z | b | a. Files of Qwen3-Next hold them key head by key head, which
the weight slots undo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.formats import HeadLayout
from outrider.kernels.recurrent import delta_scan, delta_step
from outrider.layers.base import Module, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.recurrent import ConvMixer, GatedNorm
from outrider.layers.rotary import Angles
from outrider.mixers import Gates, MixerParams, RecurrentLayer


@dataclass(frozen=True)
class GatedDeltaShape:
    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads: neighbours share a key head
    key_dim: int  # size of one key head
    value_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim


class GatedDeltaMixer(ConvMixer):
    """Inputs of the convolution are q | k | v; the gates are a (of the decay) and b (of the correction)."""

    def __init__(self, shape: GatedDeltaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        spec = RecurrentSpec(
            conv_dim=2 * shape.key_size + shape.value_size,
            conv_width=shape.conv_width,
            state_shape=(shape.num_value_heads, shape.value_dim, shape.key_dim),
            gate_sizes=(shape.num_value_heads, shape.num_value_heads),
            out_dim=shape.value_size,
            itemsize=dtype.itemsize,
        )
        super().__init__(spec, conv_bias=False, dtype=dtype, device=device)
        self.shape = shape

    def inputs(self, convolved: Tensor, gates: Gates) -> tuple[Tensor, ...]:
        shape = self.shape
        q, k, v = convolved.split((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        q, k = (part.unflatten(-1, (shape.num_key_heads, shape.key_dim)) for part in (q, k))
        a, b = gates
        g = self.decay * F.softplus(a + self.dt_bias)
        return q, k, v.unflatten(-1, (shape.num_value_heads, shape.value_dim)), g, b.sigmoid()

    def step_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(state, *inputs)

    def scan_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_scan(state, *inputs)

    def kernel_params(self) -> MixerParams | None:
        return MixerParams("delta", self.conv_weight, self.conv_bias, self.dt_bias, self.decay,
                           self.shape.num_key_heads)


class GatedDelta(TokenMixer):
    def __init__(self, index: int, hidden_size: int, shape: GatedDeltaShape, eps: float, *, is_interleaved: bool,
                 dtype: torch.dtype, device: torch.device) -> None:
        """is_interleaved: the checkpoint has two projections, each key head by key head, instead of four."""
        self.index = index
        self.mixer = GatedDeltaMixer(shape, dtype=dtype, device=device)
        heads, value_size = shape.num_value_heads, shape.value_size
        self.sizes = (self.mixer.spec.conv_dim, value_size, heads, heads)
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        stored, layouts = dict(zip(names, self.sizes, strict=True)), {}
        if is_interleaved:
            repeats = heads // shape.num_key_heads
            sizes = (shape.key_dim, shape.key_dim, repeats * shape.value_dim, repeats * shape.value_dim)
            stored = {"in_proj_qkvz": sum(self.sizes[:2]), "in_proj_ba": sum(self.sizes[2:])}
            layouts = {"in_proj_qkvz": HeadLayout(shape.num_key_heads, sizes),
                       "in_proj_ba": HeadLayout(shape.num_key_heads, (repeats, repeats))}
        self.enter = FusedLinear(hidden_size, stored, bias=False, dtype=dtype, device=device, layouts=layouts)
        self.norm = GatedNorm(shape.value_dim, shape.value_dim, eps, gate_first=False, dtype=dtype, device=device)
        self.out = Linear(value_size, hidden_size, bias=False, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("", self.enter), ("", self.mixer), ("norm", self.norm), ("out_proj", self.out)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """x: [tokens, hidden]. Positions do not matter."""
        conv_in, z, b, a = self.enter(x, context).split(self.sizes, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (a, b)), z), context)
