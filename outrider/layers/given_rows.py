"""GivenRows: embeddings that a request gives as vectors, in place of token ids to look up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.input_part import InputVectors
from outrider.kernels.buffers import send, to_device


@dataclass(frozen=True)
class GivenRows:
    """Vectors that replace the embeddings of some token rows. `values` have the scale and dtype of the embedding
    layer's results."""

    token_rows: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n, hidden]

    @classmethod
    def try_build(cls, found: Sequence[tuple[InputVectors, int]], device: torch.device) -> GivenRows | None:
        """Join the vectors of several prompts. Returns None if there are none. found: for each prompt its vectors, and
        the number to add to a position of this prompt to get its token row."""
        if not found:
            return None
        token_rows = [row for vectors, distance in found for row in (vectors.positions + distance).tolist()]
        values = torch.from_numpy(np.concatenate([vectors.values for vectors, _ in found]))
        return cls(to_device(token_rows, torch.int64, device), send(values, device))

    def put_into(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return a step's embeddings [tokens, hidden] with these vectors in their token rows."""
        return embedded.index_copy(0, self.token_rows, self.values.to(embedded.dtype))
