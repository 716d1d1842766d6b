"""DenseLinear: a weight in the model's dtype. Every linear layer starts with it and is loaded through it.

If parts of the weight arrive in bits that another format can keep, they are held until all parts are there. Then that
format takes the layer over, or the parts are dequantised into the dense weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from outrider.formats.base import LinearFormat, NativeProduct
from outrider.formats.registry import format_for
from outrider.formats.slots import StoredWeight
from outrider.kernels import ops
from outrider.kernels.buffers import empty_weight
from outrider.kernels.native.products import CpuProduct, make_product


class ProductOps(NamedTuple):
    """The operations of the table that carry out products, ordinary or exact."""

    linear: ops.Operation[..., torch.Tensor]
    wide: ops.Operation[..., torch.Tensor]
    gated: ops.Operation[..., torch.Tensor]
    relu2: ops.Operation[..., torch.Tensor]
    add: ops.Operation[..., None]

    @classmethod
    def from_mode(cls, exact: bool) -> ProductOps:
        rows: tuple[ops.Operation[..., Any], ...] = (
            ops.linear, ops.linear_wide, ops.gated_linear, ops.relu2_linear, ops.linear_add
        )  # fmt: skip
        return cls(*(row.variant(exact) for row in rows))


class DenseLinear(LinearFormat):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, is_shared: bool = False) -> None:
        """is_shared: another layer owns the weight and needs its numbers."""
        super().__init__(weight, bias)
        self._is_shared = is_shared
        self._cpu_product: CpuProduct | None = None  # chosen by `prepare`
        self._exact, self._ops = False, ProductOps.from_mode(False)
        self._stored: dict[int, StoredWeight] = {}  # by first output feature, until `finalize`

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> DenseLinear:
        weight = empty_weight(out_features, in_features, dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def _keep(self, first: int, stored: StoredWeight) -> bool:
        keeper = format_for(stored.kind)
        if keeper is None or not keeper.can_keep(self._numbers.dtype, self._numbers.device):
            return False
        self._stored[first] = stored
        return True

    def finalize(self) -> LinearFormat:
        stored, self._stored = dict(sorted(self._stored.items())), {}
        kept = self._kept(list(stored.values()))
        if kept is None or self._is_shared:
            for first, part in stored.items():
                part.dequantize_into(self._numbers[first : first + part.shape[0]])
        return self if kept is None else kept

    def _kept(self, parts: list[StoredWeight]) -> LinearFormat | None:
        """The format that keeps the bits of all parts together, if there is one."""
        keepers = {format_for(part.kind) for part in parts}
        keeper = keepers.pop() if len(keepers) == 1 else None
        if keeper is None or sum(part.shape[0] for part in parts) < self._numbers.shape[0]:
            return None
        return keeper.from_parts(parts, self._bias, self._numbers if self._is_shared else None)

    def set_exact(self, exact: bool) -> None:
        self._exact, self._ops = exact, ProductOps.from_mode(exact)

    def prepare(self, allow_copy: bool) -> int:
        if not self._numbers.is_cpu:
            return 0
        self._cpu_product = make_product(self._numbers, self._bias, packed=allow_copy, exact=self._exact)
        return self._cpu_product.extra_bytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self._cpu_product is not None:
            return self._cpu_product(x)
        return self._ops.linear(x, self._numbers, self._bias)

    def part(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        if self._cpu_product is not None or self._exact:  # the bits of a part may be others than those of the whole
            return super().part(x, first, stop)
        bias = None if self._bias is None else self._bias[first:stop]
        return self._ops.linear(x, self._numbers[first:stop], bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        if self._numbers.dtype in (torch.float32, torch.float64):
            return self.product(x)
        out = self._ops.wide(x, self._numbers)
        return out if self._bias is None else out.add_(self._bias)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if self._bias is not None or self._cpu_product is not None:
            return super().activated(x, activation)
        if activation == "relu2":
            return self._ops.relu2(x, self._numbers)
        return self._ops.gated(x, self._numbers, activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        if self._cpu_product is not None:
            super().add_to(residual, x)
        else:
            self._ops.add(residual, x, self._numbers, self._bias)

    @property
    def plain_weight(self) -> torch.Tensor | None:
        return None if self._exact or self._bias is not None else self._numbers

    @property
    def adds_single_row(self) -> bool:
        row = self._numbers[:1]  # has the device and dtype of token rows
        return self._ops.add.has_kernel(row, row, self._numbers, self._bias)

    def native_product(self) -> NativeProduct | None:
        chosen = self._cpu_product
        if chosen is None or chosen.matrix is None:
            return None
        return NativeProduct(chosen.matrix, chosen.few_rows.stop - 1)
