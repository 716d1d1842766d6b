"""Formats of experts: the weights of equal MLPs without biases, and the products of token rows with chosen experts.

This file has the dense format. `gguf_experts.py` has the format of GGUF blocks, and `register_format` adds other
formats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from outrider.formats.declared import ExpertsDeclaration, StoredFormat, StoredTensor
from outrider.formats.linear_format import LinearFormat
from outrider.formats.slots import WeightSlot, join_names
from outrider.formats.weight_format import EXPERTS, WeightFormat
from outrider.kernels import moe, ops
from outrider.kernels.buffers import empty_weight


class ExpertsFormat(WeightFormat[ExpertsDeclaration]):
    """The base class of experts' formats. Every expert has a first projection (gate and up, or up only) and a second
    one, down."""

    use, may_be_coded = EXPERTS, True

    @abstractmethod
    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        """Return the tensors of the first and of the second projections, in the layout that `ExpertsDeclaration.slots`
        describes."""

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {join_names(prefix, name): slot for name, slot in self.declared.slots(*self.tensors()).items()}

    @property
    def weight_bytes(self) -> int:
        return sum(held.tensor.numel() * held.tensor.element_size() for tensors in self.tensors() for held in tensors)

    @property
    def rounding(self) -> int:
        """Return the number of columns that share an fp8 scale when the first projection's input is rounded to fp8; 0
        if it is not. See `LinearFormat.rounding`."""
        return 0

    def prepare(self, allow_copy: bool) -> int:
        """Choose the kernels for the device, and return the bytes held besides the slots' tensors: see
        `LinearFormat.prepare`."""
        return 0

    def use_activation_bits(self, bits: int) -> float | None:
        """Round token rows in products: see `LinearFormat.use_activation_bits`. Returns the error for the products of
        one expert."""
        return None

    @abstractmethod
    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None,
        biases: moe.ExpertBiases | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token row's experts, plus `added`: [tokens, hidden]."""

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the weights as plain tensors, ([experts, gate | up, hidden], [experts, hidden, inner]) in the model's
        dtype, for adapters that change the products of single experts. None if the format stores them in another
        form."""
        return None

    def mix_with_shared(self, x: torch.Tensor, routed: moe.Routed, activation: str, gate_up: LinearFormat,
                        down: LinearFormat) -> torch.Tensor | None:
        """Return `mix` plus the result of the shared expert, a gated MLP that every token row takes. None if no kernel
        computes both together."""
        return None


class DenseExperts(ExpertsFormat):
    """Unquantised experts: for each projection one tensor of all experts, in the model's dtype."""

    def __init__(self, declared: ExpertsDeclaration, stored: Sequence[StoredFormat] = ()) -> None:
        super().__init__(declared)
        self._experts = ops.experts
        first, down = declared.projections
        self._gate_up, self._down = (
            empty_weight(declared.num_experts, made.num_outputs, made.num_inputs, dtype=made.dtype, device=made.device)
            for made in (first, down))

    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        name = "" if self.declared.is_joint else "weight"
        return (StoredTensor(name, self._gate_up),), (StoredTensor(name, self._down),)

    def set_exact(self, exact: bool) -> None:
        self._experts = ops.experts.variant(exact)

    @property
    def plain_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._gate_up, self._down

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None,
        biases: moe.ExpertBiases | None = None,
    ) -> torch.Tensor:
        return self._experts(x, routed.ids, routed.weights, self._gate_up, self._down, activation, added, biases)

    def mix_with_shared(self, x: torch.Tensor, routed: moe.Routed, activation: str, gate_up: LinearFormat,
                        down: LinearFormat) -> torch.Tensor | None:
        first, second = gate_up.plain_weight, down.plain_weight
        if first is None or second is None:
            return None
        given = (x, routed.ids, routed.weights, self._gate_up, self._down, activation, first, second)
        return ops.experts_with_shared(*given) if ops.experts_with_shared.has_kernel(*given) else None
