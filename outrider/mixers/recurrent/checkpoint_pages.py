"""CheckpointPages: copies recurrent states to pages of the pool and back, layer by layer.

A checkpoint's bytes are those of its layers one after the other, cut into pages; each layer's part lies at the same
place in every checkpoint. The cache manager records which request owns the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from outrider.cache.kinds import RecurrentKind


class RecurrentState(NamedTuple):
    """A request's state in one recurrent layer, with the inputs that the next convolution needs."""

    state: torch.Tensor  # [*state_shape], float32, or float64 in a float64 model
    tail: torch.Tensor  # [conv_width - 1, conv_dim] the last inputs before the convolution, oldest first


@dataclass(frozen=True)
class Piece:
    """A byte range of a layer's checkpoint: the same columns of one or more pages."""

    pages: slice  # positions in the checkpoint's list of pages
    columns: slice  # bytes within a page
    source: slice  # bytes within the layer


class CheckpointPages:
    def __init__(self, kind: RecurrentKind, pool: torch.Tensor, dtype: torch.dtype) -> None:
        """pool: [pages, elements]; dtype: the model's dtype."""
        self.pool, self.page_bytes, self.starts = pool, kind.page_bytes, kind.starts()
        self._bytes = pool.view(torch.uint8)
        self._dtype = dtype
        self._state_dtype = state_dtype(dtype)
        self._specs = dict(kind.layers)
        self._pieces = {
            layer: split(start, start + self._specs[layer].row_bytes, kind.page_bytes)
            for layer, start in self.starts.items()
        }

    def write(self, layer: int, saved: RecurrentState, pages: torch.Tensor, written: torch.Tensor) -> None:
        """Copy states to the pages of checkpoints. saved: state and tail with a leading axis of checkpoints; pages
        [checkpoints, pages]; written [checkpoints]. Where `written` is False, the pages keep their bytes."""
        parts = [part.to(dtype).flatten(1).contiguous().view(torch.uint8)
                 for part, dtype in zip(saved, (self._state_dtype, self._dtype), strict=True)]
        layer_bytes = torch.cat(parts, dim=1)
        for piece in self._pieces[layer]:
            target, own = self._bytes[:, piece.columns], pages[:, piece.pages]
            index = own.reshape(-1)
            fresh = layer_bytes[:, piece.source].reshape(len(index), -1)
            is_fresh = written[:, None].expand_as(own).reshape(-1, 1)
            target.index_copy_(0, index, torch.where(is_fresh, fresh, target[index]))

    def read(self, layer: int, pages: torch.Tensor) -> RecurrentState:
        """Copy checkpoints from pages [checkpoints, pages]. Returns state and tail with a leading axis of checkpoints.
        """
        spec, count = self._specs[layer], pages.shape[0]
        pieces = [self._bytes[:, piece.columns][pages[:, piece.pages].reshape(-1)].reshape(count, -1)
                  for piece in self._pieces[layer]]
        if not pieces:  # a convolution over single tokens keeps nothing
            return RecurrentState(self.pool.new_empty(count, *spec.state_shape, dtype=self._state_dtype),
                                  self.pool.new_empty(count, spec.conv_width - 1, spec.conv_dim, dtype=self._dtype))
        layer_bytes = torch.cat(pieces, dim=1)
        state, tail = layer_bytes.split((spec.state_bytes, spec.tail_bytes), dim=1)
        return RecurrentState(
            state.contiguous().view(self._state_dtype).view(count, *spec.state_shape),
            tail.contiguous().view(self._dtype).view(count, spec.conv_width - 1, spec.conv_dim),
        )


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """State dtype: float64 for a float64 model, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split(start: int, stop: int, page_bytes: int) -> list[Piece]:
    """Cut bytes [start, stop) of a checkpoint into pieces: the end of a page, whole pages, the beginning of a page."""
    pieces: list[Piece] = []
    at = start
    while at < stop:
        page, column = divmod(at, page_bytes)
        whole = (stop - at) // page_bytes if column == 0 else 0
        end = at + whole * page_bytes if whole else min(stop, (page + 1) * page_bytes)
        columns = slice(0, page_bytes) if whole else slice(column, column + end - at)
        pieces.append(Piece(slice(page, page + max(1, whole)), columns, slice(at - start, end - start)))
        at = end
    return pieces
