"""Reads weights from files that a trainer wrote, as named arrays: safetensors files, and files of tensors' bytes, one
tensor after the other.

A file in /dev/shm is shared memory. A file's header and length are checked before the first tensor is returned, so that
a file that was cut off yields none. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.fields import shown
from outrider.runner.commands import NamedArray

LENGTH_BYTES = 8  # of the number that a safetensors file begins with: the length of its header
MAX_HEADER_BYTES = 100 << 20
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
          "BOOL": "bool"}
SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, with the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * SIZES.get(self.dtype, 1)


def read_safetensors(path: Path) -> Iterator[NamedArray]:
    """Read the tensors of a safetensors file. Raises ValueError if the file is damaged or was cut off."""
    data = _mapped(path)
    begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    if not LENGTH_BYTES < begin <= min(len(data), MAX_HEADER_BYTES):
        raise ValueError(f"update_weights: {path.name} is not a whole safetensors file")
    try:
        header = json.loads(data[LENGTH_BYTES:begin].tobytes())
        tensors = [_from_header(name, held, begin) for name, held in header.items() if name != "__metadata__"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"update_weights: {path.name} has a damaged header ({error!r})") from None
    return _arrays(path, data, tensors)


def read_packed(path: Path, names: Sequence[str], dtypes: Sequence[str],
                shapes: Sequence[Sequence[int]]) -> Iterator[NamedArray]:
    """Read the tensors of a file that has nothing but their bytes, one tensor after the other."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"update_weights: {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes")
    tensors, start = list[Stored](), 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        dtype = dtype.removeprefix("torch.")
        if dtype not in DTYPES.values() or any(size < 0 for size in shape):
            raise ValueError(f"update_weights: {name} has dtype {shown(dtype)} and shape {shown(list(shape))}")
        tensors.append(Stored(name, dtype, tuple(shape), start))
        start += tensors[-1].num_bytes
    data = _mapped(path)
    if len(data) < start:  # shared memory may be longer: it comes in whole pages
        raise ValueError(f"update_weights: {path.name} has {len(data)} bytes, the tensors need {start}")
    return _arrays(path, data, tensors)


def _mapped(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if not path.stat().st_size:
        raise ValueError(f"update_weights: {path.name} is empty")
    return np.memmap(path, np.uint8, mode="r")


def _from_header(name: str, held: dict[str, Any], begin: int) -> Stored:
    start, end = held["data_offsets"]
    tensor = Stored(name, DTYPES[held["dtype"]], tuple(held["shape"]), begin + start)
    if start < 0 or end - start != tensor.num_bytes:
        raise ValueError(f"{name} has {end - start} bytes and needs {tensor.num_bytes}")
    return tensor


def _arrays(path: Path, data: np.ndarray[Any, np.dtype[np.uint8]], tensors: Sequence[Stored]) -> Iterator[NamedArray]:
    """Check that the file contains all tensors, then copy them one after the other, each when it is asked for."""
    for tensor in tensors:
        if tensor.start + tensor.num_bytes > len(data):
            raise ValueError(f"update_weights: {path.name} ends before tensor {tensor.name}: it was cut off")
    return (NamedArray(each.name, each.dtype, each.shape, np.array(data[each.start : each.start + each.num_bytes]))
            for each in tensors)
