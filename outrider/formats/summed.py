"""Formats of layers whose input features are cut: the sum over ranks follows the product of this rank's part.

The bias and whatever else is added come after the sum, once. Every rank holds the whole bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.formats.base import LinearFormat
from outrider.formats.declared import ExpertsDeclaration, InputCut, LinearDeclaration, StoredTensor
from outrider.formats.experts import ExpertsFormat
from outrider.formats.slots import WeightSlot
from outrider.kernels import moe


class SummedLinear(LinearFormat):
    """A format without bias, whose products are summed over ranks."""

    def __init__(self, declared: LinearDeclaration, cut: InputCut, inner: LinearFormat) -> None:
        super().__init__(declared)
        self._inner, self._reduce = inner, cut.reduce

    def tensors(self) -> Sequence[StoredTensor]:
        return self._inner.tensors()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._inner.slots(prefix) | super().slots(prefix)

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes

    def finalize(self) -> None:
        self._inner.finalize()

    def restore_order(self) -> None:
        self._inner.restore_order()

    def prepare(self, allow_copy: bool) -> int:
        return self._inner.prepare(allow_copy)

    def set_exact(self, exact: bool) -> None:
        self._inner.set_exact(exact)

    def use_int8_activations(self) -> float | None:
        return self._inner.use_int8_activations()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._reduce(self._inner.product(x)))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._reduce(self._inner.wide(x)))

    def _with_bias(self, total: torch.Tensor) -> torch.Tensor:
        return total if self._bias is None else total + self._bias


class SummedExperts(ExpertsFormat):
    """Experts of which this rank holds a part; their weighted sums are summed over ranks."""

    def __init__(self, cut: InputCut, inner: ExpertsFormat) -> None:
        super().__init__(inner.declared)
        self._inner, self._reduce = inner, cut.reduce

    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        return self._inner.tensors()

    def finalize(self) -> None:
        self._inner.finalize()

    def set_exact(self, exact: bool) -> None:
        self._inner.set_exact(exact)

    def prepare(self, allow_copy: bool) -> int:
        return self._inner.prepare(allow_copy)

    def use_int8_activations(self) -> float | None:
        return self._inner.use_int8_activations()

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        total = self._reduce(self._inner.mix(x, routed, activation))
        return total if added is None else total + added


def build_format(declared: Any, make: Callable[[Any], Any]) -> Any:
    """The format of a declaration, allocated; within a sum over ranks if the declaration's input features are cut."""
    cut = declared.cut
    if not isinstance(cut, InputCut):
        return make(declared)
    if isinstance(declared, ExpertsDeclaration):
        return SummedExperts(cut, make(declared))
    return SummedLinear(declared, cut, make(declared.without_bias()))
