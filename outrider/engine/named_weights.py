"""Weights that a caller gives by the names of a checkpoint, as the command that takes them to the worker. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from outrider.core.fields import shown
from outrider.runner.commands import NamedArray, UpdateWeights

# A folder with safetensors files, one such file or a GGUF file; or tensors (torch's or numpy's) by name.
Weights: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]]


def weights_command(weights: Weights) -> UpdateWeights:
    """Make the command that takes weights to the worker. Tensors are taken out of an iterable one by one and copied to
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


def _named(pair: Any) -> NamedArray:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"update_weights: weights must be pairs of a name and a tensor, got {shown(pair)}")
    name, value = pair
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        return NamedArray(name, str(data.dtype).removeprefix("torch."), tuple(data.shape),
                          data.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        array = array if array.flags.writeable else array.copy()
        return NamedArray(name, str(array.dtype), value.shape, array.reshape(-1).view(np.uint8))
    raise ValueError(f"update_weights: {name} must be a tensor of torch or an array of numpy, got {shown(value)}")
