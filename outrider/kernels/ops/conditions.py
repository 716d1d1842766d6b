"""Conditions on shapes under which a kernel serves, beyond its device and dtype. Rows of the table name them as
`takes`."""

from __future__ import annotations

import torch

from outrider.kernels.native.checks import takes_linear
from outrider.kernels.native.products import NATIVE_MAX_ROWS

MANY_ROWS = 1024  # token rows from which on a product adds to the residual stream itself: the norm then reads less


def is_matrix(x: torch.Tensor, *_: object) -> bool:
    return x.dim() == 2


def has_one_row(x: torch.Tensor, *_: object) -> bool:
    """Whether there is one token row. Then a product takes little more than reading the weights once, and every small
    kernel that is saved counts."""
    return x.shape[0] == 1


def has_many_rows(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                  bias: torch.Tensor | None = None) -> bool:
    return x.shape[0] >= MANY_ROWS and bias is None


def add_by_library(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                   bias: torch.Tensor | None = None) -> None:
    """The library's own product with a sum, rounded once."""
    residual.addmm_(x, weight.t())


def are_two(first: torch.Tensor, second: torch.Tensor, index: torch.Tensor) -> bool:
    return first is not second


def is_few_rows_for_native(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[0] <= NATIVE_MAX_ROWS and takes_linear(x, weight)


def wide_by_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The library's own product of 16-bit operands with sums that stay in float32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
