"""WeightFormat: the base of all formats. A format is built empty from a declaration, and its slots are then filled.

A format allocates exactly what it stores, on the declaration's device, which may be torch's meta device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.slots import WeightSlot, join_names

LINEAR, EXPERTS, EXPANSION = "linear", "experts", "expansion"  # ways to use a weight
Declaration = TypeVar("Declaration")


class WeightFormat(ABC, Generic[Declaration]):
    use: ClassVar[str]  # one of those above, given by the base class of a way to use a weight
    may_be_coded: ClassVar[bool] = False  # a weight of numbers may become codes when it is read

    def __init__(self, declared: Declaration, stored: Sequence[StoredFormat] = ()) -> None:
        """stored: how the source stores each matrix of the declaration."""
        self.declared = declared

    @classmethod
    def serves(cls, declared: Declaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        """Whether the format can keep matrices that are stored in this way, in a model on this device. Otherwise the
        layer is dense and gets the dequantised weight."""
        return True

    @abstractmethod
    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Return the slot of every tensor that the checkpoint must contain, by the tensor's name."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """The number of bytes of the weight that one product reads."""

    def finalize(self) -> None:
        """Compute tensors that are derived from the weight. Called when all weights are loaded, and again after they
        are reloaded."""

    def restore_order(self) -> None:
        """Bring the slots' tensors back into the files' order of elements, before some of them are overwritten.
        `finalize` and `prepare` must be called afterwards."""

    def set_exact(self, exact: bool) -> None:
        """Choose exact or ordinary products. Called before a model is prepared. In exact mode a token row's result has
        the same bits in every batch."""
        if exact:
            raise ValueError(f"exact=True: the weight format {type(self).__name__} has no kernels for exact mode: "
                             "leave exact out, or set keep_quantized=False")


class MatrixFormat(WeightFormat[LinearDeclaration]):
    """Base class of formats for a matrix [outputs, inputs] made of segments, perhaps with a bias [outputs] in the
    model's dtype."""

    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat] = ()) -> None:
        super().__init__(declared, stored)
        self._bias: torch.Tensor | None = None
        if declared.has_bias:
            self._bias = torch.empty(declared.num_outputs, dtype=declared.dtype, device=declared.device)

    @abstractmethod
    def tensors(self) -> Sequence[StoredTensor]:
        """Return the tensors that store the matrix."""

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        bias = [] if self._bias is None else [StoredTensor("bias", self._bias, inputs_per_column=None)]
        return {join_names(prefix, segment.name, held.name): self.declared.slot(segment, held)
                for segment in self.declared.segments for held in (*self.tensors(), *bias)}

    @property
    def weight_bytes(self) -> int:
        return sum(held.tensor.numel() * held.tensor.element_size() for held in self.tensors())
