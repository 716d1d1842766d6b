"""Norms: over the hidden size, and over the heads of q and k together.

Statistics are taken in float32 (float64 stays float64) and the result is rounded to the model's dtype. `offset` norms
(Gemma) scale by 1 + weight; this sum is kept in float32, because 16 bits would round it. A norm is usable after
`finalize()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from outrider.formats import LinearFormat
from outrider.kernels import ops
from outrider.kernels.reference import widened
from outrider.layers.base import Module, Parameter
from outrider.mixers import HeadNorms

if TYPE_CHECKING:
    from outrider.formats import ExpertsFormat


class Unnormed(NamedTuple):
    """A layer's addition to the residual stream that must be normed first. The next layer does this in one operation:
    it norms the addition, multiplies the stream by `factor` and adds both."""

    x: torch.Tensor
    scale: torch.Tensor  # scale of the norm, multiplied by `factor`
    eps: float
    factor: float = 1.0

    def for_rows(self, rows: torch.Tensor) -> Unnormed:
        """Return the addition for some of the token rows."""
        return self._replace(x=self.x[rows])

    def added_to(self, residual: torch.Tensor) -> torch.Tensor:
        """Return the residual stream with this addition made, as a new tensor."""
        return residual * self.factor + ops.rms_norm(self.x, self.scale, self.eps)


Delta: TypeAlias = torch.Tensor | Unnormed | None  # a layer's addition that the next layer carries out; None: none


def copy_stream(delta: Delta, residual: torch.Tensor) -> torch.Tensor:
    """Return a copy of the residual stream with delta added. A copy is needed because later layers change the stream in
    place."""
    if delta is None:
        return residual.clone()
    return delta.added_to(residual) if isinstance(delta, Unnormed) else residual + delta


class RMSNorm(Module):
    """The RMS norm over the last axis: x / rms(x) * weight."""

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: bool = False
    ) -> None:
        self.size = size
        self.eps = eps
        self.offset = offset
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.scale = self.weight  # the factor: the weight, or 1 + weight
        self._hint: tuple[int, ...] = ()

    def round_for(self, *readers: LinearFormat | ExpertsFormat) -> None:
        """Let the norm also produce its result rounded for the products of these formats (such as to fp8), if all
        formats need the same rounding."""
        groups = {reader.rounding for reader in readers} - {0}
        self._hint = tuple(groups) if len(groups) == 1 else ()

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("weight", Parameter(self.weight)),)

    def finalize(self) -> None:
        if self.offset:
            self.scale = 1 + widened(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x: [.., size]. The result is rounded as `round_for` asks only if x is a matrix."""
        if x.dim() == 2:
            return ops.rms_norm(x, self.scale, self.eps, *self._hint)
        return ops.rms_norm(x.reshape(-1, self.size), self.scale, self.eps).view(x.shape)

    def add_norm(self, x: Delta, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(residual + x), residual + x), where x is the previous layer's addition. The sum is written into
        `residual`."""
        if x is None:
            return self(residual), residual
        if isinstance(x, Unnormed) and x.eps == self.eps:
            return ops.norm_add_norm(x.x, x.scale, residual, self.scale, self.eps, x.factor, *self._hint), residual
        if isinstance(x, Unnormed):
            assert x.factor == 1
            x = ops.rms_norm(x.x, x.scale, x.eps)
        return ops.add_rms_norm(x, residual, self.scale, self.eps, *self._hint), residual


class CenteredNorm(RMSNorm):
    """A layer norm without a bias over the last axis: (x - mean) / std * weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        return F.layer_norm(wide, (self.size,), widened(self.scale), eps=self.eps).to(x.dtype)

    def add_norm(self, x: Delta, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x is None or isinstance(x, torch.Tensor)
        residual = residual if x is None else residual.add_(x)
        return self(residual), residual


class HeadNorm(Module):
    """The q and k norms of one attention layer as one operation on [tokens, heads + kv heads, head_dim]."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offset: bool = False,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.names = names
        self.eps = eps
        self.q = RMSNorm(head_dim, eps, dtype=dtype, device=device, offset=offset)
        self.k = RMSNorm(head_dim, eps, dtype=dtype, device=device, offset=offset)
        self.scale = torch.empty(0)
        self.ones = widened(torch.ones(head_dim, dtype=dtype, device=device))
        self.norms = HeadNorms(self.scale, self.scale, eps)  # for kernels that take the two scales separately

    def set_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Set the number of heads that this rank holds; called before `finalize`."""
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def parts(self) -> Sequence[tuple[str, Module]]:
        return tuple(zip(self.names, (self.q, self.k), strict=True))

    def finalize(self) -> None:
        """Repeat the scales of q and k for each of their heads, so that one multiplication scales all heads."""
        super().finalize()
        q = self.q.scale.expand(self.num_heads, -1)
        k = self.k.scale.expand(self.num_kv_heads, -1)
        self.scale = torch.cat((q, k))
        self.norms = HeadNorms(self.q.scale, self.k.scale, self.eps)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        x = widened(qk) if self.q.offset else qk
        normed = ops.rms_norm(x.reshape(-1, self.q.size), self.ones, self.eps).view(x.shape)
        return (normed * self.scale).to(qk.dtype)


class UnscaledHeadNorm(HeadNorm):
    """Norms of q and k heads that have no weights: their scales are 1."""

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ()

    def finalize(self) -> None:
        self.q.weight.fill_(1)
        self.k.weight.fill_(1)
        super().finalize()
