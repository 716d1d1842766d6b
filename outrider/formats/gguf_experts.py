"""GgufExperts: experts that stay quantised as in their GGUF file, for float32 models on the CPU. Each expert is
multiplied separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.formats.declared import ExpertsDeclaration, StoredFormat, StoredTensor
from outrider.formats.experts import ExpertsFormat
from outrider.formats.gguf import keeps_blocks, packed_slot
from outrider.formats.slots import WeightSlot, join_names
from outrider.kernels import cpu as native
from outrider.kernels import moe
from outrider.kernels.experts_on_host import native_experts
from outrider.kernels.quantized import ACTIVATION_BITS, empty_rows, rounding_error


class GgufExperts(ExpertsFormat):
    def __init__(self, declared: ExpertsDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared, stored)
        segments = [(projection, segment) for projection in declared.projections for segment in projection.segments]
        kinds = iter(held.kind for held in stored)  # expert by expert, as `ExpertsDeclaration.matrices` names them
        self._held = [[(projection, segment, kind, empty_rows(kind, len(segment.rows), projection.num_inputs,
                                                              declared.device))
                       for (projection, segment), kind in zip(segments, kinds, strict=False)]
                      for _ in range(declared.num_experts)]
        self._activation_bits = ACTIVATION_BITS
        self._matrices: list[list[native.PackedMatrix]] = []  # of each expert: the first projection, and down

    @classmethod
    def serves(cls, declared: ExpertsDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        return not declared.is_joint and all(keeps_blocks(made, stored, device) for made in declared.projections)

    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        return (), ()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {join_names(prefix, str(expert), segment.name, "weight"): packed_slot(projection, segment, kind, rows)
                for expert, held in enumerate(self._held) for projection, segment, kind, rows in held}

    @property
    def weight_bytes(self) -> int:
        return sum(rows.data.nbytes for held in self._held for *_, rows in held)

    def finalize(self) -> None:
        self._matrices = [[native.PackedMatrix(rows, None, self._activation_bits) for rows in self._rows(expert)]
                          for expert in range(self.declared.num_experts)]

    def _rows(self, expert: int) -> list[list[native.PackedRows]]:
        """Return views of one expert's weights: its rows of the first projection, and its rows of down."""
        return [[rows for made, _, _, rows in self._held[expert] if made is projection]
                for projection in self.declared.projections]

    def use_activation_bits(self, bits: int) -> float:
        self._activation_bits = bits
        self.finalize()
        return max(rounding_error(rows, None, bits) for rows in self._rows(0))

    def set_exact(self, exact: bool) -> None:
        """Do nothing: the products are exact in any mode."""

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None,
        biases: moe.ExpertBiases | None = None,
    ) -> torch.Tensor:
        return native_experts(x, routed, self._matrices, activation, added, biases)
