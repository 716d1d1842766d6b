"""Self-attention with features that fused attention kernels lack: q and k norms over all heads at once, after the rope,
or with the mean subtracted; and output gates.

Norms and gates are separate operations; rope, cache write and attention are those of `SelfAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from outrider.formats import PairedHeads, RankGroup, Ranks
from outrider.formats.declared import ModelSize
from outrider.kernels import ops
from outrider.kernels.reference import widened
from outrider.layers.attention import SelfAttention
from outrider.layers.base import HeldRows, Module, Parameter
from outrider.layers.context import StepContext
from outrider.layers.norm import HeadNorm, RMSNorm
from outrider.layers.rotary import Angles, rotate
from outrider.mixers import AttentionLayer, PagedLayer


class WidthNorm(Module):
    """The RMS norm over all q heads together, or over all k heads. Ranks that share the heads add up their sums of
    squares."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.head_dim = num_heads, head_dim
        self.norm = RMSNorm(num_heads * head_dim, eps, dtype=dtype, device=device)
        self.copies = 1  # ranks that hold the same heads
        self._held: HeldRows | None = None

    def shard(self, group: RankGroup) -> None:
        """Keep the scales of this rank's heads."""
        pieces, norm = min(self.num_heads, group.count), self.norm
        held = Ranks.from_group(group).share(ModelSize(self.num_heads), pieces)
        rows = range(held.start * self.head_dim, held.stop * self.head_dim)
        self.copies, self._held = group.count // pieces, HeldRows(norm.size, (rows,))
        norm.weight = norm.scale = norm.weight.new_empty(len(rows))

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.norm.weight, self._held)),)

    def squares(self, wide: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares of this rank's features: [tokens, 1]."""
        return wide.square().sum(dim=-1, keepdim=True) / self.copies

    def scaled(self, wide: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Norm this rank's features, given the sum of squares over all ranks."""
        return wide * torch.rsqrt(squares / self.norm.size + self.norm.eps) * widened(self.norm.weight)


class WidthNormAttention(SelfAttention):
    """Attention with one norm over all q heads and one over all k heads, before the rope."""

    def __init__(self, layer: AttentionLayer, hidden_size: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device, **options: Any) -> None:
        super().__init__(layer, hidden_size, head_norm=None, dtype=dtype, device=device, **options)
        self.q_norm, self.k_norm = (WidthNorm(heads, layer.head_dim, eps, dtype=dtype, device=device)
                                    for heads in (layer.num_heads, layer.num_kv_heads))
        self._group: RankGroup | None = None

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("q_norm", self.q_norm), ("k_norm", self.k_norm)]

    def shard(self, group: RankGroup) -> None:
        super().shard(group)
        self._group = group
        self.q_norm.shard(group)
        self.k_norm.shard(group)

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        q_size = self.layer.num_heads * self.layer.head_dim
        q, k, v = qkv[:, :q_size], qkv[:, q_size : self.qk_size], qkv[:, self.qk_size :]
        return super().mix(torch.cat((*self._normed(q, k), v), dim=1), angles, context)

    def _normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._group is None:
            return self.q_norm.norm(q.contiguous()), self.k_norm.norm(k.contiguous())
        wide_q, wide_k = widened(q), widened(k)
        squares = self._group.sum(torch.cat((self.q_norm.squares(wide_q), self.k_norm.squares(wide_k)), dim=1))
        return (self.q_norm.scaled(wide_q, squares[:, :1]).to(q.dtype),
                self.k_norm.scaled(wide_k, squares[:, 1:]).to(k.dtype))


class LateNormAttention(SelfAttention):
    """Attention that applies the norms of q and k heads after the rope."""

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        assert self.head_norm is not None
        layer = self.layer
        qk, v = qkv[:, : self.qk_size], qkv[:, self.qk_size :].view(-1, layer.num_kv_heads, layer.head_dim)
        qk = self.head_norm(rotate(qk.view(-1, layer.num_heads + layer.num_kv_heads, layer.head_dim), angles))
        paged: PagedLayer = context.attend.mixer(layer.index)
        return paged(qk[:, : layer.num_heads], qk[:, layer.num_heads :], v)


class CenteredHeadNorm(HeadNorm):
    """Layer norms of each q and k head, without a bias and with separate scales for every head: [heads, dim] in the
    checkpoint. paired_dim: see `SelfAttention`; the scales are reordered with the features."""

    def __init__(self, layer: AttentionLayer, eps: float, paired_dim: int, *, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(layer.num_heads, layer.num_kv_heads, layer.head_dim, eps, dtype=dtype, device=device)
        self.sizes = (paired_dim, layer.head_dim - paired_dim)
        self.scales = [torch.empty(heads, layer.head_dim, dtype=dtype, device=device)
                       for heads in (layer.num_heads, layer.num_kv_heads)]
        self._held: list[HeldRows | None] = [None, None]

    def shard(self, group: RankGroup) -> None:
        """Keep the scales of this rank's heads."""
        for at, whole in enumerate(self.scales):
            heads = Ranks.from_group(group).share(ModelSize(len(whole)), min(len(whole), group.count))
            self._held[at] = HeldRows(len(whole), (heads,))
            self.scales[at] = whole.new_empty(len(heads), whole.shape[1])

    def parts(self) -> Sequence[tuple[str, Module]]:
        own = zip(self.names, self.scales, self._held, strict=True)
        return [(f"{name}.weight", Parameter(scale, held)) for name, scale, held in own]

    def finalize(self) -> None:
        flat = [PairedHeads(len(scale), self.sizes).sort(scale.flatten()).view_as(scale) for scale in self.scales]
        self.scale = widened(torch.cat(flat))

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(widened(qk), qk.shape[-1:], eps=self.eps) * self.scale).to(qk.dtype)


class CenteredNormAttention(SelfAttention):
    """Attention with a `CenteredHeadNorm`, which no attention kernel applies."""

    def shard(self, group: RankGroup) -> None:
        super().shard(group)
        assert self.head_norm is not None
        self.head_norm.shard(group)

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        return self.mix_unfused(qkv, angles, context.attend.mixer(self.layer.index))


class OutputGatedAttention(SelfAttention):
    """Attention whose output is multiplied by a sigmoid gate. A subclass makes the product of gate, q, k and v."""

    def mix(self, qkv: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Apply norms, rope, attention and gate: [tokens, gate | q | k | v] -> [tokens, heads * dim]."""
        paged: PagedLayer = context.attend.mixer(self.layer.index)
        gate_size = self.layer.num_heads * self.layer.head_dim
        out = self.mix_unfused(qkv[:, gate_size:], angles, paged)
        return ops.sigmoid_scale(out, qkv[:, :gate_size])
