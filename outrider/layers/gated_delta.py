"""The gated delta layer of Qwen3-Next, Qwen3.5 and OLMo Hybrid: one projection, the mixer, a gated norm of each head,
output.

The projection's rows have the order q | k | v | z | b | a. Files of Qwen3-Next hold them key head by key head, which
the weight slots undo. Files of OLMo Hybrid hold every part apart, also the convolutions of q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.core.ranks import ShardSize
from outrider.formats import HeadLayout, InputShard, ModelSize, OutputShard, PackedPart, RankGroup, Ranks
from outrider.kernels.recurrent import delta_scan, delta_step
from outrider.layers.base import HeldRows, Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, JointMatrix, Linear
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
    max_beta: float = 1.0  # beta, the strength of a correction, is between 0 and this

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    def spec(self, itemsize: int) -> RecurrentSpec:
        return RecurrentSpec(
            conv_dim=2 * self.key_size + self.value_size,
            conv_width=self.conv_width,
            state_shape=(self.num_value_heads, self.value_dim, self.key_dim),
            gate_sizes=(self.num_value_heads, self.num_value_heads),
            out_dim=self.value_size,
            itemsize=itemsize,
        )

    def segments(self) -> list[PackedPart]:
        """Return the segments of the convolution: q, k and v. Each is divided among ranks separately."""
        return [PackedPart(self.key_size), PackedPart(self.key_size), PackedPart(self.value_size)]

    def of_rank(self, num_ranks: int) -> GatedDeltaShape:
        """Return the shape of one rank's part, with heads divided among ranks."""
        return replace(self, num_key_heads=self.num_key_heads // num_ranks,
                       num_value_heads=self.num_value_heads // num_ranks)


class GatedDeltaMixer(ConvMixer):
    """The gated delta rule behind a convolution of q | k | v. The gates are a (of the decay) and b (of the
    correction)."""

    def __init__(self, shape: GatedDeltaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape.spec(dtype.itemsize), conv_bias=False, dtype=dtype, device=device)
        self.shape = shape

    def keep_rank(self, ranks: Ranks) -> None:
        """Keep this rank's key heads with their value heads."""
        segments = self.shape.segments()
        self.shape = self.shape.of_rank(ranks.count)
        self.keep_part(self.shape.spec(self.spec.itemsize), segments, ranks)

    def inputs(self, convolved: Tensor, gates: Gates) -> tuple[Tensor, ...]:
        shape = self.shape
        q, k, v = convolved.split((shape.key_size, shape.key_size, shape.value_size), dim=-1)
        q, k = (part.unflatten(-1, (shape.num_key_heads, shape.key_dim)) for part in (q, k))
        a, b = gates
        g = self.decay * F.softplus(a + self.dt_bias)
        v = v.unflatten(-1, (shape.num_value_heads, shape.value_dim))
        return q, k, v, g[..., None], b.sigmoid() * shape.max_beta

    def step_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(state, *inputs)

    def scan_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return delta_scan(state, *inputs)

    def kernel_params(self) -> MixerParams | None:
        return MixerParams("delta", self.conv_weight, self.conv_bias, self.dt_bias, self.decay,
                           self.shape.num_key_heads, max_beta=self.shape.max_beta)


class SplitDeltaMixer(GatedDeltaMixer):
    """A gated delta mixer with one tensor in files for each of the convolutions of q, k and v."""

    segment_rows: Sequence[HeldRows | None] = (None, None, None)  # channels of this rank; None if it holds all

    def keep_rank(self, ranks: Ranks) -> None:
        sizes = [part.size for part in self.shape.segments()]
        self.segment_rows = [HeldRows(size, (ranks.share(ModelSize(size)),)) for size in sizes]
        super().keep_rank(ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        segments = self.conv_weight.t().unsqueeze(1).split([part.size for part in self.shape.segments()])
        others = [part for part in super().parts() if part[0] != "conv1d.weight"]
        return [*((f"{name}_conv1d.weight", Parameter(segment, rows))
                  for name, segment, rows in zip("qkv", segments, self.segment_rows, strict=True)), *others]


class GatedDelta(TokenMixer):
    def __init__(self, index: int, hidden_size: int, shape: GatedDeltaShape, eps: float, *, is_interleaved: bool,
                 dtype: torch.dtype, device: torch.device, gate: str = "silu") -> None:
        """is_interleaved: the checkpoint has two projections, ordered key head by key head, instead of four. A GGUF
        file of Qwen3-Next has four, but low-rank deltas are made for the two. gate: the activation of the output gate,
        silu or sigmoid."""
        self.index = index
        self.mixer = GatedDeltaMixer(shape, dtype=dtype, device=device)
        heads, value_size = shape.num_value_heads, shape.value_size
        repeats = heads // shape.num_key_heads
        sizes = (shape.key_dim, shape.key_dim, repeats * shape.value_dim, repeats * shape.value_dim)
        layouts = {"in_proj_qkvz": HeadLayout(shape.num_key_heads, sizes),
                   "in_proj_ba": HeadLayout(shape.num_key_heads, (repeats, repeats))}
        if is_interleaved:
            stored = {"in_proj_qkvz": sum(self.sizes[:2]), "in_proj_ba": sum(self.sizes[2:])}
            self.enter = FusedLinear(hidden_size, stored, bias=False, dtype=dtype, device=device, layouts=layouts)
        else:
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            joint = {"in_proj_qkvz": JointMatrix(names[:2], layouts["in_proj_qkvz"]),
                     "in_proj_ba": JointMatrix(names[2:], layouts["in_proj_ba"])}
            self.enter = FusedLinear(hidden_size, dict(zip(names, self.sizes, strict=True)), bias=False, dtype=dtype,
                                     device=device, joint=joint)
        self.norm = GatedNorm(shape.value_dim, shape.value_dim, eps, gate_first=False, dtype=dtype, device=device,
                              activation=gate)
        self.out = Linear(value_size, hidden_size, bias=False, dtype=dtype, device=device)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the output features of the first projection: inputs of the convolution, then z, b and a."""
        shape = self.mixer.shape
        return self.mixer.spec.conv_dim, shape.value_size, shape.num_value_heads, shape.num_value_heads

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("linear_num_key_heads",), self.mixer.shape.num_key_heads),)

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's key heads with their value heads, in every segment of the first projection and of the
        convolution. All heads share one norm weight, which every rank holds."""
        ranks = Ranks.from_group(group)
        self.enter.declare_shard(OutputShard(ranks, packed={"in_proj_qkv": self.mixer.shape.segments()}))
        self.out.declare_shard(InputShard.from_group(group))
        self.mixer.keep_rank(ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("", self.enter), ("", self.mixer), ("norm", self.norm), ("out_proj", self.out)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """Compute the layer for x [tokens, hidden]. `angles` are not used: the layer has no rope."""
        conv_in, z, b, a = self.enter(x, context).split(self.sizes, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (a, b)), z), context)


class SplitGatedDelta(GatedDelta):
    """A gated delta layer whose files have separate matrices for q, k, v, the output gate and both gates of the
    recurrence."""

    def __init__(self, index: int, hidden_size: int, shape: GatedDeltaShape, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(index, hidden_size, shape, eps, is_interleaved=False, dtype=dtype, device=device)
        self.mixer = SplitDeltaMixer(shape, dtype=dtype, device=device)
        conv_in = [part.size for part in shape.segments()]
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        stored = dict(zip(names, (*conv_in, *self.sizes[1:]), strict=True))
        self.enter = FusedLinear(hidden_size, stored, bias=False, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("", self.enter), ("", self.mixer), ("o_norm", self.norm), ("o_proj", self.out)
