"""Reads the tensors of a folder's safetensors files, one at a time. At most about one tensor is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.formats import StoredWeight
from outrider.models.sources.file_reads import FileReader, FileTensor, safetensors_header
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.quantization import KEY, Quantization

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # mean nothing without scales
MAPPED_BYTES = 32 << 20  # after reading this many bytes files are opened anew, which drops the pages read so far


def safetensors_tensors(
    folder: str | Path, quantization: Quantization | None = None, *, maps_files: bool = True
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """Yield (name, tensor) for all tensors in model.safetensors, or in the shards of model.safetensors.index.json. With
    a quantization, tensors that belong together are yielded as one stored weight.

    The largest tensors come first. A tensor is in memory twice while it is copied, which for the largest ones costs
    nothing extra as long as most of the model is empty. maps_files: files are mapped into memory; they must not change
    meanwhile."""
    opens: Callable[[Path], Any] = _open if maps_files else cache(_open_unmapped)
    sizes = [(size, name, path) for path, names in _files(Path(folder)).items()
             for name, size in _sizes(opens(path), path, names)]
    sizes.sort(key=lambda item: (-item[0], item[1]))
    path_of = {name: path for _, name, path in sizes}
    handles: dict[Path, Any] = {}
    mapped = 0
    for size, name, path in sizes:
        if quantization is not None and quantization.is_beside(name, path_of):
            continue  # goes with its weight
        if path not in handles:
            handles[path] = opens(path)
        tensor = _tensor(handles[path], name, path)
        yield (name, tensor) if quantization is None else _joined(quantization, name, tensor, path_of, opens)
        del tensor  # before the next one is read
        mapped += size
        if mapped >= MAPPED_BYTES:
            handles.clear()
            mapped = 0


def _joined(
    quantization: Quantization, name: str, tensor: torch.Tensor, path_of: Mapping[str, Path],
    opens: Callable[[Path], Any],
) -> tuple[str, torch.Tensor | StoredWeight]:
    """Return the tensor, or the quantised weight that it forms together with other tensors, such as its scales."""
    matrix = name.removesuffix(quantization.suffix)
    beside = {end: matrix + end for end in quantization.beside if matrix + end in path_of}
    if not name.endswith(quantization.suffix) or not beside:
        if tensor.dtype in FP8_DTYPES and not name.endswith(quantization.beside):
            raise WeightError(f"{name} holds {tensor.dtype} numbers, but {matrix}{quantization.beside[0]} with "
                              f"their scales is missing: fetch the files again, or correct their {KEY}")
        return name, tensor
    tensors = MatrixTensors(matrix, {quantization.suffix: tensor})
    for end, other in beside.items():
        tensors[end] = _tensor(opens(path_of[other]), other, path_of[other])
    return matrix + quantization.plain_suffix, quantization.join(matrix, tensors)


class MatrixTensors(dict[str, torch.Tensor]):
    """The tensors of a stored matrix by suffix. Access to a tensor that the files lack raises an error with its
    name."""

    def __init__(self, matrix: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._matrix = matrix

    def __missing__(self, suffix: str) -> torch.Tensor:
        held = ", ".join(self._matrix + end for end in self)
        raise WeightError(f"tensor {self._matrix}{suffix} is missing, though the files hold {held}; download the files "
                          "again")


def safetensors_names(folder: str | Path) -> set[str]:
    """Return the names of all tensors of a folder, from the index or the files' headers."""
    return {name for path, names in _files(Path(folder)).items()
            for name in (_open(path).keys() if names is None else names)}


def read_tensors(folder: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Read some tensors of a folder as they are stored."""
    for path, held in _files(folder).items() if names else ():
        handle = _open(path)
        for name in sorted(set(names).intersection(handle.keys() if held is None else held)):
            yield name, _tensor(handle, name, path)


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Yield each file of the folder, with the names of the tensors that the index expects in it, or None if there is no
    index. `folder` may also be a file."""
    if folder.is_file():
        return {folder: None}
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}: give a folder with all of the "
                                "model's files")
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index} is damaged ({error!r}); download it again") from error
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise WeightError(f"{index} names {file!r}, which is not a plain file name: download the index again")
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    return files


def _sizes(handle: Any, path: Path, names: set[str] | None) -> list[tuple[str, int]]:
    """Return the names of tensors with their sizes in bytes, counted as float32, which is good enough to sort by."""
    held = set(handle.keys())
    if names is not None and names != held:
        odd = ", ".join(sorted(names ^ held))
        raise WeightError(f"{path} and model.safetensors.index.json disagree about {odd}; download both again")
    shapes = {name: handle.get_slice(name).get_shape() for name in held}
    return [(name, 4 * torch.Size(shape).numel()) for name, shape in shapes.items()]


class UnmappedFile:
    """A safetensors file that may change while it is read. It has the methods of `safe_open` that are used here."""

    def __init__(self, path: Path) -> None:
        self._file = FileReader(path)
        self._tensors = {tensor.name: tensor for tensor in safetensors_header(self._file)}
        end = max((tensor.end for tensor in self._tensors.values()), default=self._file.num_bytes)
        if end < self._file.num_bytes:
            raise WeightError(f"{path.name} has a damaged header: {self._file.num_bytes - end} bytes have no name")

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> FileTensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not stored.num_bytes:  # bytes of nothing cannot be viewed as numbers
            return torch.empty(stored.shape, dtype=dtype)
        return torch.from_numpy(self._file.read_tensor(stored)).view(dtype).view(stored.shape)


def _open_unmapped(path: Path) -> UnmappedFile:
    _check_there(path)
    try:
        return UnmappedFile(path)
    except OSError as error:
        raise _damaged(path, error) from error


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, though the index beside it names it; download it again")


def _open(path: Path) -> Any:
    _check_there(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _tensor(handle: Any, name: str, path: Path) -> torch.Tensor:
    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> WeightError:
    return WeightError(f"{path} is truncated or damaged ({error}); download it again")
