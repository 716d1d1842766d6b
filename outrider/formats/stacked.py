"""StackedLinear: a linear layer whose matrices are stored as codes of several kinds, one after another along the
outputs.

Files of mixed precision store, for example, the queries of a layer in 4 bits and its values in 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.linear_format import LinearFormat
from outrider.formats.scaled import ScaledFormat, ScaledLinear
from outrider.formats.slots import WeightSlot


def _split(
    declared: LinearDeclaration, stored: Sequence[StoredFormat]
) -> list[tuple[LinearDeclaration, list[StoredFormat]]]:
    """Group neighbouring segments of equal format, each group with its own declaration."""
    runs = groupby(zip(declared.stored, stored, strict=True), key=lambda segment: segment[1])
    parts = [[name for name, _ in run] for _, run in runs]
    of_name = dict(zip(declared.stored, stored, strict=True))
    return [(replace(declared, stored={name: declared.stored[name] for name in names}), [of_name[names[0]]])
            for names in parts]


class StackedLinear(LinearFormat):
    """A linear layer whose parts have different formats. The parts' products are concatenated, in the order of the
    segments."""

    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared.without_bias())
        self.declared = declared
        self._parts = [ScaledLinear(part, held) for part, held in _split(declared, stored)]  # type: ignore[arg-type]

    @classmethod
    def serves(cls, declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        return all(isinstance(held, ScaledFormat) for held in stored) and all(
            ScaledLinear.serves(part, held, device) for part, held in _split(declared, stored))

    def tensors(self) -> Sequence[StoredTensor]:
        return ()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {name: slot for part in self._parts for name, slot in part.slots(prefix).items()}

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self._parts)

    def finalize(self) -> None:
        for part in self._parts:
            part.finalize()

    def restore_order(self) -> None:
        for part in self._parts:
            part.restore_order()

    def set_exact(self, exact: bool) -> None:
        for part in self._parts:
            part.set_exact(exact)

    def prepare(self, allow_copy: bool) -> int:
        return sum(part.prepare(allow_copy) for part in self._parts)

    def round_activations(self) -> None:
        for part in self._parts:
            part.round_activations()

    def use_activation_bits(self, bits: int) -> float | None:
        errors = [error for part in self._parts if (error := part.use_activation_bits(bits)) is not None]
        return max(errors, default=None)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.product(x) for part in self._parts], 1)

    def dense(self) -> torch.Tensor:
        return torch.cat([part.dense() for part in self._parts])
