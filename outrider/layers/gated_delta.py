"""The gated delta layer of Qwen3-Next and Qwen3.5: one projection, the mixer, a gated norm of each head, output.

The projection's rows lie as q | k | v | z | b | a whatever the checkpoint's order is, which the slots undo: files of
Qwen3-Next hold them key head by key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.kernels.recurrent import delta_scan, delta_step
from outrider.layers.linear import FusedLinear, Linear, WeightSlot
from outrider.layers.recurrent import ConvMixer, GatedNorm
from outrider.layers.rotary import Angles
from outrider.mixers.cached import Attend
from outrider.mixers.recurrent.base import Gates, MixerParams, RecurrentLayer


@dataclass(frozen=True)
class GatedDeltaShape:
    num_key_heads: int
    num_value_heads: int  # a multiple: neighbours share a key head
    key_dim: int  # of a head
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
        self.log_decay = torch.empty(shape.num_value_heads, dtype=self.wide, device=device)
        self.dt_bias = torch.empty_like(self.log_decay)
        self.decay = torch.empty_like(self.log_decay)  # what `finalize` derives

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        own = {f"{prefix}.A_log": WeightSlot.of(self.log_decay), f"{prefix}.dt_bias": WeightSlot.of(self.dt_bias)}
        return super().weights(prefix) | own

    def finalize(self) -> None:
        self.decay = -self.log_decay.exp()

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


@dataclass(frozen=True)
class InterleavedSlot(WeightSlot):
    """A tensor that holds several parts head by head, of which the weight has one after the other."""

    num_heads: int
    sizes: tuple[int, ...]  # rows of each part in one head, as the file has them
    is_reversed: bool  # the weight has the last part first

    def store(self, tensor: Tensor) -> None:
        parts = tensor.unflatten(0, (self.num_heads, -1)).split(self.sizes, dim=1)
        self.target.copy_(torch.cat([part.flatten(0, 1) for part in (parts[::-1] if self.is_reversed else parts)]))

    @classmethod
    def split(
        cls, target: Tensor, num_heads: int, sizes: tuple[int, ...], *, is_reversed: bool = False
    ) -> InterleavedSlot:
        assert target.shape[0] == num_heads * sum(sizes)
        return cls(target, tuple(target.shape), num_heads, sizes, is_reversed)


class GatedDelta:
    def __init__(self, index: int, hidden_size: int, shape: GatedDeltaShape, eps: float, *, is_interleaved: bool,
                 dtype: torch.dtype, device: torch.device) -> None:
        """is_interleaved: the checkpoint has two projections, each key head by key head, and not four."""
        self.index, self.shape, self.is_interleaved = index, shape, is_interleaved
        self.mixer = GatedDeltaMixer(shape, dtype=dtype, device=device)
        heads, value_size = shape.num_value_heads, shape.value_size
        parts = {"in_proj_qkv": self.mixer.spec.conv_dim, "in_proj_z": value_size, "in_proj_b": heads}
        self.enter = FusedLinear(hidden_size, parts | {"in_proj_a": heads}, bias=False, dtype=dtype, device=device)
        self.norm = GatedNorm(shape.value_dim, shape.value_dim, eps, gate_first=False, dtype=dtype, device=device)
        self.out = Linear(value_size, hidden_size, bias=False, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        return (
            (self._interleaved_weights(prefix) if self.is_interleaved else self.enter.weights(prefix))
            | self.mixer.weights(prefix)
            | self.norm.weights(f"{prefix}.norm")
            | self.out.weights(f"{prefix}.out_proj")
        )

    def _interleaved_weights(self, prefix: str) -> dict[str, WeightSlot]:
        shape, weight = self.shape, self.enter.format.weight
        num_heads, repeats = shape.num_key_heads, shape.num_value_heads // shape.num_key_heads
        values = repeats * shape.value_dim
        qkvz, ba = weight[: -2 * shape.num_value_heads], weight[-2 * shape.num_value_heads :]
        sizes = (shape.key_dim, shape.key_dim, values, values)
        return {
            f"{prefix}.in_proj_qkvz.weight": InterleavedSlot.split(qkvz, num_heads, sizes),
            f"{prefix}.in_proj_ba.weight": InterleavedSlot.split(ba, num_heads, (repeats, repeats)),
        }

    def finalize(self) -> None:
        for part in (self.enter, self.mixer, self.out):
            part.finalize()

    def __call__(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """x: [tokens, hidden]. Positions do not matter."""
        conv_in, z, b, a = self.enter(x).split(tuple(self.enter.parts.values()), dim=-1)
        recurrent: RecurrentLayer = attend.mixer(self.index)
        return self.out(self.norm(recurrent(conv_in, (a, b)), z))
