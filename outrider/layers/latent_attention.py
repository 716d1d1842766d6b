"""Latent attention (MLA): keys and values of all heads come from one compressed vector; an indexer may choose which.

The projection from the latent space to keys is absorbed into the queries, and that to values is applied to the
attention's output, so that the cache holds compressed vectors only. Does not know where they lie: `attend` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.layers.base import Module, Parameter, TokenMixer
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles, rotate, rotate_pairs
from outrider.mixers import Attend, BoundLatentLayer, IndexedPositions, LatentLayer

NORM_EPS = 1e-6  # of the norms of compressed vectors and of index keys, whatever the model's own is


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a latent attention layer that its cache does not show."""

    hidden_size: int
    q_rank: int | None  # None: queries come from the hidden state in one product
    nope_dim: int  # dimensions of a query head that do not rotate
    value_dim: int
    has_bias: bool
    index_rotates_pairs: bool  # the indexer's rope is interleaved, too


class LayerNorm(Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight, self.bias = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("weight", Parameter(self.weight)), ("bias", Parameter(self.bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, NORM_EPS)


class LatentExpansion(Module):
    """The projection from the latent space to the keys and values of each head, used from both sides."""

    def __init__(self, num_heads: int, nope_dim: int, value_dim: int, latent_dim: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.weight = torch.empty(num_heads * (nope_dim + value_dim), latent_dim, dtype=dtype, device=device)
        heads = self.weight.view(num_heads, nope_dim + value_dim, latent_dim)
        self._keys, self._values = heads[:, :nope_dim], heads[:, nope_dim:]

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.weight)),)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, nope] -> [tokens, heads, latent], whose products with latents are those of q with keys."""
        return torch.bmm(q.transpose(0, 1), self._keys).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """latents [tokens, heads, latent] -> values [tokens, heads * value]."""
        return torch.bmm(latents.transpose(0, 1), self._values.transpose(1, 2)).transpose(0, 1).flatten(1)


class Indexer(Module):
    """Index keys and head weights from the hidden state. Its queries are a part of the attention's own product."""

    def __init__(self, shape: IndexedPositions, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        stored = {"wk": shape.head_dim, "weights_proj": shape.num_heads}
        self.keys_and_weights = FusedLinear(hidden_size, stored, bias=False, dtype=dtype, device=device)
        self.key_norm = LayerNorm(shape.head_dim, dtype=dtype, device=device)
        self.sizes = (shape.head_dim, shape.num_heads)
        self.scale = (shape.num_heads * shape.head_dim) ** -0.5

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("", self.keys_and_weights), ("k_norm", self.key_norm)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> keys [tokens, 1, dim] before the rope, weights [tokens, heads] in float32 (float64)."""
        key, weights = self.keys_and_weights(x).split(self.sizes, dim=1)
        wide = torch.promote_types(weights.dtype, torch.float32)
        return self.key_norm(key)[:, None], weights.to(wide) * self.scale


class LatentAttention(TokenMixer):
    def __init__(self, layer: LatentLayer, shape: LatentShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layer, self.shape = layer, shape
        index = layer.attends_to if isinstance(layer.attends_to, IndexedPositions) else None
        head_dim = shape.nope_dim + layer.rope_dim
        compressed = {"kv_a_proj_with_mqa": layer.latent_dim + layer.rope_dim}
        queries = {"q_b_proj" if shape.q_rank else "q_proj": layer.num_heads * head_dim}
        if shape.q_rank is not None:
            compressed = {"q_a_proj": shape.q_rank} | compressed
        if index is not None:
            queries["indexer.wq_b"] = index.num_heads * index.head_dim
        self.compress = FusedLinear(shape.hidden_size, compressed, bias=shape.has_bias, dtype=dtype, device=device)
        self.queries = FusedLinear(shape.q_rank or shape.hidden_size, queries, bias=False, dtype=dtype, device=device)
        self.q_norm = None if shape.q_rank is None else RMSNorm(shape.q_rank, NORM_EPS, dtype=dtype, device=device)
        self.latent_norm = RMSNorm(layer.latent_dim, NORM_EPS, dtype=dtype, device=device)
        self.expansion = LatentExpansion(layer.num_heads, shape.nope_dim, shape.value_dim, layer.latent_dim,
                                         dtype=dtype, device=device)
        self.indexer = None if index is None else Indexer(index, shape.hidden_size, dtype=dtype, device=device)
        self.out = Linear(layer.num_heads * shape.value_dim, shape.hidden_size, bias=shape.has_bias, dtype=dtype,
                          device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        q_norm = [] if self.q_norm is None else [("q_a_layernorm", self.q_norm)]
        indexer = [] if self.indexer is None else [("indexer", self.indexer)]
        return [("", self.compress), *q_norm, ("", self.queries), ("kv_a_layernorm", self.latent_norm),
                ("kv_b_proj", self.expansion), *indexer, ("o_proj", self.out)]

    def __call__(self, x: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        """x: [tokens, hidden]."""
        layer, nope_dim = self.layer, self.shape.nope_dim
        bound: BoundLatentLayer = attend.mixer(layer.index)
        *compressed_q, latent, key = self.compress(x).split(self._compressed_sizes(), dim=1)
        queries = self.queries(x if self.q_norm is None else self.q_norm(compressed_q[0].contiguous()))
        q_size = layer.num_heads * (nope_dim + layer.rope_dim)
        if self.indexer is not None:
            self._choose(bound, x, queries[:, q_size:], angles)
        q = queries[:, :q_size].unflatten(1, (layer.num_heads, -1))
        q = torch.cat((self.expansion.absorb(q[..., :nope_dim]), rotate_pairs(q[..., nope_dim:], angles)), dim=-1)
        entries = torch.cat((self.latent_norm(latent.contiguous()), rotate_pairs(key[:, None], angles)[:, 0]), dim=-1)
        return self.out(self.expansion.expand(bound(q, entries)))

    def _choose(self, bound: BoundLatentLayer, x: torch.Tensor, queries: torch.Tensor, angles: Angles) -> None:
        assert self.indexer is not None
        turn = rotate_pairs if self.shape.index_rotates_pairs else rotate
        key, weights = self.indexer(x)
        bound.choose(turn(queries.unflatten(1, (weights.shape[1], -1)), angles), turn(key, angles)[:, 0], weights)

    def _compressed_sizes(self) -> list[int]:
        q_rank = [] if self.shape.q_rank is None else [self.shape.q_rank]
        return [*q_rank, self.layer.latent_dim, self.layer.rope_dim]
