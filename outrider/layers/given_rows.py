"""GivenRows: vectors in place of the embeddings of token ids, at some token rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.input_part import InputVectors
from outrider.kernels.buffers import send, to_device


class PlacedVectors(NamedTuple):
    """Vectors at positions of one prompt."""

    positions: NDArray[np.int64]  # [vectors], rising
    values: torch.Tensor  # [vectors, hidden], on the host or on the device
    added: tuple[torch.Tensor, ...] = ()  # see `GivenRows`


def placed(given: InputVectors) -> PlacedVectors:
    """Return the vectors that an input part contains, on the host."""
    return PlacedVectors(given.positions, torch.from_numpy(np.ascontiguousarray(given.values)))


@dataclass(frozen=True)
class GivenRows:
    """Vectors that replace the embeddings of some token rows. `values` have the scale and dtype of the embedding
    layer's results."""

    token_rows: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n, hidden]
    added: tuple[torch.Tensor, ...] = ()  # [n, hidden] each: added to the residual stream after the i-th layer

    @classmethod
    def try_build(cls, found: Sequence[tuple[PlacedVectors, int]], device: torch.device) -> GivenRows | None:
        """Join the vectors of several prompts. Returns None if there are none. found: for each prompt its vectors, and
        the number to add to a position of this prompt to get its token row."""
        if not found:
            return None
        token_rows = [row for vectors, distance in found for row in (vectors.positions + distance).tolist()]
        depth = max(len(vectors.added) for vectors, _ in found)
        added = [[vectors.added[layer] if layer < len(vectors.added) else torch.zeros_like(vectors.values)
                  for vectors, _ in found] for layer in range(depth)]
        values = _joined([vectors.values for vectors, _ in found], device)
        return cls(to_device(token_rows, torch.int64, device), values, tuple(_joined(own, device) for own in added))

    def put_into(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return a step's embeddings [tokens, hidden] with these vectors in their token rows."""
        return embedded.index_copy(0, self.token_rows, self.values.to(embedded.dtype))

    def add_after(self, layer: int, residual: torch.Tensor) -> None:
        """Add the vectors that belong to the residual stream after this layer (deepstack), in place."""
        residual.index_add_(0, self.token_rows, self.added[layer].to(residual.dtype))


def _joined(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate values from the host and the device on the device."""
    if all(own.device.type == "cpu" for own in values):
        return send(torch.cat(list(values)), device)
    return torch.cat([send(own, device) if own.device.type == "cpu" else own for own in values])
