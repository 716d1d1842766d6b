"""Part: one tensor that a layer keeps in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

MODEL_DTYPE = "model"  # the element type of a part that is stored as the model computes


@dataclass(frozen=True)
class Part:
    """One tensor that a layer keeps in pages, with an entry for every token or for every page. The parts of a layer
    have different names."""

    name: str
    shape: tuple[int, ...]  # shape of the values of one token or page
    itemsize: int  # bytes of one element
    dtype: str = MODEL_DTYPE  # MODEL_DTYPE, or the name of a torch dtype, such as "uint8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's or page's values."""
        return math.prod(self.shape) * self.itemsize
