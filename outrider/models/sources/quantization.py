"""Quantization: how weights are stored by a folder's `quantization_config`. `register_quantization` adds a method.

A method says which tensors of the files belong together, and in which format each matrix is stored. Which formats a
model keeps is decided by `outrider.formats`; all others are dequantised while they are loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from outrider.formats import StoredFormat, StoredWeight

KEY = "quantization_config"


class Quantization(ABC):
    """One `quantization_config`. The matrix `x` is stored as `x` + `suffix` and the tensors `x` + each of `beside`."""

    suffix: str = ".weight"
    beside: tuple[str, ...]  # the first is there for every stored matrix, others may be
    plain_suffix: str = ".weight"  # of a matrix of plain numbers

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: the config's section. Raises ValueError, with the key, for what is not supported."""

    @abstractmethod
    def stored_format(self, name: str) -> StoredFormat | None:
        """How the matrix of this name is stored, if it is; None for plain numbers."""

    @abstractmethod
    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        """The stored weight of a matrix, from its tensors by their suffixes."""

    def is_beside(self, name: str, names: Collection[str]) -> bool:
        """Whether the tensor belongs to another one, with which it is read."""
        return any(name.endswith(end) and name.removesuffix(end) + self.suffix in names for end in self.beside)


class BlockScaled(Quantization):
    """fp8 numbers with a scale for each block of 128 x 128."""

    beside = (".weight_scale_inv",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings.get("weight_block_size") != [128, 128]:
            raise ValueError("of fp8 weights only those with scales of 128 x 128 blocks (weight_block_size) are")
        self._plain = tuple(settings.get("modules_to_not_convert") or ())

    def stored_format(self, name: str) -> StoredFormat | None:
        from outrider.formats import StoredFormat

        return None if name.startswith(self._plain) else StoredFormat("fp8_blocks")

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
        from outrider.models.sources.block_scaled import BlockScaledWeight

        return BlockScaledWeight(name, *(tensors[suffix] for suffix in (self.suffix, *self.beside)))


_METHODS: dict[str, type[Quantization]] = {"fp8": BlockScaled}


def register_quantization(quant_method: str, quantization: type[Quantization]) -> None:
    """Read checkpoints whose `quantization_config` has this `quant_method` so from now on."""
    _METHODS[quant_method] = quantization


def read_quantization(settings: Mapping[str, Any]) -> Quantization:
    """The method of a `quantization_config`. Raises ValueError with the reason if it is not supported."""
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise ValueError("only unquantised weights and fp8 with scales of 128 x 128 blocks are; load such a checkpoint")
    return _METHODS[method](settings)


def find_quantization(config: Mapping[str, Any]) -> Quantization:
    """The method of a model's config. Without a section: files may hold fp8 numbers with block scales all the same."""
    section = config.get(KEY) or (config.get("text_config") or {}).get(KEY)
    return read_quantization(section or {"quant_method": "fp8", "weight_block_size": [128, 128]})
