"""The Mamba-2 layer: one projection to gate, convolved inputs and time steps, the mixer, a gated group norm, output.

It declares the names of its tensors below its prefix. The model decides which of its layers are of this kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.core.ranks import ShardSize
from outrider.formats import InputShard, LinearFormat, OutputShard, PackedPart, RankGroup, Ranks
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
        """Return the number of features of B in all groups together. C has the same number."""
        return self.num_groups * self.state_size

    def spec(self, itemsize: int) -> RecurrentSpec:
        return RecurrentSpec(
            conv_dim=self.inner_size + 2 * self.group_width,
            conv_width=self.conv_width,
            state_shape=(self.num_heads, self.head_dim, self.state_size),
            gate_sizes=(self.num_heads,),
            out_dim=self.inner_size,
            itemsize=itemsize,
        )

    def segments(self, num_ranks: int) -> list[PackedPart]:
        """Return the segments of the convolution, x | B | C, with the equal pieces into which ranks divide each. With
        fewer groups than ranks, neighbouring ranks hold the same group."""
        groups = PackedPart(self.group_width, min(self.num_groups, num_ranks))
        return [PackedPart(self.inner_size), groups, groups]

    def of_rank(self, num_ranks: int) -> Mamba2Shape:
        """Return the shape of one rank's part, with heads divided among ranks."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=max(1, self.num_groups // num_ranks),
                       norm_groups=max(1, self.norm_groups // num_ranks))


class Mamba2Mixer(ConvMixer):
    """The Mamba-2 recurrence behind a convolution of x | B | C. The gate is dt."""

    def __init__(self, shape: Mamba2Shape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape.spec(dtype.itemsize), conv_bias=shape.conv_bias, dtype=dtype, device=device)
        self.shape = shape

    def _allocate(self, spec: RecurrentSpec) -> None:
        super()._allocate(spec)
        self.skip = torch.empty(self.dt_bias.shape, dtype=self.dt_bias.dtype, device=self.device)

    def keep_rank(self, ranks: Ranks) -> None:
        """Keep this rank's heads and the groups that they read."""
        segments = self.shape.segments(ranks.count)
        self.shape = self.shape.of_rank(ranks.count)
        self.keep_part(self.shape.spec(self.spec.itemsize), segments, ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("D", Parameter(self.skip, self.head_rows))]

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
        self.enter = Linear(hidden_size, sum(self.sizes), bias=shape.proj_bias, dtype=dtype, device=device)
        self.norm = GatedNorm(inner, inner // shape.norm_groups, eps, gate_first=True, dtype=dtype, device=device)
        self.out = Linear(inner, hidden_size, bias=shape.proj_bias, dtype=dtype, device=device)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the output features of the first projection: gate, inputs of the convolution, time steps."""
        shape = self.mixer.shape
        return shape.inner_size, self.mixer.spec.conv_dim, shape.num_heads

    def shard_sizes(self) -> Sequence[ShardSize]:
        shape = self.mixer.shape
        return (ShardSize(("mamba_num_heads", "mamba_n_heads"), shape.num_heads),
                ShardSize(("n_groups", "mamba_n_groups"), shape.num_groups, may_copy=True))

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's heads in every segment of the first projection and of the convolution."""
        ranks, shape = Ranks.from_group(group), self.mixer.shape
        segments = [PackedPart(shape.inner_size), *shape.segments(group.count), PackedPart(shape.num_heads)]
        self.enter.declare_shard(OutputShard(ranks, packed={"": segments}))
        self.out.declare_shard(InputShard.from_group(group))
        self.norm.shard_axis(group)
        self.mixer.keep_rank(ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("in_proj", self.enter), ("", self.mixer), ("norm", self.norm), ("out_proj", self.out)

    def readers(self) -> Sequence[LinearFormat]:
        return (self.enter.format,)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """Compute the layer for x [tokens, hidden]. `angles` are not used: the layer has no rope."""
        z, conv_in, dt = self.enter(x, context).split(self.sizes, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (dt,)), z), context)
