"""Products of 16-bit numbers in one call of the vendor's library, together with the sum or rounding that follows.

The table of operations says when they are used; torch's plain product is their reference.
"""

from __future__ import annotations

import torch

MANY_ROWS = 1024  # token rows from which on a product adds to the residual stream itself: the norm then reads less


def has_many_rows(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                  bias: torch.Tensor | None = None) -> bool:
    """Whether `add_product` serves: there are many token rows, and no bias."""
    return x.shape[0] >= MANY_ROWS and bias is None


def add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                bias: torch.Tensor | None = None) -> None:
    """residual += x @ weight', rounded once."""
    residual.addmm_(x, weight.t())


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight' with sums that stay in float32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
