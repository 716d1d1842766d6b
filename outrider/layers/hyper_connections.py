"""Hyper-connections: several residual streams for each token. The token mixer and the feed-forward each read a weighted
sum of the streams. When their result is added, the streams may also be mixed with each other.

One product of a token's streams with a small matrix makes all these weights. Where streams mix, the mixing weights are
scaled until rows and columns sum to one (`kernels/streams.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.kernels import ops
from outrider.kernels.streams import StreamRule
from outrider.layers.base import DecoderLayer, FeedForward, Module, Parameter, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles
from outrider.mixers import WantedRows


class HyperWeights(NamedTuple):
    """The weights with which the result of a token mixer or feed-forward is added to the streams."""

    post: torch.Tensor  # [tokens, streams]
    mixing: torch.Tensor  # [tokens, streams x streams], or no columns

    def for_rows(self, token_rows: torch.Tensor) -> HyperWeights:
        return HyperWeights(self.post[token_rows], self.mixing[token_rows])


class HyperConnection(Module):
    """The parameters (a matrix, a base and scales) that make the weights for reading the streams and writing to them.
    Each token mixer and feed-forward has its own, and the model has one that joins the streams at the end."""

    def __init__(self, hidden_size: int, rule: StreamRule, names: tuple[str, str, str], *, dtype: torch.dtype,
                 device: torch.device, keeps_float32: bool = False) -> None:
        """names: the checkpoint's names of matrix, base and scales. keeps_float32: the matrix stays float32 in a model
        of 16 bits."""
        self.rule, self.names, self._dtype = rule, names, dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.matrix = torch.empty(rule.num_logits, rule.num_streams * hidden_size, device=device,
                                  dtype=wide if keeps_float32 else dtype)
        self._multiplied = self.matrix
        self.base = torch.empty(rule.num_logits, dtype=wide, device=device)
        self.scale = torch.empty(len(rule.parts), dtype=wide, device=device)
        self.set_exact(False)

    def set_exact(self, exact: bool) -> None:
        self._product, self._read = ops.linear_wide.variant(exact), ops.read_streams.variant(exact)

    def parts(self) -> Sequence[tuple[str, Module]]:
        tensors = (self.matrix, self.base, self.scale)
        return [(name, Parameter(tensor)) for name, tensor in zip(self.names, tensors, strict=True)]

    def finalize(self) -> None:
        """Split a float32 matrix into two matrices of the model's 16-bit dtype: the rounded numbers and the rounding
        errors. The sum of the products with both is much more exact and needs no other kernel."""
        super().finalize()
        self._multiplied = self.matrix
        if self.matrix.dtype != self._dtype:
            high = self.matrix.to(self._dtype)
            self._multiplied = torch.cat((high, (self.matrix - high.float()).to(self._dtype)))

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, HyperWeights]:
        """Return (the weighted sum of the streams [tokens, hidden], the weights with which the result will be added).
        streams: [tokens, streams x hidden]."""
        made, *weights = self._read(streams, self._product(streams, self._multiplied), self.scale, self.base, self.rule)
        return made, HyperWeights(*weights)


class HyperLayer(DecoderLayer):
    """A token mixer and a feed-forward, each with a norm of the weighted sum that it reads from the streams. The layer
    changes streams in place and leaves no addition to the next layer."""

    def __init__(self, mixer_streams: HyperConnection, input_norm: RMSNorm, mixer: TokenMixer,
                 mlp_streams: HyperConnection, mlp_norm: RMSNorm, mlp: FeedForward) -> None:
        self.mixer_streams, self.input_norm, self.mixer = mixer_streams, input_norm, mixer
        self.mlp_streams, self.mlp_norm, self.mlp = mlp_streams, mlp_norm, mlp

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("", self.mixer_streams), ("input_layernorm", self.input_norm), ("self_attn", self.mixer),
                ("", self.mlp_streams), ("post_attention_layernorm", self.mlp_norm), ("mlp", self.mlp)]

    def prepare(self) -> None:
        self.input_norm.round_for(*self.mixer.readers())
        self.mlp_norm.round_for(*self.mlp.readers())

    def __call__(self, delta: None, streams: torch.Tensor, angles: Angles,
                 context: StepContext) -> tuple[None, torch.Tensor]:
        x, weights = self.mixer_streams.read(streams)
        ops.write_streams(streams, self.mixer(self.input_norm(x), angles, context), *weights)
        self._feed_forward(streams, context)
        return None, streams

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[None, torch.Tensor]:
        """Call the layer, but compute the feed-forward only for `rows`."""
        _, streams, angles, context = args
        x, weights = self.mixer_streams.read(streams)
        mixed = self.mixer.for_rows(self.input_norm(x), angles, context, rows)
        streams = streams[rows.token_rows]
        ops.write_streams(streams, mixed, *weights.for_rows(rows.token_rows))
        self._feed_forward(streams, context.of_rows(rows))
        return None, streams

    def _feed_forward(self, streams: torch.Tensor, context: StepContext) -> None:
        x, weights = self.mlp_streams.read(streams)
        ops.write_streams(streams, self.mlp(self.mlp_norm(x), context), *weights)
