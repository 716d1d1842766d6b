"""Products of float32 token rows with a weight, computed as sums of short partial sums.

A library adds up the products of one output in one long chain, and a longer chain rounds more. For few token rows
libraries split the chain, because most of the GPU would be idle otherwise. A step with a short prompt is padded to more
token rows, for which libraries do not split it, so its results would be less exact than those of the same prompt alone.
Here the chain is split for any number of token rows up to `MAX_ROWS`.
"""

from __future__ import annotations

import torch

PIECE = 128  # inputs whose products are added up one after the other
MIN_ROWS, MAX_ROWS = 2, 1024  # token rows. A library divides the chain of a single row; longer prompts are padded less
MAX_PARTIAL = 1 << 24  # elements of the sums of pieces that are held at a time


def takes_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return MIN_ROWS <= x.shape[0] <= MAX_ROWS and x.shape[1] > PIECE


def summed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [tokens, inputs] with weight [outputs, inputs], and return [tokens, outputs]. Each piece of PIECE
    inputs is summed by itself, then the partial sums are added."""
    (num_tokens, inputs), outputs = x.shape, weight.shape[0]
    whole = inputs // PIECE * PIECE
    at_once = max(1, MAX_PARTIAL // max(1, num_tokens * outputs)) * PIECE
    total = torch.zeros(num_tokens, outputs, dtype=x.dtype, device=x.device)
    for first in range(0, whole, at_once):
        stop = min(first + at_once, whole)
        pieces = x[:, first:stop].unflatten(1, (-1, PIECE)).transpose(0, 1)  # [pieces, tokens, PIECE]
        weights = weight[:, first:stop].unflatten(1, (-1, PIECE)).permute(1, 2, 0)  # [pieces, PIECE, outputs]
        total += torch.bmm(pieces, weights).sum(dim=0)
    if whole < inputs:
        total.addmm_(x[:, whole:], weight[:, whole:].t())
    return total if bias is None else total.add_(bias)
