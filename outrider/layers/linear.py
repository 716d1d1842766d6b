"""Linear layers: a layer knows the names of its tensors in the checkpoint; its format owns weight and products.

A layer knows nothing of models or files. With several ranks, each would hold a part of a layer: some output features
(the format is built smaller, and its slots cut the checkpoint's tensor), or some input features; then the sum over
ranks follows the product in `__call__`, and in `add_to` before the residual stream is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.formats import DenseLinear, HeadLayout, LinearFormat, WeightSlot, activate
from outrider.layers.base import Module
from outrider.layers.context import StepContext


class Linear(Module):
    """y = x W' + b."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.format: LinearFormat = DenseLinear.empty(in_features, out_features, bias=bias, dtype=dtype, device=device)

    @classmethod
    def from_weight(cls, weight: torch.Tensor) -> Linear:
        """A layer on a weight [out, in] that another layer owns and loads: a head tied to the embedding."""
        linear = cls.__new__(cls)
        linear.out_features, linear.in_features = weight.shape
        linear.format = DenseLinear(weight, is_shared=True)
        return linear

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        return self.format.slots(prefix, 0, self.out_features)

    def finalize(self) -> None:
        self.format = self.format.finalize()

    def set_exact(self, exact: bool) -> None:
        self.format.set_exact(exact)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self._adapted(self.format.product(x), x, context)

    def part(self, x: torch.Tensor, first: int, stop: int, context: StepContext) -> torch.Tensor:
        """The output features [first, stop) of the product."""
        return self._adapted(self.format.part(x, first, stop), x, context, first)

    def wide(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The product in float32, or float64 in a float64 model."""
        return self._adapted(self.format.wide(x), x, context)

    def activated(self, x: torch.Tensor, activation: str, context: StepContext) -> torch.Tensor:
        """The activation of the product, see `LinearFormat.activated`."""
        if context.adapters is None:
            return self.format.activated(x, activation)
        return activate(self(x, context), activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, context: StepContext) -> None:
        """residual += x W' + b, in place."""
        self.format.add_to(residual, x)
        self._adapted(residual, x, context)

    def _adapted(self, out: torch.Tensor, x: torch.Tensor, context: StepContext, first: int = 0) -> torch.Tensor:
        """`out`, to which the adapters of the token rows have added their part, in place."""
        if context.adapters is not None:
            context.adapters.add_to(out, self, x, first)
        return out


class FusedLinear(Linear):
    """Several linear layers of one input as one product. `stored`: name and output features of each, in order;
    `layouts`: the layouts of those that the checkpoint holds head by head."""

    def __init__(
        self, in_features: int, stored: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device,
        layouts: Mapping[str, HeadLayout] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, sum(stored.values()), bias=bias, dtype=dtype, device=device)
        self.stored = dict(stored)
        self.layouts = dict(layouts or {})

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        """Slots under `prefix`.`name`, each a slice of the one weight."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, size in self.stored.items():
            slots |= self.format.slots(f"{prefix}.{name}", first, size, self.layouts.get(name))
            first += size
        return slots
