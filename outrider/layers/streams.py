"""Several residual streams per token, with gates. A gate decides how a token mixer or a feed-forward reads the streams,
and how its result is added to them.

The streams of a token lie side by side, [tokens, num_streams x hidden]. `StreamGate` norms every stream separately and
mixes them by low-rank gates into one hidden state. It also makes the weight with which each stream gets the result. The
next gate does this addition together with its norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.formats import LinearFormat
from outrider.kernels import ops
from outrider.kernels.reference import widened
from outrider.layers.base import DecoderLayer, FeedForward, Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.rotary import Angles
from outrider.mixers import WantedRows


class Injection(NamedTuple):
    """A pending addition to the streams: x times a weight for each stream. The next gate makes the addition."""

    x: torch.Tensor  # [tokens, hidden]
    weights: torch.Tensor  # [tokens, num_streams]

    def for_rows(self, token_rows: torch.Tensor) -> Injection:
        """Return the addition for some of the token rows."""
        return Injection(self.x[token_rows], self.weights[token_rows])

    def added_to(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the streams with this addition made, as a new tensor."""
        return streams + (self.x[:, None, :] * self.weights[:, :, None]).flatten(1)


class StreamNorm(Module):
    """The RMS norm of every stream separately, scaled by 1 + weight."""

    def __init__(self, hidden_size: int, num_streams: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.num_streams, self.eps = num_streams, eps
        self.weight = torch.empty(num_streams * hidden_size, dtype=dtype, device=device)
        self.scale = self.weight  # 1 + weight after `finalize`

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.weight)),)

    def finalize(self) -> None:
        self.scale = 1 + widened(self.weight)

    def __call__(self, streams: torch.Tensor, added: Injection | None = None) -> torch.Tensor:
        """Return the normed streams. `added` is first added to the streams in place."""
        x, weights = (None, None) if added is None else added
        return ops.join_streams(x, weights, streams, self.scale, self.eps, self.num_streams)


class StreamGate(Module):
    """The gate that reads the streams. It norms them, multiplies them by low-rank gates, and returns their mean."""

    def __init__(self, hidden_size: int, num_streams: int, rank: int, eps: float, *, writes: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        """writes: whether the part behind this gate adds its result to the streams, so that the gate must make weights
        for the addition."""
        width = num_streams * hidden_size
        self.num_streams, self.writes = num_streams, writes
        self.norm = StreamNorm(hidden_size, num_streams, eps, dtype=dtype, device=device)
        inject = {"block_inject_weight": num_streams} if writes else {}
        down = {"input_mix_weight_down": rank, **inject}
        self.down = FusedLinear(width, down, bias=False, dtype=dtype, device=device)
        self.up = Linear(rank, width, bias=False, dtype=dtype, device=device)
        self.set_exact(False)

    def set_exact(self, exact: bool) -> None:
        self._gates, self._mix = ops.stream_gates.variant(exact), ops.mix_streams.variant(exact)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("hc_norm", self.norm), ("", self.down), ("input_mix_weight_up", self.up)

    def readers(self) -> Sequence[LinearFormat]:
        return (self.down.format,)

    def __call__(self, added: Injection | None, streams: torch.Tensor,
                 context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the pending addition in place, and return (the mixed state [tokens, hidden], the weights of the next
        addition [tokens, num_streams])."""
        normed = self.norm(streams, added)
        low, weights = self._gates(self.down(normed, context), self.num_streams, self.writes)
        return self._mix(self.up(low, context), normed, self.num_streams), weights


class StreamLayer(DecoderLayer):
    """A token mixer and a feed-forward, with a gate in front of each. `early`, if given, adds to the streams before
    both gates."""

    def __init__(self, mixer_gate: StreamGate, mixer: TokenMixer, mlp_gate: StreamGate, mlp: FeedForward, *,
                 mixer_name: str, early: StreamAdder | None = None) -> None:
        self.mixer_gate, self.mixer, self.mlp_gate, self.mlp = mixer_gate, mixer, mlp_gate, mlp
        self.mixer_name, self.early = mixer_name, early

    def parts(self) -> Sequence[tuple[str, Module]]:
        early = [] if self.early is None else [("ple", self.early)]
        return [*early, ("attn_hyper_connection", self.mixer_gate), (self.mixer_name, self.mixer),
                ("mlp_hyper_connection", self.mlp_gate), ("mlp", self.mlp)]

    def __call__(self, delta: Injection | None, streams: torch.Tensor, angles: Angles, context: StepContext,
                 *inputs: torch.Tensor) -> tuple[Injection | None, torch.Tensor]:
        x, weights = self._begin(delta, streams, context, inputs)
        mixed = Injection(self.mixer(x, angles, context), weights)
        x, weights = self.mlp_gate(mixed, streams, context)
        return Injection(self.mlp(x, context), weights), streams

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[Injection | None, torch.Tensor]:
        """Call the layer, but compute the feed-forward only for `rows`."""
        delta, streams, angles, context, *inputs = args
        x, weights = self._begin(delta, streams, context, inputs)
        mixed = Injection(self.mixer.for_rows(x, angles, context, rows), weights[rows.token_rows])
        streams, own = streams[rows.token_rows], context.of_rows(rows)
        x, weights = self.mlp_gate(mixed, streams, own)
        return Injection(self.mlp(x, own), weights), streams

    def _begin(self, delta: Injection | None, streams: torch.Tensor, context: StepContext,
               inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.early is not None:
            if delta is not None:
                streams.copy_(delta.added_to(streams))
            (ids,) = inputs
            streams.add_(self.early(streams, ids, context))
            delta = None
        return self.mixer_gate(delta, streams, context)


class StreamAdder(Module):
    """A part of a layer that adds to every stream directly."""

    def __call__(self, streams: torch.Tensor, inputs: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the addition to streams [tokens, num_streams x hidden]. inputs: the layer's extra inputs."""
        raise NotImplementedError


class StreamEnd(StreamGate):
    """The gate after the last layer. It takes the place of a model's final norm."""

    def __init__(self, hidden_size: int, num_streams: int, rank: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(hidden_size, num_streams, rank, eps, writes=False, dtype=dtype, device=device)

    def end(self, delta: Injection | None, streams: torch.Tensor,
            context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the final state, the streams)."""
        return self(delta, streams, context)[0], streams
