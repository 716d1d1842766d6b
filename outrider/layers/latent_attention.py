"""Latent attention (MLA): the keys and values of all heads are made from one compressed vector per token. An indexer
may choose the positions to attend to.

The projection from the latent space to keys is absorbed into the queries, and the projection to values is applied to
the attention's output. So the cache holds compressed vectors only, which `context.attend` reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.core.ranks import ShardSize
from outrider.formats import (
    DenseExpansion,
    ExpansionDeclaration,
    ExpansionFormat,
    InputShard,
    LinearFormat,
    ModelSize,
    OutputShard,
    RankGroup,
    Ranks,
)
from outrider.kernels import ops
from outrider.kernels.latent_inputs import RopeRows
from outrider.layers.base import FormatModule, Module, Parameter, TokenMixer
from outrider.layers.context import RowDeltas, StepContext
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles
from outrider.mixers import BoundLatentLayer, IndexedPositions, LatentLayer, LatentNorms, PooledPositions

POOL_GATE, PLACE_BIAS = "indexer.index_kpool_compress_gate", "indexer.index_kpool_compress_ape"
NORM_EPS = 1e-6  # eps of the norms of compressed vectors and of index keys, whatever the model's own is


@dataclass(frozen=True)
class LatentShape:
    """The sizes of a latent attention layer that its cache spec does not contain."""

    hidden_size: int
    q_rank: int | None  # None: queries come from the hidden state in one product
    nope_dim: int  # dimensions of a query head that do not rotate
    value_dim: int
    has_bias: bool
    index_rotates_pairs: bool  # the indexer's rope is interleaved, too
    norm_eps: float = NORM_EPS  # of the norms of compressed vectors
    rotates_pairs: bool = True  # the rope of queries and of the keys beside latents is interleaved
    index_rope_at_end: bool = False  # index keys and their queries rotate in their last dimensions
    index_eps: float = NORM_EPS  # of the norm of index keys


class LayerNorm(Module):
    """A layer norm: (x - mean) / std * weight + bias."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight, self.bias = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("weight", Parameter(self.weight)), ("bias", Parameter(self.bias))


