"""The Mamba-2 layer: one projection to gate, convolved inputs and time steps, the mixer, a gated group norm, output.

Knows the tensors' names below its prefix; which layers of a model are of this kind is the model's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.formats import LinearFormat
from outrider.kernels.recurrent import mamba2_scan, mamba2_step
from outrider.layers.base import Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import Linear
from outrider.layers.recurrent import ConvMixer, GatedNorm
from outrider.layers.rotary import Angles
from outrider.mixers import Gates, MixerParams, RecurrentLayer


@dataclass(frozen=True)
class Mamba2Shape:
    num_heads: int
    head_dim: int
    num_groups: int  # heads of a group share B and C
    state_size: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Width of B, and of C, over all groups."""
        return self.num_groups * self.state_size


class Mamba2Mixer(ConvMixer):
    """Inputs of the convolution are x | B | C; the gate is dt."""

    def __init__(self, shape: Mamba2Shape, *, dtype: torch.dtype, device: torch.device) -> None:
        spec = RecurrentSpec(
            conv_dim=shape.inner_size + 2 * shape.group_width,
            conv_width=shape.conv_width,
            state_shape=(shape.num_heads, shape.head_dim, shape.state_size),
            gate_sizes=(shape.num_heads,),
            out_dim=shape.inner_size,
            itemsize=dtype.itemsize,
        )
        super().__init__(spec, conv_bias=shape.conv_bias, dtype=dtype, device=device)
        self.shape = shape
        self.skip = torch.empty(self.dt_bias.shape, dtype=self.dt_bias.dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("D", Parameter(self.skip))]

    def inputs(self, convolved: Tensor, gates: Gates) -> tuple[Tensor, ...]:
        shape = self.shape
        x, b, c = convolved.split((shape.inner_size, shape.group_width, shape.group_width), dim=-1)
        dt = F.softplus(gates[0] + self.dt_bias).clamp(*shape.dt_limits)
        x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
        return x, dt, b.unflatten(-1, (shape.num_groups, -1)), c.unflatten(-1, (shape.num_groups, -1))

    def step_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = inputs
        return mamba2_step(state, x, dt, b, c, self.decay, self.skip)

    def scan_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = inputs
        return mamba2_scan(state, x, dt, b, c, self.decay, self.skip)

    def kernel_params(self) -> MixerParams | None:
        return MixerParams("mamba2", self.conv_weight, self.conv_bias, self.dt_bias, self.decay, self.shape.num_groups,
                           self.skip, self.shape.dt_limits)


class Mamba2(TokenMixer):
    def __init__(self, index: int, hidden_size: int, shape: Mamba2Shape, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.index = index
        self.mixer = Mamba2Mixer(shape, dtype=dtype, device=device)
        inner = shape.inner_size
        self.sizes = (inner, self.mixer.spec.conv_dim, shape.num_heads)
        self.enter = Linear(hidden_size, sum(self.sizes), bias=shape.proj_bias, dtype=dtype, device=device)
        self.norm = GatedNorm(inner, inner // shape.norm_groups, eps, gate_first=True, dtype=dtype, device=device)
        self.out = Linear(inner, hidden_size, bias=shape.proj_bias, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("in_proj", self.enter), ("", self.mixer), ("norm", self.norm), ("out_proj", self.out)

    def readers(self) -> Sequence[LinearFormat]:
        return (self.enter.format,)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """x: [tokens, hidden]. Positions do not matter."""
        z, conv_in, dt = self.enter(x, context).split(self.sizes, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (dt,)), z), context)
