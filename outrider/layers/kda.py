"""The KDA layer (Kimi delta attention): a gated delta rule with a decay for every key channel.

The layer has projections to q, k and v, to the decay of each channel, to the correction's gate and to the output's
gate, then the mixer, a norm of each head with a sigmoid gate, and the output projection. The projections of decay and
output gate go through a narrow product in Kimi-Linear and are direct in other families. The files' three convolutions
of q, k and v are one convolution here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.core.ranks import ShardSize
from outrider.formats import InputShard, ModelSize, OutputShard, PackedPart, RankGroup, Ranks
from outrider.kernels.recurrent import delta_scan, delta_step
from outrider.layers.base import HeldRows, Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.recurrent import ConvMixer, GatedNorm
from outrider.layers.rotary import Angles
from outrider.mixers import Gates, MixerParams, RecurrentLayer


@dataclass(frozen=True)
class KDAShape:
    num_heads: int
    head_dim: int  # of q, k and v
    conv_width: int
    lower_bound: float | None = None  # of the decay's logarithm, which is a sigmoid times the bound then

    @property
    def size(self) -> int:
        """Return the number of features in all heads together, which is the same for q, k, v, the decays and the
        output."""
        return self.num_heads * self.head_dim

    def spec(self, itemsize: int) -> RecurrentSpec:
        return RecurrentSpec(
            conv_dim=3 * self.size,
            conv_width=self.conv_width,
            state_shape=(self.num_heads, self.head_dim, self.head_dim),
            gate_sizes=(self.size, self.num_heads),
            out_dim=self.size,
            itemsize=itemsize,
        )

    def of_rank(self, num_ranks: int) -> KDAShape:
        """Return the shape of one rank's part, with heads divided among ranks."""
        return replace(self, num_heads=self.num_heads // num_ranks)


@dataclass(frozen=True)
class KDANames:
    """The names of tensors that differ between families, and the shape in which files store one value for each head."""

    decay: tuple[str, ...] = ("f_a_proj", "f_b_proj")  # two names: through a narrow product
    gate: tuple[str, ...] = ("g_a_proj", "g_b_proj")
    out: str = "o_proj"
    decay_axes: tuple[int, int] = (2, 1)  # axes of one before and behind that of the heads in A_log


class KDAMixer(ConvMixer):
    """The KDA rule behind a convolution of q | k | v. The gates are a (of each channel's decay) and b (of the
    correction)."""

    def __init__(self, shape: KDAShape, names: KDANames, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.names = shape, names
        self.channel_rows: HeldRows | None = None  # the channels of this rank; None if it holds all
        super().__init__(shape.spec(dtype.itemsize), conv_bias=False, dtype=dtype, device=device)

    def _allocate(self, spec: RecurrentSpec) -> None:
        super()._allocate(spec)
        self.dt_bias = torch.empty(self.shape.size, dtype=self.wide, device=self.device)  # of each channel

    def keep_rank(self, ranks: Ranks) -> None:
        """Keep this rank's heads."""
        whole = self.shape
        self.shape = whole.of_rank(ranks.count)
        self.channel_rows = HeldRows(whole.size, (ranks.share(ModelSize(whole.size)),))
        self.keep_part(self.shape.spec(self.spec.itemsize), [PackedPart(whole.size)] * 3, ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        segments = self.conv_weight.t().unsqueeze(1).split(self.shape.size)
        before, behind = self.names.decay_axes
        heads = self.head_rows
        log_decay = self.log_decay.view(*[1] * before, -1, *[1] * behind)
        return [*((f"{name}_conv1d.weight", Parameter(segment, self.channel_rows))
                  for name, segment in zip("qkv", segments, strict=True)),
                ("A_log", Parameter(log_decay, None if heads is None else heads._replace(axis=before))),
                ("dt_bias", Parameter(self.dt_bias, self.channel_rows))]

    def inputs(self, convolved: Tensor, gates: Gates) -> tuple[Tensor, ...]:
        heads = (self.shape.num_heads, self.shape.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in convolved.chunk(3, dim=-1))
        step, decay = (gates[0] + self.dt_bias).unflatten(-1, heads), self.decay[:, None]
        bound = self.shape.lower_bound
        g = decay * F.softplus(step) if bound is None else bound * (-decay * step).sigmoid()
        return q, k, v, g, gates[1].sigmoid()

    def step_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(state, *inputs)

    def scan_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_scan(state, *inputs)

    def kernel_params(self) -> MixerParams | None:
        return MixerParams("kda", self.conv_weight, self.conv_bias, self.dt_bias, self.decay, self.shape.num_heads,
                           lower_bound=self.shape.lower_bound)


class KDA(TokenMixer):
    def __init__(self, index: int, hidden_size: int, shape: KDAShape, eps: float, *, names: KDANames,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.index, self.names = index, names
        self.mixer = KDAMixer(shape, names, dtype=dtype, device=device)
        # The second products of decay and gate, by their names; none where the projection is direct.
        self.decay, self.gate = (
            {name: Linear(shape.head_dim, shape.size, bias=False, dtype=dtype, device=device) for name in second}
            for _, *second in (names.decay, names.gate))
        stored = ("q_proj", "k_proj", "v_proj", "b_proj", names.decay[0], names.gate[0])
        sizes = (*[shape.size] * 3, *self.sizes[1:])
        self.enter = FusedLinear(hidden_size, dict(zip(stored, sizes, strict=True)), bias=False, dtype=dtype,
                                 device=device)
        self.norm = GatedNorm(shape.head_dim, shape.head_dim, eps, gate_first=False, activation="sigmoid", dtype=dtype,
                              device=device)
        self.out = Linear(shape.size, hidden_size, bias=False, dtype=dtype, device=device)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the output features of the first projection: the convolution's inputs, b, and the inputs of decay and
        gate."""
        shape = self.mixer.shape
        decay, gate = (shape.head_dim if second else shape.size for second in (self.decay, self.gate))
        return self.mixer.spec.conv_dim, shape.num_heads, decay, gate

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("linear_num_heads", "num_heads", "num_attention_heads"), self.mixer.shape.num_heads),)

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's heads in every segment of the projections and of the convolution. Every rank holds the
        narrow products and the norm's weight, which all heads share."""
        ranks = Ranks.from_group(group)
        narrow = {names[0]: 1 for names in (self.names.decay, self.names.gate) if len(names) > 1}
        self.enter.declare_shard(OutputShard(ranks, narrow))
        for second in (*self.decay.values(), *self.gate.values()):
            second.declare_shard(OutputShard(ranks))
        self.out.declare_shard(InputShard.from_group(group))
        self.mixer.keep_rank(ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("", self.enter), *self.decay.items(), *self.gate.items(), ("", self.mixer), ("o_norm", self.norm),
                (self.names.out, self.out)]

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """Compute the layer for x [tokens, hidden]. `angles` are not used: the layer has no rope."""
        conv_in, b, decay, gate = self.enter(x, context).split(self.sizes, dim=-1)
        for second in self.decay.values():
            decay = second(decay, context)
        for second in self.gate.values():
            gate = second(gate, context)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (decay, b)), gate), context)
