"""Shapes for which a kernel is the right one, beyond its device and dtype: what rows of the table name as `takes`."""

from __future__ import annotations

import torch


def is_matrix(x: torch.Tensor, *_: object) -> bool:
    return x.dim() == 2
