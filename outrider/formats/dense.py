"""DenseLinear: an unquantised weight in the model's dtype. It serves every layer that no other format serves.

Quantised weights are dequantised into it while they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from outrider.formats.declared import LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.linear_format import EmbeddingFormat, NativeProduct
from outrider.kernels import ops
from outrider.kernels.activations import GATED
from outrider.kernels.buffers import empty_weight
from outrider.kernels.cpu.products import CpuProduct


class ProductOps(NamedTuple):
    """The operations of `kernels.ops` with which a layer computes its products, each in its ordinary or its exact
    variant."""

    prepare: ops.Operation[..., CpuProduct | None]
    linear: ops.Operation[..., torch.Tensor]
    wide: ops.Operation[..., torch.Tensor]
    gated: ops.Operation[..., torch.Tensor]
    relu2: ops.Operation[..., torch.Tensor]
    add: ops.Operation[..., None]

    @classmethod
    def from_mode(cls, exact: bool) -> ProductOps:
        rows: tuple[ops.Operation[..., Any], ...] = (
            ops.prepare_linear, ops.linear, ops.linear_wide, ops.gated_linear, ops.relu2_linear, ops.linear_add
        )
        return cls(*(row.variant(exact) for row in rows))


class DenseLinear(EmbeddingFormat):
    def __init__(
        self, declared: LinearDeclaration, stored: Sequence[StoredFormat] = (), weight: torch.Tensor | None = None
    ) -> None:
        """weight: a tensor that another layer owns and this one shares; by default the layer allocates a tensor."""
        super().__init__(declared)
        shape = declared.num_outputs, declared.num_inputs
        self._weight = empty_weight(*shape, dtype=declared.dtype, device=declared.device) if weight is None else weight
        self._prepared: CpuProduct | None = None
        self._exact, self._ops = False, ProductOps.from_mode(False)

    def tensors(self) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", self._weight),)

    def dense(self) -> torch.Tensor:
        return self._weight

    @property
    def table(self) -> torch.Tensor:
        return self._weight

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self._weight)

    def set_exact(self, exact: bool) -> None:
        self._exact, self._ops = exact, ProductOps.from_mode(exact)

    def prepare(self, allow_copy: bool) -> int:
        self._prepared = self._ops.prepare(self._weight, self._bias, allow_copy)
        return 0 if self._prepared is None else self._prepared.extra_bytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self._prepared is not None:
            return self._prepared(x)
        return self._ops.linear(x, self._weight, self._bias)

    def part(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        if self._prepared is not None or self._exact:  # the bits of a part may be others than those of the whole
            return super().part(x, first, stop)
        bias = None if self._bias is None else self._bias[first:stop]
        return self._ops.linear(x, self._weight[first:stop], bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight.dtype in (torch.float32, torch.float64):
            return self.product(x)
        out = self._ops.wide(x, self._weight)
        return out if self._bias is None else out.add_(self._bias)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        is_fused = activation in (*GATED, "relu2")  # some kernel may multiply and activate at once
        if self._bias is not None or self._prepared is not None or not is_fused:
            return super().activated(x, activation)
        if activation == "relu2":
            return self._ops.relu2(x, self._weight)
        return self._ops.gated(x, self._weight, activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        if self._prepared is not None:
            super().add_to(residual, x)
        else:
            self._ops.add(residual, x, self._weight, self._bias)

    @property
    def plain_weight(self) -> torch.Tensor | None:
        return None if self._exact or self._bias is not None else self._weight

    @property
    def adds_single_row(self) -> bool:
        row = self._weight[:1]  # has the device and dtype of token rows
        return self._ops.add.has_kernel(row, row, self._weight, self._bias)

    def native_product(self) -> NativeProduct | None:
        chosen = self._prepared
        if chosen is None or chosen.matrix is None:
            return None
        return NativeProduct(chosen.matrix, chosen.few_rows.stop - 1)
