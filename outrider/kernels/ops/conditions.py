"""Shapes for which a kernel is the right one, beyond its device and dtype: what rows of the table name as `takes`."""

from __future__ import annotations

import torch

from outrider.kernels.native.checks import takes_linear
from outrider.kernels.native.products import NATIVE_MAX_ROWS


def is_matrix(x: torch.Tensor, *_: object) -> bool:
    return x.dim() == 2


def has_one_row(x: torch.Tensor, *_: object) -> bool:
    """One token row: a product is a matter of reading the weights once, and small kernels cost by their number."""
    return x.shape[0] == 1


def are_two(first: torch.Tensor, second: torch.Tensor, index: torch.Tensor) -> bool:
    return first is not second


def is_few_rows_for_native(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[0] <= NATIVE_MAX_ROWS and takes_linear(x, weight)


def library_wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The library's own product of 16-bit operands with sums that stay in float32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
