"""Reads weights from files that a trainer wrote, as named arrays: safetensors files, and files of tensors' bytes, one
tensor after the other.

A file in /dev/shm is shared memory. A file's header and length are checked before the first tensor is returned, so that
no tensor of a truncated file is returned. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.core.fields import shown
from outrider.models.sources.file_reads import DTYPES, FileReader, FileTensor, safetensors_header
from outrider.runner.commands import NamedArray


def read_safetensors(path: Path) -> Iterator[NamedArray]:
    """Read the tensors of a safetensors file. Raises ValueError if the file is damaged or truncated."""
    file = FileReader(path)
    return _arrays(file, safetensors_header(file))


def read_packed(path: Path, names: Sequence[str], dtypes: Sequence[str],
                shapes: Sequence[Sequence[int]]) -> Iterator[NamedArray]:
    """Read the tensors of a file that contains only their bytes, one tensor after the other. The file may be longer
    than the tensors, because shared memory comes in whole pages."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"update_weights: {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes: "
                         "each weight needs one of each")
    tensors, start = list[FileTensor](), 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        dtype = dtype.removeprefix("torch.")
        if dtype not in DTYPES.values() or any(size < 0 for size in shape):
            raise ValueError(f"update_weights: {name} has dtype {shown(dtype)} and shape {shown(list(shape))}: give a "
                             "dtype of torch and a list of sizes")
        tensors.append(FileTensor(name, dtype, tuple(shape), start))
        start = tensors[-1].end
    file = FileReader(path)
    file.check_holds(tensors)
    return _arrays(file, tensors)


def _arrays(file: FileReader, tensors: Sequence[FileTensor]) -> Iterator[NamedArray]:
    """Read the tensors in order, each when the caller asks for it."""
    return (NamedArray(each.name, each.dtype, each.shape, file.read_tensor(each)) for each in tensors)
