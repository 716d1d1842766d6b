"""Updates that replace weights of a loaded model by tensors with the names of a checkpoint.

A `WeightUpdate` has all tensors at once. It looks at them twice: once to find what does not fit, before anything is
changed, and once to copy them. A `WeightStream` gets them one at a time and copies each as it comes. Prediction modules
(MTP) have their tensors in the target's checkpoint and are updated with it; other drafters have files of their own.
Weights that stay quantised as in their files can only be replaced from files of the same form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.formats import WeightSlot
from outrider.layers import LayeredModule
from outrider.models.base import Model
from outrider.models.loader import (
    Stored,
    check_finite,
    check_numbers,
    check_shape,
    one_by_one,
    some_names,
    split_experts,
)
from outrider.models.mtp import MTPHead
from outrider.models.sources import gguf_source
from outrider.models.sources.folder import read_config
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import KEY, Quantization, quantization_section, read_quantization
from outrider.models.sources.safetensors_files import safetensors_tensors
from outrider.runner.commands import NamedArray, UpdateWeights
from outrider.runner.input_encoder import InputEncoder

BUFFERS = ("e_score_correction_bias", ".gate.expert_bias",
           ".std_bias", ".std_scale", ".input_min", ".input_max", ".output_min", ".output_max")  # of encoders
PIECE = 1 << 24  # numbers that are checked together: the device may be full


def is_buffer(name: str) -> bool:
    """Whether the weight is a buffer and not a parameter in transformers. Trainers do not send buffers, so a buffer is
    kept when parameters are dropped."""
    return name.endswith(BUFFERS)


class UpdatedWeights:
    """The weights that an update may replace: those of a model, of its prediction modules (MTP), and of its input
    encoders."""

    def __init__(self, model: Model, modules: Sequence[LayeredModule], encoders: Collection[InputEncoder] = ()) -> None:
        """modules: the drafters' modules. Those for multi-token prediction are updated together with the model."""
        self._model, self._encoders = model, encoders
        self._heads = [module for module in modules if isinstance(module, MTPHead)]
        self.slots: dict[str, WeightSlot] = dict(model.weights())
        for head in self._heads:
            self.slots |= head.weights()
        self._own = frozenset(self.slots)  # not of encoders

    def in_slots(self, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an update, each under the name of the model's slot for it. A tensor without a slot keeps
        its own name."""
        apart = split_experts(self._named(tensors), self.slots)  # whose names may be those of modules, too
        for name, tensor in one_by_one(self._named(apart), self.slots, Counter()):
            assert isinstance(tensor, torch.Tensor)
            yield name, tensor

    def _named(self, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
        for given, tensor in tensors:
            name = given if given in self._own else self._model.slot_name(given)
            encoder = None if name in self._own or not self._model.ignores(name) else self._encoder_of(name)
            if encoder is None:
                yield name, tensor
            else:
                self.slots |= encoder.weights()
                yield from encoder.arrivals(name, tensor)

    def _encoder_of(self, name: str) -> InputEncoder | None:
        return next((encoder for encoder in self._encoders if encoder.owns(name)), None)

    def check(self, name: str, tensor: torch.Tensor, *, has_form_of_model: bool) -> None:
        """Raise WeightError for a tensor that does not fit its slot. has_form_of_model: the update's files are
        quantised in the same way as the model's files."""
        slot = self.slots[name]
        if slot.kind is not None and slot.quantize is None:
            if not has_form_of_model or tensor.dtype != slot.target.dtype:
                raise WeightError(f"tensor {name} would replace a weight that is kept quantised, as in its file "
                                  f"({slot.kind}): start the engine with keep_quantized=False, or give files of the "
                                  f"same form (a folder with the model's {KEY}, or a GGUF file of the same kinds)")
            return check_shape(name, tensor, slot.shape)
        if slot.quantize is not None:
            return  # `one_by_one` has checked the numbers and made codes of them
        check_numbers(name, tensor, slot.shape)
        for piece in tensor.reshape(-1).split(PIECE):
            check_finite(name, piece.to(slot.target.device, slot.target.dtype))

    def store(self, name: str, tensor: torch.Tensor) -> None:
        slot = self.slots[name]
        slot.store(tensor.to(slot.target.dtype))  # converted where it is: the device may be full

    def ignores(self, name: str) -> bool:
        is_others = self._model.ignores(name) and self._encoder_of(name) is None
        return is_others or any(name in head.description.names.shared for head in self._heads)

    def missing(self, names: Collection[str], doubtful: Collection[str]) -> Collection[str]:
        """Return the names of the weights that are missing from `names`: of the model's, and of an encoder's if a
        failed update has replaced some of them. A missing buffer counts only if it is in `doubtful`, the names of
        weights that a failed update has replaced; other buffers keep their values."""
        needed = set(self._model.weights())
        if any(name not in self._own for name in doubtful):
            encoded = [encoder.weights().keys() for encoder in self._encoders]
            needed.update(*(own for own in encoded if own & set(doubtful)))
        return {name for name in needed - set(names) if name in doubtful or not is_buffer(name)}

    def with_encoders(self) -> dict[str, WeightSlot]:
        """The slots of all weights, those of encoders among them."""
        return self.slots | {name: slot for encoder in self._encoders for name, slot in encoder.weights().items()}


class WeightUpdate:
    def __init__(self, weights: UpdatedWeights, given: UpdateWeights, stored: Mapping[str, Any]) -> None:
        """stored: the `quantization_config` of the model's files, empty if they have none."""
        self._weights, self._given = weights, given
        self._path = None if given.path is None else Path(given.path)
        self._is_gguf = self._path is not None and self._path.suffix == ".gguf"
        section = {} if self._path is None or self._is_gguf else _quantization_of(self._path, stored)
        self._quantization: Quantization | None = read_quantization(section) if section else None
        # Bits of another kind than the weight's come as numbers, so those of a GGUF file always fit.
        self._has_form_of_model = self._is_gguf or (bool(section) and section == stored)

    def check(self) -> list[str]:
        """Return the names of the weights that the update replaces. Raises WeightError before anything changes if a
        tensor has an unknown name, another shape than its weight or values that are not finite. A tensor for a weight
        that is kept quantised must be quantised in the same way."""
        names: dict[str, None] = {}
        unknown: list[str] = []
        for name, tensor in self._tensors():
            if name in names:
                raise WeightError(f"the update has tensor {name} twice: give it once")
            if name in self._weights.slots:
                self._weights.check(name, tensor, has_form_of_model=self._has_form_of_model)
                names[name] = None
            elif not self._weights.ignores(name):
                unknown.append(name)
        if unknown:
            raise WeightError(f"the model has no weights of these names: {some_names(unknown)}. Give the names of the "
                              "model's checkpoint, and no others")
        if not names:
            raise WeightError("the update has no tensor that the model uses: give pairs of a name of the checkpoint "
                              "and a tensor, or a folder with safetensors files")
        return list(names)

    def is_whole(self, names: Collection[str], doubtful: Collection[str]) -> bool:
        return not self._weights.missing(names, doubtful)

    def check_whole(self, names: Collection[str], doubtful: Collection[str]) -> None:
        """Raise WeightError if a weight of the model is missing from the names of the update."""
        if missing := self._weights.missing(names, doubtful):
            raise WeightError("the model's weights were dropped (sleep level 2), or an update that failed has changed "
                              f"some of them, and this update lacks {some_names(missing)}: give all weights; where "
                              "they were dropped, wake_up(tags=['weights']) reads them first")

    def store(self) -> None:
        for name, tensor in self._tensors():
            if name in self._weights.slots:
                self._weights.store(name, tensor)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights.in_slots(self._read())

    def _read(self) -> Iterator[tuple[str, Stored]]:
        if self._path is None:
            return ((array.name, as_tensor(array)) for array in self._given.arrays)
        if self._is_gguf:
            return gguf_source(self._path, maps_file=False).read()
        return safetensors_tensors(self._path, self._quantization, maps_files=False)


class WeightStream:
    """An update whose tensors come one at a time. Each tensor is checked and copied into its weight when it comes."""

    def __init__(self, weights: UpdatedWeights) -> None:
        self._weights = weights
        self.came: dict[str, None] = {}  # names of the weights that were replaced
        self.has_begun = False  # weights may have changed
        self.seconds = 0.0  # that the copies took

    def take(self, name: str, tensor: torch.Tensor, before_first: Callable[[], None]) -> None:
        """Copy a tensor into its weight, or raise WeightError if the model has no such weight. `before_first` is called
        before the first weight changes, and `has_begun` is then set."""
        for slot, part in self._weights.in_slots([(name, tensor)]):
            if slot in self.came:
                raise WeightError(f"tensor {name} came twice in one update: call reset_prefix_cache() "
                                  "or finish_weight_update() to end the update before you send it again")
            if slot in self._weights.slots:
                self._weights.check(slot, part, has_form_of_model=False)
                if not self.has_begun:
                    before_first()
                self.came[slot] = None  # before the copy, which may fail half-way
                self._weights.store(slot, part)
            elif not self._weights.ignores(slot):
                raise WeightError(f"the model has no weight of this name: {name}. Give the names of the model's "
                                  "checkpoint")

    def missing(self, doubtful: Collection[str]) -> Collection[str]:
        return self._weights.missing(self.came, doubtful)


def _quantization_of(path: Path, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of the update's files, or that of the model's files if the update has no
    config.json."""
    return quantization_section(read_config(path)) if (path / "config.json").is_file() else stored


def as_tensor(array: NamedArray) -> torch.Tensor:
    """View an array as a tensor over the same memory."""
    dtype = getattr(torch, array.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"tensor {array.name} has dtype {array.dtype}, which torch cannot hold: give a float dtype "
                          "such as bfloat16")
    if not array.data.size:  # bytes of nothing cannot be viewed as numbers
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(array.data).view(dtype).view(array.shape)
