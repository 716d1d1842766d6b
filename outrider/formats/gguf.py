"""GgufLinear: a weight in the bits of a GGUF file (Q8_0, Q4_0, Q4_1), for float32 models on the CPU.

The products have exactly the bits that they would have with the dequantised weight, unless token rows are rounded to
8 bits on request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from outrider.formats.base import KeptFormat, NativeProduct
from outrider.formats.slots import StoredWeight
from outrider.kernels.quantized import QuantizedProduct, QuantizedRows, kept_bits_are_fast


class GgufLinear(KeptFormat):
    def __init__(self, rows: QuantizedRows, bias: torch.Tensor | None, shared: torch.Tensor | None) -> None:
        super().__init__(torch.empty(rows.shape, device="meta") if shared is None else shared, bias)
        self._product = QuantizedProduct(rows, bias)

    @classmethod
    def can_keep(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 and device.type == "cpu" and kept_bits_are_fast()

    @classmethod
    def from_parts(
        cls, parts: Sequence[StoredWeight], bias: torch.Tensor | None, shared: torch.Tensor | None
    ) -> GgufLinear | None:
        rows = [part for part in parts if isinstance(part, QuantizedRows)]
        is_one_kind = len(rows) == len(parts) and len({part.kind for part in rows}) == 1
        return cls(QuantizedRows.joined(rows), bias, shared) if is_one_kind else None

    @property
    def weight_bytes(self) -> int:
        return self._product.rows.data.nbytes

    def dense(self) -> torch.Tensor:
        return self._product.rows.dequantize() if self._numbers.is_meta else self._numbers

    def prepare(self, allow_copy: bool) -> int:
        return self.weight_bytes

    def set_exact(self, exact: bool) -> None:
        """The products are exact in any mode."""

    def use_int8_activations(self) -> float:
        before = self._product
        self._product = QuantizedProduct(before.rows, before.bias, activation_bits=8)
        return self._product.rounding_error()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)

    def native_product(self) -> NativeProduct:
        return NativeProduct(self._product.matrix, sys.maxsize)
