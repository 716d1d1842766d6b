"""Embeddings of hashed n-grams that are added to residual streams (the per-layer embeddings of Qwen4-Exp).

Several hash functions map the last ids of a token to rows of one large table. These rows depend only on token ids,
which are in the request's history, so nothing is cached for them. The found vectors are projected, gated by the
streams, and smoothed by a causal convolution, whose last inputs are kept per row like those of other recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.ranks import ShardSize
from outrider.formats import ModelSize, RankGroup, Ranks
from outrider.kernels import ops
from outrider.layers.base import HeldRows, Module, Parameter
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear
from outrider.layers.short_conv import ShortConvMixer
from outrider.layers.streams import StreamAdder, StreamNorm
from outrider.mixers import RecurrentLayer

_GAMMA, _FIRST, _SECOND, _WORD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1
_LAYER_SEEDS = 10007  # distance between the seeds of two layers


@dataclass(frozen=True)
class NgramShape:
    """The hash functions of one layer, which select rows of its table."""

    multipliers: tuple[int, ...]  # of the token's own id, of the id before it, ...
    primes: tuple[int, ...]  # rows of the table for each head; the heads of pairs come first, then those of triples
    num_rows: int  # of the table, padding included
    end_id: int  # no n-gram reaches beyond this id, and it stands in for ids before the text
    vector_size: int  # numbers that a head finds

    @property
    def order(self) -> int:
        """Return the number of ids in the longest n-gram."""
        return len(self.multipliers)

    @property
    def width(self) -> int:
        return len(self.primes) * self.vector_size

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the first table row of each hash head."""
        return tuple(accumulate(self.primes[:-1], initial=0))

    @classmethod
    def make(cls, number: int, *, order: int, heads_per_order: int, least_rows: int, multiple: int, vocab_size: int,
             seed: int, end_id: int, vector_size: int) -> NgramShape:
        """Choose the hash functions of one layer. number: the layer's number among the layers with n-gram embeddings.
        Every head of every layer has its own prime, in ascending order from `least_rows` on; the hashes' multipliers
        come from the seed."""
        heads = (order - 1) * heads_per_order
        found = _primes_from(least_rows)
        primes = [next(found) for _ in range((number + 1) * heads)][number * heads :]
        half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
        base = seed + _LAYER_SEEDS * number
        multipliers = tuple(2 * (_scrambled(base + _GAMMA * (index + 1)) % half) + 1 for index in range(order))
        return cls(multipliers, tuple(primes), -(-sum(primes) // multiple) * multiple, end_id, vector_size)


def _scrambled(value: int) -> int:
    """Scramble a number by splitmix64, a public generator of 64-bit numbers."""
    value = (value + _GAMMA) & _WORD
    value = ((value ^ (value >> 30)) * _FIRST) & _WORD
    value = ((value ^ (value >> 27)) * _SECOND) & _WORD
    return value ^ (value >> 31)


def _primes_from(least: int) -> Iterator[int]:
    number = max(2, least)
    while True:
        if number == 2 or (number % 2 and all(number % d for d in range(3, math.isqrt(number) + 1, 2))):
            yield number
        number += 1


class NgramTable(Module):
    """The table of n-gram vectors. Files split it by rows into several tensors. Each rank holds some columns of all
    rows."""

    def __init__(self, shape: NgramShape, num_shards: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.num_shards = shape, num_shards
        self.weight = torch.empty(shape.num_rows, shape.vector_size, dtype=dtype, device=device)
        self._held: HeldRows | None = None
        self._group: RankGroup | None = None
        self._device = device

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("ple_embed_dim",), self.shape.vector_size),)

    def shard(self, group: RankGroup) -> None:
        held = Ranks.from_group(group).share(ModelSize(self.shape.vector_size))
        self._held, self._group = HeldRows(self.shape.vector_size, (held,), axis=1), group
        self.weight = self.weight.new_empty(self.shape.num_rows, len(held))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [(f"shard_{number}.weight", Parameter(rows, self._held))
                for number, rows in enumerate(self.weight.chunk(self.num_shards))]

    def finalize(self) -> None:
        shape, device = self.shape, self._device
        self._primes, self._offsets = (torch.tensor(values, device=device) for values in (shape.primes, shape.offsets))

    def __call__(self, ids: Tensor, before: Tensor) -> Tensor:
        """Look up the vectors of each token: [tokens, heads x vector]. ids: [tokens]; before: [tokens, order - 1], the
        ids before each token, nearest first, -1 where there is none."""
        shape = self.shape
        per_order = len(shape.primes) // (shape.order - 1)
        hashed, mixed = [], ids * shape.multipliers[0]
        is_open = torch.ones_like(ids, dtype=torch.bool)  # no end lies between the token and the id
        for shift in range(1, shape.order):
            own = before[:, shift - 1]
            is_open = is_open & (own >= 0) & (own != shape.end_id)
            mixed = mixed ^ (torch.where(is_open, own, shape.end_id) * shape.multipliers[shift])
            hashed.append(mixed[:, None].expand(-1, per_order))
        rows = torch.cat(hashed, dim=1) % self._primes + self._offsets
        found = F.embedding(rows, self.weight)
        return (found if self._group is None else self._group.gather(found)).flatten(1)


class NgramEmbedding(StreamAdder):
    """The table, its projections to one value and to a key for each stream, the gates, and the convolution behind
    them."""

    def __init__(self, index: int, shape: NgramShape, num_shards: int, hidden_size: int, num_streams: int,
                 conv_taps: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        """index: the layer index of the convolution's state. conv_taps: the number of inputs that the convolution
        reads. The distance between them is the length of the longest n-gram."""
        width = num_streams * hidden_size
        self.index, self.num_streams = index, num_streams
        self.table = NgramTable(shape, num_shards, dtype=dtype, device=device)
        self.project = FusedLinear(shape.width, {"key_proj": width, "value_proj": hidden_size}, bias=False, dtype=dtype,
                                   device=device)
        self.key_norm, self.query_norm, self.conv_norm = (
            StreamNorm(hidden_size, num_streams, eps, dtype=dtype, device=device) for _ in range(3))
        self.mixer = ShortConvMixer(width, conv_taps, dilation=shape.order, bias=False, dtype=dtype, device=device)
        self.set_exact(False)

    def set_exact(self, exact: bool) -> None:
        self._gate, self._add = ops.gate_values.variant(exact), ops.add_silu.variant(exact)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("ple_embedding.ngram_embedding", self.table), ("", self.project), ("norm_key", self.key_norm),
                ("norm_query", self.query_norm), ("norm_conv", self.conv_norm), ("conv1d", self.mixer)]

    def __call__(self, streams: Tensor, ids: Tensor, context: StepContext) -> Tensor:
        """Return the addition to the streams. ids [tokens, order]: a token's own id and those before it, nearest first,
        -1 where there is none."""
        width = streams.shape[1]
        projected = self.project(self.table(ids[:, 0], ids[:, 1:]), context)
        keys, queries = self.key_norm(projected[:, :width]), self.query_norm(streams)
        values = self._gate(keys, queries, projected[:, width:], self.num_streams)
        recurrent: RecurrentLayer = context.attend.mixer(self.index)
        return self._add(values, recurrent(self.conv_norm(values), ()))
