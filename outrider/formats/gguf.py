"""GgufLinear: a weight in the bits of a GGUF file (Q8_0, Q4_0, Q4_1), for float32 models on the CPU.

The products have exactly the bits that they would have with the dequantised weight, unless token rows are rounded to
8 bits on request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from outrider.formats.base import EmbeddingFormat, NativeProduct
from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.kernels.buffers import empty_weight
from outrider.kernels.quantized import BLOCK, BLOCK_BYTES, QuantizedProduct, QuantizedRows, kept_bits_are_fast


class GgufLinear(EmbeddingFormat):
    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared, stored)
        kind = stored[0].kind
        row_bytes = declared.num_inputs // BLOCK * BLOCK_BYTES[kind]
        data = empty_weight(declared.num_outputs, row_bytes, dtype=torch.uint8, device=declared.device)
        self._rows = QuantizedRows(kind, data)
        self._product: QuantizedProduct | None = None  # made by `finalize`: the native code looks at the scales
        self._activation_bits = 32

    @classmethod
    def serves(cls, declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        is_one_kind = len({held.kind for held in stored}) == 1
        return (is_one_kind and declared.num_inputs % BLOCK == 0 and declared.dtype == torch.float32
                and device.type == "cpu" and kept_bits_are_fast())

    def tensors(self) -> Sequence[StoredTensor]:
        rows = self._rows
        return (StoredTensor("weight", rows.blocks(), rows.kind, inputs_per_column=BLOCK, draw=rows.draw_blocks),)

    def finalize(self) -> None:
        self._product = QuantizedProduct(self._rows, self._bias, self._activation_bits)

    def prepare(self, allow_copy: bool) -> int:
        return self._finalized.extra_bytes

    def set_exact(self, exact: bool) -> None:
        """The products are exact in any mode."""

    def use_int8_activations(self) -> float:
        self._activation_bits = 8
        self.finalize()
        return self._finalized.rounding_error()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._finalized(x)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._rows.look_up(tokens)

    def native_product(self) -> NativeProduct:
        return NativeProduct(self._finalized.matrix, sys.maxsize)

    @property
    def _finalized(self) -> QuantizedProduct:
        assert self._product is not None, "the weights are not loaded"
        return self._product
