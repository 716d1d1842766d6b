"""LinearFormat: the stored weight of one linear layer and every product with it.

A format must implement `product`. Everything that may be fused with a product has a default here that composes the
plain operations, so a format overrides only what it can do better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import torch

from outrider.formats.slots import HeadLayout, StoredWeight, WeightSlot
from outrider.kernels import native, ops


class NativeProduct(NamedTuple):
    """A weight as the native code reads it, for layers that are one native call."""

    matrix: native.Matrix
    max_rows: int  # for more token rows another product is faster


class LinearFormat(ABC):
    """The weight [outputs, inputs] of a linear layer, perhaps with a bias [outputs]."""

    def __init__(self, numbers: torch.Tensor, bias: torch.Tensor | None) -> None:
        """numbers: the weight in the model's dtype, on the meta device if the format keeps only the file's bits."""
        self._numbers = numbers
        self._bias = bias

    # Loading

    def slots(self, prefix: str, first: int, count: int, layout: HeadLayout | None = None) -> dict[str, WeightSlot]:
        """The checkpoint's tensors of output features [first, first + count)."""
        stop = first + count
        keeper = partial(self._keep, first) if layout is None else None  # a format keeps rows in the file's order
        slots = {f"{prefix}.weight": WeightSlot(self._numbers[first:stop], layout, keeper)}
        if self._bias is not None:
            slots[f"{prefix}.bias"] = WeightSlot(self._bias[first:stop], layout)
        return slots

    def _keep(self, first: int, stored: StoredWeight) -> bool:
        """Hold the file's bits of the output features from `first` on until `finalize`, or answer False."""
        return False

    def finalize(self) -> LinearFormat:
        """Called when all weights are in place. Returns the format that the layer uses from then on."""
        return self

    def prepare(self, allow_copy: bool) -> int:
        """Choose the product for the device, perhaps with a second copy of the weight. Returns the bytes held beside
        those that the slots count."""
        return 0

    def set_exact(self, exact: bool) -> None:
        """Called before `prepare`. In exact mode a token row of a product has the same bits alone and among others."""
        if exact:
            raise ValueError(f"exact=True: the weight format {type(self).__name__} has no exact products")

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """The weight, for formats that compute its products together with those of other weights: it is in the model's
        dtype, has no bias, and need not be exact. None otherwise."""
        return None

    def use_int8_activations(self) -> float | None:
        """Round token rows to 8 bits in products of few of them. Returns the largest error of a product with random
        activations, as a share of its largest result; None if the format has no such product."""
        return None

    # Questions about the weight

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight that one product reads."""
        return self._numbers.numel() * self._numbers.element_size()

    def dense(self) -> torch.Tensor:
        """The weight as numbers, made anew if only the file's bits are kept."""
        return self._numbers

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether the weight lies in this tensor, which another layer owns."""
        return self._numbers is tensor

    # Products

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, inputs] times the weight, plus the bias: [tokens, outputs]."""

    def part(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """The output features [first, stop) of the product."""
        return self.product(x)[:, first:stop]

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32 (float64 stays), for logits: rounded to 16 bits they would tie."""
        out = self.product(x)
        return out if out.dtype == torch.float64 else out.float()

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The activation of the product. "relu2" squares the positive part; the others gate: act(gate) * up, with the
        gate's output features before those of up."""
        return activate(self.product(x), activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product to the residual stream in place."""
        residual.add_(self.product(x))

    @property
    def adds_single_row(self) -> bool:
        """Whether `add_to` of one token row is one kernel."""
        return False

    def native_product(self) -> NativeProduct | None:
        """The weight for the native code; None if it cannot multiply with this format."""
        return None


def activate(out: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of a product, see `LinearFormat.activated`."""
    return ops.relu2(out) if activation == "relu2" else ops.gated(out, activation)


class KeptFormat(LinearFormat):
    """A format that keeps the bits of the file. It is registered for the kinds of stored weights that it can keep."""

    @classmethod
    @abstractmethod
    def can_keep(cls, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a model of this dtype on this device can use the format. If not, weights are dequantised."""

    @classmethod
    @abstractmethod
    def from_parts(
        cls, parts: Sequence[StoredWeight], bias: torch.Tensor | None, shared: torch.Tensor | None
    ) -> Self | None:
        """The format of a weight that came in parts, by output features; None if these parts cannot be kept together.
        shared: the dequantised weight, if another layer holds it anyway."""
