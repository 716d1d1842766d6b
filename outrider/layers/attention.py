"""The self-attention block that the families share: one product for q, k and v, norms, rope, attention, output.

`context.attend` stores keys and values, so the block does not depend on the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.ranks import ShardSize
from outrider.formats import InputShard, LinearFormat, OutputShard, PackedPart, PairedHeads, RankGroup, Ranks
from outrider.layers.base import Module, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.norm import HeadNorm
from outrider.layers.rotary import Angles, rotate
from outrider.mixers import AttentionLayer, HeadNorms, PagedLayer, WantedRows


class SelfAttention(TokenMixer):
    def __init__(
        self,
        layer: AttentionLayer,
        hidden_size: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        head_norm: HeadNorm | None,
        has_v: bool = True,
        paired_dim: int = 0,
        is_packed: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """has_v: False if the layer has no matrix for values and uses the keys before their norm as values. paired_dim:
        the number of leading dimensions of a head that the checkpoint's rope turns in pairs of neighbours. is_packed:
        the checkpoint has q, k and v in one tensor."""
        self.layer = layer
        q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        written = {"k_proj": kv_size, **({"v_proj": kv_size} if has_v else {})}
        stored = {"q_proj": q_size, **(written if layer.writes else {})}
        layouts = {}
        if paired_dim:
            sizes = (paired_dim, layer.head_dim - paired_dim)
            layouts = {"q_proj": PairedHeads(layer.num_heads, sizes), "k_proj": PairedHeads(layer.num_kv_heads, sizes)}
        self._packed = tuple(stored.values()) if is_packed else ()
        stored = {"qkv_proj": sum(self._packed)} if is_packed else stored
        self.qkv = FusedLinear(hidden_size, stored, bias=qkv_bias, dtype=dtype, device=device, layouts=layouts)
        self.out = Linear(q_size, hidden_size, bias=out_bias, dtype=dtype, device=device)
        self.head_norm = head_norm

    @property
    def qk_size(self) -> int:
        return (self.layer.num_heads + self.layer.num_kv_heads) * self.layer.head_dim

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("num_attention_heads",), self.layer.num_heads),
                ShardSize(("num_key_value_heads", "num_global_key_value_heads"), self.layer.num_kv_heads,
                          may_copy=True))

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's q heads with their gates, and the k and v heads that they read."""
        kv_pieces = min(self.layer.num_kv_heads, group.count)
        pieces, packed = dict.fromkeys(("k_proj", "v_proj"), kv_pieces), {}
        if self._packed:
            q_size, *kv_sizes = self._packed
            packed = {"qkv_proj": [PackedPart(q_size), *(PackedPart(size, kv_pieces) for size in kv_sizes)]}
        self.qkv.declare_shard(OutputShard(Ranks.from_group(group), pieces, packed))
        self.out.declare_shard(InputShard.from_group(group))
        self.layer = self.layer.of_rank(group.count)
        if self.head_norm is not None:
            self.head_norm.set_heads(self.layer.num_heads, self.layer.num_kv_heads)

    def parts(self) -> Sequence[tuple[str, Module]]:
        norms = [] if self.head_norm is None else [("", self.head_norm)]
        return [("", self.qkv), ("o_proj", self.out), *norms]

    def __call__(self, x: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Compute attention for x [tokens, hidden]. q and k heads are adjacent in memory, so one operation norms and
        rotates both."""
        return self.out(self.mix(self.qkv(x, context), angles, context), context)

    def for_rows(self, x: torch.Tensor, angles: Angles, context: StepContext, rows: WantedRows) -> torch.Tensor:
        mixed = self.mix_rows(x, angles, context, rows)
        if mixed is None:
            mixed = self.mix(self.qkv(x, context), angles, context)[rows.token_rows]
        return self.out(mixed, context.of_rows(rows))

    def mix_rows(self, x: torch.Tensor, angles: Angles, context: StepContext, rows: WantedRows) -> torch.Tensor | None:
        """Attend with the queries of some token rows only, and return [rows, heads * dim]. Keys and values of all of x
        are written to the cache. Returns None if the backend can attend only for all the tokens that it writes, or if a
        subclass overrides `mix` but not this method."""
        layer = self.layer
        if type(self).mix is not SelfAttention.mix or layer.index not in rows.layers:
            return None
        q_size = layer.num_heads * layer.head_dim
        if layer.writes:
            paged: PagedLayer = context.attend.mixer(layer.index)
            written = self.qkv.part(x, q_size, self.qkv.out_features, context)
            paged.write_fused(written, angles, self.norms)
        own: PagedLayer = rows.mixer(layer.index)
        q = self.qkv.part(x[rows.token_rows], 0, q_size, context.of_rows(rows))
        return own.read_fused(q, angles.of_rows(rows.token_rows), self.norms)

    def readers(self) -> Sequence[LinearFormat]:
        return (self.qkv.format,)

    @property
    def norms(self) -> HeadNorms | None:
        return None if self.head_norm is None else self.head_norm.norms

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, angles: Angles, context: StepContext) -> None:
        """Add attention(x) to residual, in place."""
        self.out.add_to(residual, self.mix(self.qkv(x, context), angles, context), context)

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Apply norms, rope and attention: [tokens, q | k | v] -> [tokens, heads * dim]."""
        paged: PagedLayer = context.attend.mixer(self.layer.index)
        out = paged.fused(qkv, angles, self.norms)
        return self.mix_unfused(qkv, angles, paged) if out is None else out

    def mix_unfused(self, qkv: torch.Tensor, angles: Angles, paged: PagedLayer) -> torch.Tensor:
        """Compute `mix` with a backend that takes q, k and v after norms and rope."""
        layer = self.layer
        qk = qkv[:, : self.qk_size].view(-1, layer.num_heads + layer.num_kv_heads, layer.head_dim)
        v = qkv[:, self.qk_size :].view(-1, layer.num_kv_heads, layer.head_dim)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = rotate(qk, angles)
        return paged(qk[:, : layer.num_heads], qk[:, layer.num_heads :], v)
