"""Conditions on the shapes of a call under which a kernel serves, beyond its device and dtype. Entries of the table
name them as `takes`. A condition that belongs to a single kernel is in that kernel's file."""

from __future__ import annotations

import torch

from outrider.kernels.cpu.checks import takes_linear
from outrider.kernels.cpu.products import NATIVE_MAX_ROWS


def is_matrix(x: torch.Tensor, *_: object) -> bool:
    return x.dim() == 2


def has_one_row(x: torch.Tensor, *_: object) -> bool:
    """Whether there is one token row. A product then takes hardly longer than one read of the weights, so it pays to
    save every small kernel beside it."""
    return x.shape[0] == 1


def are_two(first: torch.Tensor, second: torch.Tensor, index: torch.Tensor) -> bool:
    return first is not second


def is_few_rows_for_native(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[0] <= NATIVE_MAX_ROWS and takes_linear(x, weight)
