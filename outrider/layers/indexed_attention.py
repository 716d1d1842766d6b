"""Gated attention to blocks of a context that an indexer chooses (Qwen4-Exp).

The indexer has its own query heads and one key, computed by the same product as q, k and v. `context.attend` holds the
keys and chooses the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.formats import HeadLayout, OutputShard, RankGroup, Ranks
from outrider.kernels import ops
from outrider.layers.attention import SelfAttention
from outrider.layers.base import Module
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear
from outrider.layers.norm import HeadNorm, RMSNorm
from outrider.layers.rotary import Angles, rotate
from outrider.mixers import BlockInputs, BoundIndexedLayer, IndexedLayer

INDEX = "indexer.index_qk_proj"


class IndexedAttention(SelfAttention):
    """Attention with norms of q and k heads and a sigmoid gate. The indexer reads the same hidden state. The files
    store q and gate head by head in `q_proj`; here all gates come before q."""

    layer: IndexedLayer

    def __init__(self, layer: IndexedLayer, hidden_size: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        norm = HeadNorm(*heads, eps, dtype=dtype, device=device, offset=True)
        super().__init__(layer, hidden_size, qkv_bias=False, out_bias=False, head_norm=norm, dtype=dtype, device=device)
        index, q_size = layer.choice, layer.num_heads * layer.head_dim
        stored = self.qkv.stored | {"q_proj": 2 * q_size, INDEX: (index.num_heads + 1) * index.head_dim}
        layout = HeadLayout(layer.num_heads, (layer.head_dim, layer.head_dim), is_reversed=True)
        self.qkv = FusedLinear(hidden_size, stored, bias=False, dtype=dtype, device=device, layouts={"q_proj": layout})
        self.index_q_norm, self.index_k_norm = (
            RMSNorm(index.head_dim, eps, dtype=dtype, device=device, offset=True) for _ in range(2))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("indexer.q_layernorm", self.index_q_norm),
                ("indexer.k_layernorm", self.index_k_norm)]

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's heads. Every rank holds the whole indexer, because all must choose the same blocks."""
        pieces = dict.fromkeys(("k_proj", "v_proj"), min(self.layer.num_kv_heads, group.count))
        super().shard(group)
        self.qkv.declare_shard(OutputShard(Ranks.from_group(group), pieces | {INDEX: 1}))

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Apply norms, rope, attention and gate: [tokens, gate | q | k | v | index q | index k] -> [tokens, heads *
        dim]."""
        layer, index = self.layer, self.layer.choice
        assert self.head_norm is not None
        q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        gate, qk, v, index_q, index_k = qkv.split(
            (q_size, q_size + kv_size, kv_size, index.num_heads * index.head_dim, index.head_dim), dim=1)
        qk = rotate(self.head_norm(qk.unflatten(1, (-1, layer.head_dim))), angles)
        index_q = self.index_q_norm(index_q.unflatten(1, (-1, index.head_dim)))
        given = BlockInputs(rotate(index_q, angles), index_k, self.index_k_norm.scale, self.index_k_norm.eps,
                            angles.table)
        bound: BoundIndexedLayer = context.attend.mixer(layer.index)
        out = bound(qk[:, : layer.num_heads], qk[:, layer.num_heads :], v.unflatten(1, (-1, layer.head_dim)), given)
        return ops.sigmoid_scale(out, gate)
