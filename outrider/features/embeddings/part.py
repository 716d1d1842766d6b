"""PromptEmbeds: the embeddings that a request gives in place of token ids. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.input_part import InputPart, InputVectors


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds(InputPart):
    """Embeddings in place of a prompt's token ids at some positions, as the model's own embedding would return them."""

    values: NDArray[np.floating]  # [embeddings, hidden size], float32 or float64
    positions: NDArray[np.int64]  # [embeddings], rising
    digest: str  # of the bytes of both

    @property
    def cache_key(self) -> str:
        """The part of the prefix cache's keys that separates pages: requests share pages only if all their embeddings
        are equal, and never with a request that has only token ids."""
        return f"embeds={self.digest}"

    def vectors(self, start: int, end: int) -> InputVectors | None:
        first, last = self.positions.searchsorted((start, end)).tolist()
        return InputVectors(self.positions[first:last], self.values[first:last]) if first < last else None