class LatentExpansion(FormatModule[ExpansionFormat]):
    """The projection from the latent space to the keys and values of each head. Its key rows are applied to queries,
    and its value rows to the attention's output."""

    declared: ExpansionDeclaration
    format_base = ExpansionFormat

    def __init__(self, num_heads: int, nope_dim: int, value_dim: int, latent_dim: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        sizes = {"": ModelSize(num_heads * (nope_dim + value_dim))}
        declared = ExpansionDeclaration(ModelSize(latent_dim), sizes, has_bias=False, dtype=dtype, device=device,
                                        key_dim=nope_dim, value_dim=value_dim)
        super().__init__(declared, DenseExpansion)

    def enter(self, queries: torch.Tensor, rope: RopeRows, q: torch.Tensor, index_q: torch.Tensor | None,
              index_in_pairs: bool, context: StepContext) -> None:
        """Project queries [tokens, heads x (nope | rope) | index heads x dim] into the latent space and rotate them.
        The results are written into q [tokens, heads, latent | rope] and index_q [tokens, index heads, dim]."""
        declared, plain = self.declared, self.format.plain_parts
        deltas = self._deltas(context)
        if plain is not None and deltas is None:
            given = (queries, rope, q, plain[0], index_q, index_in_pairs)
            if ops.enter_latents.has_kernel(*given):
                ops.enter_latents(*given)
                return
        num_heads, nope_dim = declared.num_heads, declared.key_dim
        ops.rotate_queries(queries, rope, q, nope_dim, index_q, index_in_pairs)
        heads = queries[:, : num_heads * (nope_dim + rope.table.shape[1])].unflatten(1, (num_heads, -1))
        self.format.to_latent(heads[..., :nope_dim], q[..., : declared.num_inputs])
        if deltas is not None:
            deltas.add_to_latents(q[..., : declared.num_inputs], self, heads[..., :nope_dim])

    def attend(self, bound: BoundLatentLayer, q: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Attend with queries in the latent space and return values [tokens, heads * value]."""
        plain, deltas = self.format.plain_parts, self._deltas(context)
        values = None if plain is None or deltas is not None else bound.values(q, plain[1])
        return self.expand(bound(q), deltas) if values is None else values.flatten(1)

    def expand(self, latents: torch.Tensor, deltas: RowDeltas | None = None) -> torch.Tensor:
        """Project latents [tokens, heads, latent] to values [tokens, heads * value]."""
        values = latents.new_empty(*latents.shape[:2], self.declared.value_dim)
        self.format.to_values(latents, values)
        if deltas is not None:
            deltas.add_to_values(values, self, latents)
        return values.flatten(1)

    def _deltas(self, context: StepContext) -> RowDeltas | None:
        """The row deltas of the step if any of them changes the expansion, otherwise None."""
        deltas = context.deltas
        return deltas if deltas is not None and deltas.change(self) else None


class Compression(Module):
    """The linear layers that read a layer's input. They make compressed queries and latents. With an indexer they also
    make index keys and head weights, and gates if it chooses blocks. They are one matrix product unless only some of
    them have a bias."""

    def __init__(self, shape: LatentShape, layer: LatentLayer, index: IndexedPositions | None, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        stored = {} if shape.q_rank is None else {"q_a_proj": shape.q_rank}
        stored["kv_a_proj_with_mqa"] = layer.latent_dim + layer.rope_dim
        of_index = {} if index is None else {"indexer.wk": index.head_dim, "indexer.weights_proj": index.num_heads}
        if isinstance(index, PooledPositions):
            of_index[POOL_GATE] = index.head_dim
        products = [(stored, True), (of_index, False)] if shape.has_bias else [(stored | of_index, False)]
        self.products = [FusedLinear(shape.hidden_size, names, bias=bias, dtype=dtype, device=device)
                         for names, bias in products if names]

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("", product) for product in self.products]

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute the joint product: x [tokens, hidden] -> [tokens, q | latent | rope | index key | head weights |
        gate]."""
        made = [product(x, context) for product in self.products]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)


class LatentAttention(TokenMixer):
    out_name = "o_proj"

    def __init__(self, layer: LatentLayer, shape: LatentShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layer, self.shape = layer, shape
        self.index = layer.attends_to if isinstance(layer.attends_to, IndexedPositions) else None
        queries = {"q_b_proj" if shape.q_rank else "q_proj": layer.num_heads * (shape.nope_dim + layer.rope_dim)}
        if self.index is not None:
            queries["indexer.wq_b"] = self.index.num_heads * self.index.head_dim
        self.compress = Compression(shape, layer, self.index, dtype=dtype, device=device)
        self.queries = FusedLinear(shape.q_rank or shape.hidden_size, queries, bias=False, dtype=dtype, device=device)
        eps = shape.norm_eps
        self.q_norm = None if shape.q_rank is None else RMSNorm(shape.q_rank, eps, dtype=dtype, device=device)
        self.latent_norm = RMSNorm(layer.latent_dim, eps, dtype=dtype, device=device)
        self.key_norm = None if self.index is None else LayerNorm(self.index.head_dim, dtype=dtype, device=device)
        self.place_bias: torch.Tensor | None = None  # [size, dim] of the gates of blocks
        if isinstance(self.index, PooledPositions):
            shape_of_bias = self.index.blocks.size, self.index.head_dim
            self.place_bias = torch.empty(shape_of_bias, dtype=dtype, device=device)
        self.expansion = LatentExpansion(layer.num_heads, shape.nope_dim, shape.value_dim, layer.latent_dim,
                                         dtype=dtype, device=device)
        self.out = Linear(layer.num_heads * shape.value_dim, shape.hidden_size, bias=shape.has_bias, dtype=dtype,
                          device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        q_norm = [] if self.q_norm is None else [("q_a_layernorm", self.q_norm)]
        key_norm: list[tuple[str, Module]] = [] if self.key_norm is None else [("indexer.k_norm", self.key_norm)]
        if self.place_bias is not None:
            key_norm.append((PLACE_BIAS, Parameter(self.place_bias)))
        return [("", self.compress), *q_norm, ("", self.queries), ("kv_a_layernorm", self.latent_norm),
                ("kv_b_proj", self.expansion), *key_norm, (self.out_name, self.out)]

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("num_attention_heads",), self.layer.num_heads),)

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's heads. Every rank holds the compressions, their norms and the whole indexer, because all
        ranks cache the same latents and must choose the same positions."""
        ranks = Ranks.from_group(group)
        self.queries.declare_shard(OutputShard(ranks, {"indexer.wq_b": 1}))
        self.expansion.declare_shard(OutputShard(ranks))
        self.out.declare_shard(InputShard.from_group(group))
        self.layer = self.layer.of_rank(group.count)

    def readers(self) -> Sequence[LinearFormat]:
        first = self.compress.products if self.q_norm is not None else [*self.compress.products, self.queries]
        return [product.format for product in first]

    def __call__(self, x: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Compute attention for x [tokens, hidden]."""
        bound: BoundLatentLayer = context.attend.mixer(self.layer.index)
        shape = self.shape
        rope = RopeRows(angles.positions, angles.table, shape.rotates_pairs, shape.index_rope_at_end)
        compressed_q, weights = bound.write(self.compress(x, context), self._norms(), rope)
        queries = self.scaled_queries(self.queries(x if self.q_norm is None else compressed_q, context), angles)
        return self.leave(self.expansion.attend(bound, self._enter(queries, weights, rope, bound, context), context),
                          x, context)

    def scaled_queries(self, queries: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Scale queries [tokens, heads x (nope | rope) | ..] by their positions, possibly in place. By default queries
        stay unchanged."""
        return queries

    def leave(self, values: torch.Tensor, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Apply output gate and output projection: values [tokens, heads * value], with the layer's input x [tokens,
        hidden], -> [tokens, hidden]."""
        return self.out(values, context)

    def _norms(self) -> LatentNorms:
        index_key = None if self.key_norm is None else (self.key_norm.weight, self.key_norm.bias)
        return LatentNorms(None if self.q_norm is None else self.q_norm.scale, self.latent_norm.scale, index_key,
                           self.shape.norm_eps, self.shape.index_rotates_pairs, self.shape.index_eps, self.place_bias)

    def _enter(self, queries: torch.Tensor, weights: torch.Tensor, rope: RopeRows,
               bound: BoundLatentLayer, context: StepContext) -> torch.Tensor:
        """Bring the queries into the latent space: [tokens, heads, latent | rope]. If the layer has an indexer, it
        chooses positions here with its own queries."""
        layer, tokens = self.layer, queries.shape[0]
        q = queries.new_empty(tokens, layer.num_heads, layer.latent_dim + layer.rope_dim)
        index_q = None
        if self.index is not None:
            index_q = queries.new_empty(tokens, self.index.num_heads, self.index.head_dim)
        self.expansion.enter(queries, rope, q, index_q, self.shape.index_rotates_pairs, context)
        if index_q is not None:
            bound.choose(index_q, weights)
        return q
