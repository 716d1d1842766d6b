"""Formats of the latent expansion: a matrix [heads x (key + value), latent] that is used from both sides.

Queries are multiplied with its keys' part, which brings them into the latent space, and latents with its values' part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.weight_format import MatrixFormat
from outrider.kernels import ops
from outrider.kernels.buffers import empty_weight


@dataclass(frozen=True, kw_only=True)
class ExpansionDeclaration(LinearDeclaration):
    """Rows head by head: first those of the head's key, then those of its value."""

    key_dim: int
    value_dim: int

    @property
    def num_heads(self) -> int:
        """Heads that this rank holds."""
        return self.num_outputs // (self.key_dim + self.value_dim)


class ExpansionFormat(MatrixFormat):
    declared: ExpansionDeclaration

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([heads, latent, key], [heads, value, latent]) in the model's dtype, for kernels that do more than these
        products; None if the format has no such numbers, or must be exact."""
        return None

    @abstractmethod
    def to_latent(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """queries [tokens, heads, key] into out [tokens, heads, latent]: the products of the result with latents are
        those of the queries with keys."""

    @abstractmethod
    def to_values(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        """latents [tokens, heads, latent] into out [tokens, heads, value]."""


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
