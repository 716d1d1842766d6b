"""The short convolution of LFM2: a token mixer that sees only the last few tokens.

It projects to B, C and x, applies a causal convolution to B * x, each channel separately, multiplies by C and projects
to the output. A row keeps the last inputs of the convolution and no other state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.core.ranks import ShardSize
from outrider.formats import InputShard, ModelSize, OutputShard, PackedPart, RankGroup, Ranks
from outrider.kernels.recurrent import plain_conv
from outrider.layers.base import HeldRows, Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import Linear
from outrider.layers.rotary import Angles
from outrider.mixers import Gates, MixerParams, RecurrentLayer, RecurrentState, ScanOutput, StepOutput


class ShortConvMixer(Module):
    """A RecurrentMixer with an empty state: a convolution needs only its last inputs. Its results are the same, bit for
    bit, however tokens are split into calls."""

    def __init__(self, size: int, taps: int, *, dilation: int = 1, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        """taps: the number of inputs that the convolution weighs. dilation: the distance between them in tokens; the
        tokens in between have weight 0."""
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.dilation, self.width = dilation, (taps - 1) * dilation + 1
        self.has_bias, self.itemsize, self.device = bias, dtype.itemsize, device
        self.rows: HeldRows | None = None  # the channels of this rank; None if it holds all
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self.spec = RecurrentSpec(conv_dim=size, conv_width=self.width, state_shape=(0,), gate_sizes=(), out_dim=size,
                                  itemsize=self.itemsize)
        self.weight = torch.zeros(self.width, size, dtype=self.wide, device=self.device)
        self.bias = torch.empty(size, dtype=self.wide, device=self.device) if self.has_bias else None

    def keep_rank(self, ranks: Ranks) -> None:
        """Keep this rank's channels."""
        size = self.spec.conv_dim
        share = ranks.share(ModelSize(size))
        self.rows = HeldRows(size, (share,))
        self._allocate(len(share))

    def parts(self) -> Sequence[tuple[str, Module]]:
        bias = [] if self.bias is None else [("bias", Parameter(self.bias, self.rows))]
        return [("weight", Parameter(self.weight[:: self.dilation].t().unsqueeze(1), self.rows)), *bias]

    def step(self, state: Tensor, tail: Tensor, conv_in: Tensor, gates: Gates) -> StepOutput:
        seen = torch.cat((tail, conv_in[:, None].to(tail.dtype)), dim=1)
        return StepOutput(plain_conv(seen, self.weight, self.bias)[:, 0].to(conv_in.dtype), state, seen[:, 1:])

    def scan(self, state: Tensor, tail: Tensor, conv_in: Tensor, gates: Gates, boundaries: list[int],
             exact: bool = False) -> ScanOutput:
        num_tokens, length = conv_in.shape[0], tail.shape[0]
        seen = torch.cat((tail, conv_in.to(tail.dtype)))
        y = plain_conv(seen, self.weight, self.bias).to(conv_in.dtype)
        states_at = [RecurrentState(state, seen[b : b + length]) for b in boundaries]
        return ScanOutput(y, state, seen[num_tokens:], states_at)

    def kernel_params(self) -> MixerParams | None:
        return MixerParams("conv", self.weight, self.bias, self.weight[:0, 0], self.weight[:0, 0], 1)


class ShortConv(TokenMixer):
    def __init__(self, index: int, hidden_size: int, width: int, *, bias: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.index = index
        self.mixer = ShortConvMixer(hidden_size, width, bias=bias, dtype=dtype, device=device)
        self.enter = Linear(hidden_size, 3 * hidden_size, bias=bias, dtype=dtype, device=device)
        self.out = Linear(hidden_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("hidden_size",), self.mixer.spec.conv_dim),)

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's channels of B, C and x."""
        ranks, size = Ranks.from_group(group), self.mixer.spec.conv_dim
        self.enter.declare_shard(OutputShard(ranks, packed={"": [PackedPart(size)] * 3}))
        self.out.declare_shard(InputShard.from_group(group))
        self.mixer.keep_rank(ranks)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("in_proj", self.enter), ("conv", self.mixer), ("out_proj", self.out)

    def __call__(self, x: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """Compute the layer for x [tokens, hidden]. `angles` are not used: the layer has no rope."""
        b, c, inner = self.enter(x, context).chunk(3, dim=-1)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self.out(recurrent(b * inner, ()).mul_(c), context)
