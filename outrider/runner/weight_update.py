"""WeightUpdate: tensors with the names of a checkpoint that replace weights of a loaded model.

The tensors are looked at twice: once to find what does not fit, before anything is changed, and once to copy them.
Prediction modules (MTP) have their tensors in the target's checkpoint and are updated with it; other drafters have
files of their own. Weights that stay in the bits of their files are replaced by files of the same form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.formats import WeightSlot
from outrider.layers import LayeredModule
from outrider.models.base import Model
from outrider.models.loader import Stored, check_finite, check_numbers, check_shape, one_by_one, some_names
from outrider.models.mtp import MTPHead
from outrider.models.sources import gguf_source
from outrider.models.sources.folder import read_config
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import KEY, Quantization, quantization_section, read_quantization
from outrider.runner.commands import NamedArray, UpdateWeights

PIECE = 1 << 24  # numbers that are checked together: the device may be full


class WeightUpdate:
    def __init__(self, model: Model, modules: Sequence[LayeredModule], given: UpdateWeights,
                 stored: Mapping[str, Any]) -> None:
        """modules: those of the drafters. stored: the `quantization_config` of the model's files, empty for none."""
        self._model, self._given = model, given
        self._path = None if given.path is None else Path(given.path)
        self._is_gguf = self._path is not None and self._path.suffix == ".gguf"
        section = {} if self._path is None or self._is_gguf else _quantization_of(self._path, stored)
        self._quantization: Quantization | None = read_quantization(section) if section else None
        # Bits of another kind than the weight's come as numbers, so those of a GGUF file always fit.
        self._has_form_of_model = self._is_gguf or (bool(section) and section == stored)
        self._heads = [module for module in modules if isinstance(module, MTPHead)]
        self._slots: dict[str, WeightSlot] = dict(model.weights())
        for head in self._heads:
            self._slots |= head.weights()

    def check(self, *, is_whole: bool) -> list[str]:
        """The names of the weights that the update replaces. Raises WeightError, with nothing changed, if a tensor has
        an unknown name, another shape than its weight or values that are not finite, or if the weight stays in the bits
        of its file; with `is_whole` also if the update lacks a weight of the model."""
        names: dict[str, None] = {}
        unknown: list[str] = []
        for name, tensor in self._tensors():
            if name in names:
                raise WeightError(f"tensor {name} came twice")
            if name in self._slots:
                self._check(name, tensor)
                names[name] = None
            elif not self._ignores(name):
                unknown.append(name)
        if unknown:
            raise WeightError(f"the model has no weights of these names: {some_names(unknown)}")
        if is_whole and (missing := self._model.weights().keys() - names.keys()):
            raise WeightError("the model's weights were dropped (sleep level 2), or an update that failed has changed "
                              f"some of them, and this update lacks {some_names(missing)}: give all weights; where "
                              "they were dropped, wake_up(tags=['weights']) reads them first")
        if not names:
            raise WeightError("the update has no tensor that the model uses: give pairs of a name of the checkpoint "
                              "and a tensor, or a folder with safetensors files")
        return list(names)

    def store(self) -> None:
        for name, tensor in self._tensors():
            if name in self._slots:
                slot = self._slots[name]
                slot.store(tensor.to(slot.target.dtype))  # converted on the host: the device may be full

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = map(lambda item: (self._model.slot_name(item[0]), item[1]), self._read())
        for name, tensor in one_by_one(named, self._slots, Counter()):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor

    def _read(self) -> Iterator[tuple[str, Stored]]:
        if self._path is None:
            return ((array.name, _tensor(array)) for array in self._given.arrays)
        if self._is_gguf:
            return gguf_source(self._path).read()
        from outrider.models.sources.safetensors_files import safetensors_tensors

        return safetensors_tensors(self._path, self._quantization)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        slot = self._slots[name]
        if slot.kind is not None and slot.quantize is None:
            if not self._has_form_of_model or tensor.dtype != slot.target.dtype:
                raise WeightError(f"tensor {name} would replace a weight that stays in the bits of its file "
                                  f"({slot.kind}): start the engine with keep_quantized=False, or give files of the "
                                  f"same form (a folder with the model's {KEY}, or a GGUF file of the same kinds)")
            return check_shape(name, tensor, slot.shape)
        if slot.quantize is not None:
            return  # `one_by_one` has checked the numbers and made codes of them
        check_numbers(name, tensor, slot.shape)
        for piece in tensor.reshape(-1).split(PIECE):
            check_finite(name, piece.to(slot.target.device, slot.target.dtype))

    def _ignores(self, name: str) -> bool:
        return self._model.ignores(name) or any(name in head.description.names.shared for head in self._heads)


def _quantization_of(path: Path, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of an update's files; that of the model's files if they have none."""
    return quantization_section(read_config(path)) if (path / "config.json").is_file() else stored


def _tensor(array: NamedArray) -> torch.Tensor:
    dtype = getattr(torch, array.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"tensor {array.name} has dtype {array.dtype}, which torch does not know")
    if not array.data.size:  # bytes of nothing cannot be viewed as numbers
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(array.data).view(dtype).view(array.shape)
