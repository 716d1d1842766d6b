"""Masks beside the causal rule, as code outside the package may write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.mixers.paged.masks import QueryMarks


@dataclass(frozen=True)
class ChunkedMask:
    """A query sees the keys of its own chunk of positions, up to itself."""

    chunk: int

    def __call__(self, causal: torch.Tensor, query: QueryMarks, key_positions: torch.Tensor) -> torch.Tensor:
        return causal & (key_positions // self.chunk == query.positions // self.chunk)


@dataclass(frozen=True)
class DocumentMask:
    """A query in a span sees keys of that span only: each span is a document of its own."""

    def __call__(self, causal: torch.Tensor, query: QueryMarks, key_positions: torch.Tensor) -> torch.Tensor:
        return causal & (key_positions >= query.span_starts)
