"""Reads tensors from files that another process may change meanwhile, such as those of a trainer.

Files are read and never mapped into memory, because a process that touches a mapped page behind a file's new end is
killed. A file that became shorter is refused by its name instead. No torch."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.fields import shown
from outrider.models.sources.model_source import WeightError

LENGTH_BYTES = 8  # of the number that a safetensors file begins with: the length of its header
MAX_HEADER_BYTES = 100 << 20
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
          "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"}
SIZES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2,
         "int16": 2, "uint16": 2}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, with the range of its bytes."""

    name: str
    dtype: str  # torch's name of it
    shape: tuple[int, ...]
    start: int  # in the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * SIZES.get(self.dtype, 1)

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def get_shape(self) -> list[int]:
        """Return the shape. The method's name is that of safetensors."""
        return list(self.shape)


class FileReader:
    """An open file of weights. Errors name the file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():  # a pipe would wait for its writer
            raise WeightError(f"{path.name} is not a regular file: give one")
        self.name = path.name
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self.num_bytes = path.stat().st_size

    def read(self, start: int, num_bytes: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read a part of the file into new memory. what: the name of the part in error messages."""
        data, done = np.empty(num_bytes, np.uint8), 0
        self._file.seek(start)
        while done < num_bytes:
            num = self._file.readinto(data.data[done:])
            if not num:
                raise WeightError(f"{self.name} ends before the end of {what}: it was cut off")
            done += num
        return data

    def read_tensor(self, tensor: FileTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.read(tensor.start, tensor.num_bytes, f"tensor {shown(tensor.name)}")

    def check_holds(self, tensors: Sequence[FileTensor]) -> None:
        """Raise WeightError if the file ends before one of the tensors does."""
        for tensor in tensors:
            if tensor.end > self.num_bytes:
                raise WeightError(f"{self.name} ends before the end of tensor {shown(tensor.name)}: it was cut off")


def safetensors_header(file: FileReader) -> list[FileTensor]:
    """Read which tensors a safetensors file holds, in the order of their bytes. Raises WeightError if the header is
    damaged, or if the file does not hold all tensors."""
    length = file.read(0, LENGTH_BYTES, "its header")
    begin = LENGTH_BYTES + int.from_bytes(length.tobytes(), "little")
    if begin > min(file.num_bytes, MAX_HEADER_BYTES):
        raise WeightError(f"{file.name} is not a complete safetensors file: fetch it again")
    tensors = _parsed(file.name, file.read(LENGTH_BYTES, begin - LENGTH_BYTES, "its header").tobytes(), begin)
    _check_order(file.name, tensors, begin)
    file.check_holds(tensors)
    return tensors


def _parsed(file: str, header: bytes, begin: int) -> list[FileTensor]:
    try:
        held = json.loads(header)
        tensors = [_from_header(name, own, begin) for name, own in held.items() if name != "__metadata__"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{file} has a damaged header ({error!r:.300}): fetch it again") from None
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def _from_header(name: str, held: Mapping[str, Any], begin: int) -> FileTensor:
    shape, (start, end) = _sizes(name, held["shape"]), _sizes(name, held["data_offsets"])
    tensor = FileTensor(name, DTYPES[held["dtype"]], shape, begin + start)
    if end - start != tensor.num_bytes:
        raise ValueError(f"{shown(name)} has {end - start} bytes and needs {tensor.num_bytes}")
    return tensor


def _sizes(name: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(size) is int and size >= 0 for size in given):
        raise ValueError(f"{shown(name)} has {shown(given)} for whole numbers from 0")
    return tuple(given)


def _check_order(file: str, tensors: Sequence[FileTensor], begin: int) -> None:
    """Raise WeightError unless each tensor begins where the one before it ends."""
    for tensor in tensors:
        if tensor.start != begin:
            raise WeightError(f"{file} has a damaged header: tensor {shown(tensor.name)} begins at byte "
                              f"{tensor.start}, not at {begin}, where the bytes before it end")
        begin = tensor.end
