"""Linear layers. A layer's weights are a *format* object, which owns the tensors and knows how to multiply.

Knows nothing of models or files. What a checkpoint must fill is handed out as `WeightSlot`s, which are views, so
several tensors of a checkpoint can lie in one weight (q, k and v; gate and up). A shard of a layer would be a
format whose slots expect the whole tensor and keep a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from outrider.kernels import native, ops
from outrider.kernels.native.products import CpuProduct, make_product
from outrider.kernels.quantized import QuantizedProduct, QuantizedRows

WIDE_CHUNK = 8192  # output features widened at once where the device has no product with float32 results


@dataclass(frozen=True)
class WeightSlot:
    """Where a checkpoint's tensor goes: a view of the weight that uses it, and the shape the file must have."""

    target: torch.Tensor
    shape: tuple[int, ...]
    keep: Callable[[QuantizedRows], None] | None = field(default=None, kw_only=True)  # takes a file's bits instead

    @classmethod
    def of(cls, target: torch.Tensor, keep: Callable[[QuantizedRows], None] | None = None) -> WeightSlot:
        return cls(target, tuple(target.shape), keep=keep)

    @property
    def nbytes(self) -> int:
        """Of the target; nothing where its layer kept the file's bits, which `pack` counts."""
        return 0 if self.target.is_meta else self.target.numel() * self.target.element_size()

    def store(self, tensor: torch.Tensor) -> None:
        self.target.copy_(tensor)


class DenseFormat:
    """A weight [out, in] and perhaps a bias [out], both in the model's dtype.

    A float32 weight on the CPU may stay in the bits of its file, if all its parts come in one kind: `weight` is then
    without memory, unless another layer shares it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, is_shared: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.is_shared = is_shared
        self.bits: QuantizedRows | None = None
        self.product: CpuProduct | QuantizedProduct | None = None  # chosen by `pack`
        self._parts: dict[int, QuantizedRows] = {}  # by first output feature, until `finalize`

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> DenseFormat:
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        return cls(weight, torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    def slots(self, prefix: str, first: int, count: int) -> dict[str, WeightSlot]:
        """The checkpoint tensors of output features [first, first + count)."""
        can_keep = self.weight.is_cpu and self.weight.dtype == torch.float32 and native.available()
        keep = partial(self._parts.__setitem__, first) if can_keep else None
        slots = {f"{prefix}.weight": WeightSlot.of(self.weight[first : first + count], keep)}
        if self.bias is not None:
            slots[f"{prefix}.bias"] = WeightSlot.of(self.bias[first : first + count])
        return slots

    def finalize(self) -> None:
        """Called once when all weights are in place: a format may derive what its product reads from them here."""
        parts = dict(sorted(self._parts.items()))
        self._parts.clear()
        is_whole = sum(part.shape[0] for part in parts.values()) == self.weight.shape[0]
        if is_whole and len({part.kind for part in parts.values()}) == 1:
            self.bits = QuantizedRows.joined(list(parts.values()))
            if not self.is_shared:
                self.weight = self.weight.to("meta")
                return
        for first, part in parts.items():
            self.weight[first : first + part.shape[0]] = part.dequantize()

    def dense(self) -> torch.Tensor:
        """The weight as numbers, made anew where only bits are kept."""
        return self.bits.dequantize() if self.bits is not None and self.weight.is_meta else self.weight

    def pack(self, allow_copy: bool) -> int:
        """Choose the product for the device, perhaps with a second copy of the weights; returns the copy's bytes."""
        if self.bits is not None:
            self.product = QuantizedProduct(self.bits, self.bias, self.weight if self.is_shared else None)
            return self.product.extra_bytes
        if self.weight.is_cpu:
            self.product = make_product(self.weight, self.bias, packed=allow_copy)
            return self.product.extra_bytes
        return 0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) if self.product is not None else ops.linear(x, self.dense(), self.bias)

    def apply_wide(self, x: torch.Tensor) -> torch.Tensor:
        """The product with its sums kept in float32 (float64 stays): logits rounded to 16 bits would tie."""
        if self.weight.dtype in (torch.float32, torch.float64):
            return self.apply(x)
        out = ops.linear_wide(x, self.weight) if x.is_cuda else self._sums_float32(x)
        return out if self.bias is None else out.add_(self.bias)

    def _sums_float32(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return torch.cat([F.linear(x, rows.float()) for rows in self.weight.split(WIDE_CHUNK)], dim=-1)


class Linear:
    """y = x W' + b."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.format = DenseFormat.empty(in_features, out_features, bias=bias, dtype=dtype, device=device)

    @classmethod
    def sharing(cls, weight: torch.Tensor) -> Linear:
        """A layer on a weight [out, in] that another layer owns and loads: a head tied to the embedding."""
        linear = cls.__new__(cls)
        linear.out_features, linear.in_features = weight.shape
        linear.format = DenseFormat(weight, is_shared=True)
        return linear

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        return self.format.slots(prefix, 0, self.out_features)

    def finalize(self) -> None:
        self.format.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.format.apply(x)

    def pack(self, allow_copy: bool) -> int:
        return self.format.pack(allow_copy)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self.format.apply_wide(x)


class FusedLinear(Linear):
    """Several linear layers of one input as one product. `parts` gives name and output features, in order."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype, device=device)
        self.parts = dict(parts)

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        """Slots under `prefix`.`part`, each a slice of the one weight."""
        slots: dict[str, WeightSlot] = {}
        first = 0
        for name, size in self.parts.items():
            slots |= self.format.slots(f"{prefix}.{name}", first, size)
            first += size
        return slots


def find_linears(part: object) -> list[Linear]:
    """Every linear layer inside a model or a part of one, each once."""
    found: dict[int, Linear] = {}
    seen: set[int] = set()

    def walk(value: object) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, Linear):
            found[id(value)] = value
        elif type(value).__module__.startswith("outrider.") and hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            for item in vars(value).values():
                walk(item)

    walk(part)
    return list(found.values())
