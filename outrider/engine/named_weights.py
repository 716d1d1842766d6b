"""Makes commands for the worker from weights that a caller gives by their names in a checkpoint. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from outrider.core.fields import shown
from outrider.runner.commands import NamedArray, NamedTensor, UpdateWeights

# A folder with safetensors files, one such file or a GGUF file; or tensors (torch's or numpy's) by name.
Weights: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]


def weights_command(weights: Weights) -> UpdateWeights:
    """Make the command that brings weights to the worker. Tensors are taken from an iterable one by one and copied to
    the host's memory. Files are read by the worker."""
    if isinstance(weights, (str, os.PathLike)):
        path = Path(weights)
        if not path.exists():
            raise ValueError(f"update_weights: {path} does not exist: give a folder with safetensors files, one such "
                             "file, a GGUF file, or pairs of a name and a tensor")
        return UpdateWeights(path=str(path.resolve()))
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if isinstance(pairs, bytes) or not isinstance(pairs, Iterable):
        raise ValueError(f"update_weights: give a path or pairs of a name and a tensor, got {shown(weights)}")
    return UpdateWeights(tuple(_named(pair) for pair in pairs))


def weights_one_by_one(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[NamedArray | NamedTensor]:
    """Yield the weights one at a time, so that no two tensors of an iterable need to be in memory together."""
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if isinstance(pairs, str | bytes | os.PathLike) or not isinstance(pairs, Iterable):
        raise ValueError(f"load_weights: give pairs of a name and a tensor, got {shown(weights)}")
    return map(_given, pairs)


def _named(pair: Any) -> NamedArray:
    given = _given(pair)
    return given.as_array() if isinstance(given, NamedTensor) else given


def _given(pair: Any) -> NamedArray | NamedTensor:
    if isinstance(pair, NamedArray):
        return pair
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"update_weights: weights must be pairs of a name and a tensor, got {shown(pair)}")
    name, value = pair
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_cuda:  # the worker reads it on a stream of its own
            torch.cuda.current_stream(value.device).synchronize()
        return NamedTensor(name, value.detach())
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        array = array if array.flags.writeable else array.copy()
        return NamedArray(name, str(array.dtype), value.shape, array.reshape(-1).view(np.uint8))
    raise ValueError(f"update_weights: {name} must be a tensor of torch or an array of numpy, got {shown(value)}")
