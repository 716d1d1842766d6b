"""Products of float32 token rows with a weight, whose long sums are made of short ones.

A library adds the products of one output up one after the other, and the longer this chain is, the more it rounds. For
few token rows libraries divide the chain, because most of the card would be idle otherwise. A step with a short prompt
is padded to more token rows, for which they do not divide it, so its results would be less exact than those of the same
prompt alone. Here the chain is divided for any number of token rows up to `MAX_ROWS`.
"""

from __future__ import annotations

import torch

PIECE = 128  # inputs whose products are added up one after the other
MIN_ROWS, MAX_ROWS = 2, 1024  # token rows. A library divides the chain of a single row; longer prompts are padded less
MAX_PARTIAL = 1 << 24  # elements of the sums of pieces that are held at a time


def takes_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return MIN_ROWS <= x.shape[0] <= MAX_ROWS and x.shape[1] > PIECE


def summed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, inputs], weight [outputs, inputs] -> [tokens, outputs]: the sum over pieces of the inputs."""
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
