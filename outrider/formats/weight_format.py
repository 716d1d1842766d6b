"""WeightFormat: the base of all formats. A format is built empty from a declaration, and its slots are then filled.

A format allocates exactly what it stores, on the declaration's device, which may be torch's meta device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.slots import WeightSlot, join_names

Declaration = TypeVar("Declaration")


class WeightFormat(ABC, Generic[Declaration]):
    def __init__(self, declared: Declaration, stored: Sequence[StoredFormat] = ()) -> None:
        """stored: how the source stores each matrix of the declaration."""
        self.declared = declared

    @classmethod
    def serves(cls, declared: Declaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        """Whether the format can keep matrices that are stored so, in a model that runs on this device. If not, the
        layer is dense and gets the dequantised numbers."""
        return True

    @abstractmethod
    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Every tensor that the checkpoint must hold, by its name there."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weight, which one product with all of it reads."""

    def finalize(self) -> None:
        """Called when all weights are in place, and again if a blank model is loaded."""

    def restore_order(self) -> None:
        """Bring the tensors of the slots back into the order of the files, before some of them are written anew.
        `finalize` and `prepare` follow."""

    def set_exact(self, exact: bool) -> None:
        """Called before a model is prepared. In exact mode a token row's result has the same bits, alone and among
        others."""
        if exact:
            raise ValueError(f"exact=True: the weight format {type(self).__name__} has no exact products")


class MatrixFormat(WeightFormat[LinearDeclaration]):
    """A matrix [outputs, inputs] made of segments, perhaps with a bias [outputs] in the model's dtype."""

    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat] = ()) -> None:
        super().__init__(declared, stored)
        self._bias: torch.Tensor | None = None
        if declared.has_bias:
            self._bias = torch.empty(declared.num_outputs, dtype=declared.dtype, device=declared.device)

    @abstractmethod
    def tensors(self) -> Sequence[StoredTensor]:
        """The tensors that stand for the matrix."""

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        bias = [] if self._bias is None else [StoredTensor("bias", self._bias, inputs_per_column=None)]
        return {join_names(prefix, segment.name, held.name): self.declared.slot(segment, held)
                for segment in self.declared.segments for held in (*self.tensors(), *bias)}

    @property
    def weight_bytes(self) -> int:
        return sum(held.tensor.numel() * held.tensor.element_size() for held in self.tensors())
