"""Formats of the latent expansion, the matrix [heads x (key + value), latent] of latent attention.

The matrix is used from both sides: queries are multiplied with its key rows, which brings them into the latent space,
and latents with its value rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.weight_format import EXPANSION, MatrixFormat
from outrider.kernels import ops
from outrider.kernels.buffers import empty_weight


@dataclass(frozen=True, kw_only=True)
class ExpansionDeclaration(LinearDeclaration):
    """The declaration of a latent expansion. Its rows are stored head by head: first the head's key rows, then its
    value rows."""

    key_dim: int
    value_dim: int

    @property
    def num_heads(self) -> int:
        """Heads that this rank holds."""
        return self.num_outputs // (self.key_dim + self.value_dim)


class ExpansionFormat(MatrixFormat):
    use = EXPANSION
    declared: ExpansionDeclaration

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The key and value parts as plain tensors, ([heads, latent, key], [heads, value, latent]) in the model's
        dtype, for kernels that fuse more than these products. None if the format has no such tensors, or must be
        exact."""
        return None

    @abstractmethod
    def to_latent(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Bring queries [tokens, heads, key] into the latent space, into out [tokens, heads, latent]. The product of
        the result with a latent equals the product of the query with the latent's key."""

    @abstractmethod
    def to_values(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        """Expand latents [tokens, heads, latent] to values, into out [tokens, heads, value]."""


class DenseExpansion(ExpansionFormat):
    def __init__(self, declared: ExpansionDeclaration, stored: Sequence[StoredFormat] = ()) -> None:
        super().__init__(declared)
        shape = declared.num_outputs, declared.num_inputs
        self._weight = empty_weight(*shape, dtype=declared.dtype, device=declared.device)
        heads = self._weight.view(declared.num_heads, -1, declared.num_inputs)
        keys, values = heads.split((declared.key_dim, declared.value_dim), dim=1)
        self._parts = keys.transpose(1, 2), values
        self._products, self._is_exact = ops.head_products, False

    def tensors(self) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", self._weight),)

    def set_exact(self, exact: bool) -> None:
        self._products, self._is_exact = ops.head_products.variant(exact), exact

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._is_exact else self._parts

    def to_latent(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        self._products(queries, self._parts[0], out)

    def to_values(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        self._products(latents, self._parts[1], out)
