"""Formats of experts: the weights of equal MLPs without biases, and the products of token rows with chosen experts.

The only format so far is dense. A rank of several would hold some of the experts, or a part of each, and its results
would be summed over ranks after `mix`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from outrider.formats.base import LinearFormat
from outrider.formats.slots import WeightSlot
from outrider.kernels import moe, ops
from outrider.kernels.buffers import empty_weight


class ExpertsFormat(ABC):
    """Every expert has a first projection (gate and up, or up alone) and a second one, down."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of all experts."""

    def set_exact(self, exact: bool) -> None:
        """In exact mode a token row's result has the same bits, whatever the other token rows are and choose."""
        if exact:
            raise ValueError(f"exact=True: the format {type(self).__name__} of experts has no exact products")

    @abstractmethod
    def joint_slots(self) -> tuple[WeightSlot, WeightSlot]:
        """(first projections, second projections) of a checkpoint with one tensor for all experts."""

    @abstractmethod
    def expert_slots(self, expert: int) -> tuple[list[WeightSlot], WeightSlot]:
        """([gate and up, or up], down) of a checkpoint with tensors for each expert."""

    @abstractmethod
    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weighted sum of each token row's experts, plus `added`: [tokens, hidden]."""

    def mix_with_shared(self, x: torch.Tensor, routed: moe.Routed, activation: str, gate_up: LinearFormat,
                        down: LinearFormat) -> torch.Tensor | None:
        """`mix` plus the result of a gated MLP that every token row takes, if a kernel computes both together."""
        return None


class DenseExperts(ExpertsFormat):
    """One tensor in the model's dtype for each projection of all experts."""

    def __init__(
        self, num_experts: int, hidden_size: int, expert_size: int, *, is_gated: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._expert_size = expert_size
        self._experts = ops.experts
        rows = 2 * expert_size if is_gated else expert_size
        self._gate_up = empty_weight(num_experts, rows, hidden_size, dtype=dtype, device=device)
        self._down = empty_weight(num_experts, hidden_size, expert_size, dtype=dtype, device=device)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._gate_up, self._down))

    def joint_slots(self) -> tuple[WeightSlot, WeightSlot]:
        return WeightSlot(self._gate_up), WeightSlot(self._down)

    def expert_slots(self, expert: int) -> tuple[list[WeightSlot], WeightSlot]:
        halves = self._gate_up[expert].split(self._expert_size)
        return [WeightSlot(half) for half in halves], WeightSlot(self._down[expert])

    def set_exact(self, exact: bool) -> None:
        self._experts = ops.experts.variant(exact)

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._experts(x, routed.ids, routed.weights, self._gate_up, self._down, activation, added)

    def mix_with_shared(self, x: torch.Tensor, routed: moe.Routed, activation: str, gate_up: LinearFormat,
                        down: LinearFormat) -> torch.Tensor | None:
        first, second = gate_up.plain_weight, down.plain_weight
        if first is None or second is None:
            return None
        given = (x, routed.ids, routed.weights, self._gate_up, self._down, activation, first, second)
        return ops.experts_with_shared(*given) if ops.experts_with_shared.has_kernel(*given) else None
