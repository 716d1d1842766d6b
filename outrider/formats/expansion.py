"""Formats of the latent expansion, the weight [heads x (key + value), latent] that expands a latent to keys and values
(MLA's `kv_b_proj`).

Attention works in the latent space, so the matrix is used from both sides. Its key rows bring queries into the latent
space, and its value rows expand the attention's result to values.
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
    """The declaration of a latent expansion. The rows are stored head by head: first a head's key rows, then its value
    rows."""

    key_dim: int
    value_dim: int

    @property
    def num_heads(self) -> int:
        """Return the number of heads that this rank holds."""
        return self.num_outputs // (self.key_dim + self.value_dim)


class ExpansionFormat(MatrixFormat):
    use = EXPANSION
    declared: ExpansionDeclaration

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the key and value parts as plain tensors, ([heads, latent, key], [heads, value, latent]) in the
        model's dtype, for kernels that fuse these products with others. None if the format has no such tensors, or must
        be exact."""
        return None

    @abstractmethod
    def to_latent(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Bring queries [tokens, heads, key] into the latent space, into out [tokens, heads, latent]. The dot product
        of the result with a latent equals that of the query with the latent's key."""

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
