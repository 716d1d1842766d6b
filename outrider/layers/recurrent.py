"""Parts that recurrent layers share: a mixer behind a causal convolution, and the gated norm after it.

Subclasses define how convolved inputs become inputs of their recurrence. `context.attend` keeps the states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.kinds import RecurrentSpec
from outrider.formats import ModelSize, OutputShard, PackedPart, RankGroup, Ranks
from outrider.kernels import ops
from outrider.kernels.recurrent import causal_conv
from outrider.kernels.reference import widened
from outrider.layers.base import HeldRows, Module, Parameter
from outrider.mixers import Gates, MixerParams, RecurrentState, ScanOutput, StepOutput

PIECE_TOKENS = 1024  # tokens scanned at once; bounds the memory of a scan


class ConvMixer(Module, ABC):
    """A RecurrentMixer with a convolution before the recurrence. The recurrence runs on float32 (float64) tensors with
    a leading axis of tokens. The decay of a head's state depends on a time step, which is made from a gate and a bias.
    """

    def __init__(self, spec: RecurrentSpec, *, conv_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.has_conv_bias, self.device = conv_bias, device
        self.conv_rows: HeldRows | None = None  # the features and the heads of this rank; None if it holds all
        self.head_rows: HeldRows | None = None
        self._allocate(spec)

    def _allocate(self, spec: RecurrentSpec) -> None:
        self.spec, device = spec, self.device
        self.conv_weight = torch.empty(spec.conv_width, spec.conv_dim, dtype=self.wide, device=device)
        self.conv_bias = torch.empty(spec.conv_dim, dtype=self.wide, device=device) if self.has_conv_bias else None
        # [heads] each. `empty_like` would import a second or more of torch's Python code on the meta device.
        self.log_decay, self.dt_bias, self.decay = (
            torch.empty(spec.state_shape[0], dtype=self.wide, device=device) for _ in range(3))

    def keep_part(self, spec: RecurrentSpec, segments: Sequence[PackedPart], ranks: Ranks) -> None:
        """Keep this rank's part of each of the convolution's segments, and its heads. spec: the cache spec of this
        rank's part."""
        whole, shard = self.spec, OutputShard(ranks, packed={"": segments})
        num_heads = whole.state_shape[0]
        self.conv_rows = HeldRows(whole.conv_dim, shard.held("", ModelSize(whole.conv_dim)))
        self.head_rows = HeldRows(num_heads, (ranks.share(ModelSize(num_heads)),))
        self._allocate(spec)

    def parts(self) -> Sequence[tuple[str, Module]]:
        bias = [] if self.conv_bias is None else [("conv1d.bias", Parameter(self.conv_bias, self.conv_rows))]
        return [("conv1d.weight", Parameter(self.conv_weight.t().unsqueeze(1), self.conv_rows)), *bias,
                ("A_log", Parameter(self.log_decay, self.head_rows)),
                ("dt_bias", Parameter(self.dt_bias, self.head_rows))]

    def finalize(self) -> None:
        self.decay = -self.log_decay.exp()

    @abstractmethod
    def inputs(self, convolved: Tensor, gates: Gates) -> tuple[Tensor, ...]:
        """Return the inputs of the recurrence, without its state. convolved: [tokens, conv_dim]; gates: in float32 or
        float64."""

    @abstractmethod
    def step_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of each row by one token. Return (y [rows, ..], new state [rows, ..])."""

    @abstractmethod
    def scan_state(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the state of one request by several tokens. Return (y [tokens, ..], new state)."""

    @abstractmethod
    def kernel_params(self) -> MixerParams | None:
        """Return the parameters with which kernels compute this mixer in float32; None if no kernel can compute it."""

    def step(self, state: Tensor, tail: Tensor, conv_in: Tensor, gates: Gates) -> StepOutput:
        seen = torch.cat((tail, conv_in[:, None].to(tail.dtype)), dim=1)
        convolved = causal_conv(seen, self.conv_weight, self.conv_bias)[:, 0]
        y, state = self.step_state(state, *self.inputs(convolved, self._widened(gates)))
        return StepOutput(y.flatten(1).to(conv_in.dtype), state, seen[:, 1:])

    def scan(self, state: Tensor, tail: Tensor, conv_in: Tensor, gates: Gates, boundaries: list[int],
             exact: bool = False) -> ScanOutput:
        num_tokens, length = conv_in.shape[0], tail.shape[0]
        assert boundaries == sorted(boundaries) and all(0 <= b <= num_tokens for b in boundaries), boundaries
        seen = torch.cat((tail, conv_in.to(tail.dtype)))
        advance = self._by_steps if exact else self._by_chunks
        states, parts = {0: state}, [conv_in.new_empty(0, self.spec.out_dim)]
        stops = sorted({*boundaries, *range(0, num_tokens, PIECE_TOKENS), num_tokens} - {0})
        for start, stop in zip([0, *stops], stops, strict=False):
            y, state = advance(state, seen[start : stop + length], tuple(gate[start:stop] for gate in gates))
            states[stop] = state
            parts.append(y.to(conv_in.dtype))
        states_at = [RecurrentState(states[b], seen[b : b + length]) for b in boundaries]
        return ScanOutput(torch.cat(parts), state, seen[num_tokens:], states_at)

    def _by_chunks(self, state: Tensor, seen: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
        """Compute a request's tokens with the chunked recurrence. seen: [conv_width - 1 + tokens, conv_dim], the
        convolution's inputs."""
        convolved = causal_conv(seen, self.conv_weight, self.conv_bias)
        y, state = self.scan_state(state, *self.inputs(convolved, self._widened(gates)))
        return y.flatten(1), state

    def _by_steps(self, state: Tensor, seen: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
        width, rows, parts = self.spec.conv_width, state[None], []
        for token in range(seen.shape[0] - width + 1):
            window = seen[None, token : token + width]
            # Gates are copied: a library may look at where a row lies in memory.
            own = tuple(gate[token, None].clone() for gate in gates)
            stepped = self.step(rows, window[:, :-1], window[:, -1], own)
            rows = stepped.state
            parts.append(stepped.y)
        return torch.cat(parts), rows[0]

    def _widened(self, gates: Gates) -> Gates:
        return tuple(gate.to(self.wide) for gate in gates)


class GatedNorm(Module):
    """RMS norm over groups of the last axis with a gate on its input (`gate_first`) or on its output. `activation`
    chooses the gate: silu(z) or sigmoid(z).

    weight_size: the size of the whole axis, or of one group if all groups share a weight.
    """

    def __init__(self, weight_size: int, group_size: int, eps: float, *, gate_first: bool, dtype: torch.dtype,
                 device: torch.device, activation: str = "silu") -> None:
        self.group_size, self.eps, self.gate_first, self.activation = group_size, eps, gate_first, activation
        self.weight = torch.empty(weight_size, dtype=dtype, device=device)
        self.rows: HeldRows | None = None  # the part of the weight that this rank holds; None if it holds all
        self._shared: SharedSquares | None = None
        self._norm = ops.gated_norm

    def shard_axis(self, group: RankGroup) -> None:
        """Keep this rank's part of the normed axis: whole groups, or a part of one group that neighbouring ranks share.
        """
        assert self.gate_first and self.activation == "silu"
        size = self.weight.shape[0]
        share, num_groups = Ranks.from_group(group).share(ModelSize(size)), size // self.group_size
        self.rows = HeldRows(size, (share,))
        self.weight = torch.empty(len(share), dtype=self.weight.dtype, device=self.weight.device)
        if num_groups < group.count:
            self._shared = SharedSquares(group, group.count // num_groups)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.weight, self.rows)),)

    def set_exact(self, exact: bool) -> None:
        self._norm = ops.gated_norm.variant(exact)
        if self._shared is not None:
            self._shared.set_exact(exact)

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """Return the gated norm of y, both y and z [tokens, size]."""
        if self._shared is None:
            return self._norm(y, z, self.weight, self.group_size, self.eps, self.gate_first, self.activation)
        x = ops.silu_mul(torch.cat((widened(z), widened(y)), dim=1))
        scale = torch.rsqrt(self._shared.sum(x) / self.group_size + self.eps)
        return (x * scale * widened(self.weight)).to(z.dtype)


class SharedSquares:
    """Computes the sum of squares over a group of columns that several neighbouring ranks hold together."""

    def __init__(self, group: RankGroup, num_sharing: int) -> None:
        self._group, first = group, group.rank // num_sharing * num_sharing
        self._sharing = range(first, first + num_sharing)
        self._linear = ops.linear

    def set_exact(self, exact: bool) -> None:
        self._linear = ops.linear.variant(exact)

    def sum(self, x: Tensor) -> Tensor:
        """Sum the squares of x [tokens, columns of this rank] over the group: [tokens, 1], added in the order of ranks.
        The squares of a row are summed by a matrix product, because products have an exact variant."""
        own = self._linear(x.square(), x.new_ones(1, x.shape[1]), None)
        every = self._group.gather(own)
        first, *others = (every[:, rank, None] for rank in self._sharing)
        for other in others:
            first = first + other
        return first
