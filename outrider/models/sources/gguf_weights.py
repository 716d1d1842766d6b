"""Read the tensors of a GGUF file, dequantised or still quantised. One tensor at a time is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.fields import shown
from outrider.formats import StoredWeight
from outrider.kernels.quantized import QuantizedRows, TransposedRows, grouped_heads
from outrider.models.sources.gguf_families import Family
from outrider.models.sources.gguf_header import Header, TensorEntry, TensorKind
from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.gguf_places import TensorPlace
from outrider.models.sources.gguf_tensors import FLOAT_KINDS, KEPT_KINDS, dequantised, raw_bytes
from outrider.models.sources.model_source import SourceError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LibraryRows:
    """A weight [outputs, inputs] of a kind that only the gguf library can decode, as bytes [outputs, bytes of a row].
    It is always dequantised."""

    kind: str
    data: torch.Tensor
    shape: tuple[int, ...]

    def parts(self) -> dict[str, torch.Tensor]:
        return {}

    def is_finite(self) -> bool:
        return True  # the numbers are checked when they are stored

    def dequantize(self) -> torch.Tensor:
        return torch.from_numpy(dequantised(self.data.numpy(), TensorKind[self.kind])).view(self.shape)


def read_tensors(header: Header, family: Family) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    meta = Metadata(header)
    num_layers = meta.num_layers
    # Largest first: what the model has not been given yet is not in memory, so the largest costs nothing extra.
    for entry in sorted(header.tensors.values(), key=lambda e: -math.prod(e.shape)):
        places = family.places(entry.name, num_layers)
        if not places:
            continue
        rows = _read_rows(header, entry)
        for place in places:
            yield from _stored(rows, entry, place, meta)


def _read_rows(header: Header, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor's rows: [.., rows, numbers of a row], or bytes of a row if the file does not store floats."""
    data = torch.from_numpy(raw_bytes(header, entry))
    if entry.kind.name in FLOAT_KINDS:
        data = data.view(FLOATS[entry.kind.name])
    return data.view(*entry.shape[:-1], -1)


def _stored(
    rows: torch.Tensor, entry: TensorEntry, place: TensorPlace, meta: Metadata
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """Return the weights that one tensor of the file gives for one place, as (name, weight): a single weight, or one
    for each expert."""
    names, shape = [place.name], entry.shape
    if "{expert}" in place.name:
        names, shape = [place.name.replace("{expert}", str(expert)) for expert in range(shape[0])], shape[1:]
    for name, own in zip(names, rows.unbind() if len(shape) < len(entry.shape) else [rows], strict=True):
        try:
            weight = _placed(own, shape, entry, place, meta)
        except SourceError:
            raise
        except (ValueError, RuntimeError) as error:  # views of a shape that the metadata does not know
            raise SourceError(f"{meta.header.path}: tensor {shown(entry.name)} of shape {entry.shape} does not fit the "
                              f"heads that the metadata names ({error}). Fetch the file again.") from error
        yield name, weight


def _placed(
    rows: torch.Tensor, shape: tuple[int, ...], entry: TensorEntry, place: TensorPlace, meta: Metadata
) -> torch.Tensor | StoredWeight:
    """Return a tensor of the file, or one expert's part of it, with its rows and numbers in the model's order."""
    if place.rows is not None:
        rows = _reordered(rows, place.rows(meta, shape[0]))
    weight = _weight(entry.kind.name, rows, (rows.shape[0], *shape[1:]), place, meta)
    return weight if place.change is None else _changed(weight, entry, place, meta)


def _reordered(rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:
    """Reorder the rows with numpy, which copies whole rows. Torch would copy byte by byte and start its threads."""
    in_bytes = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return torch.from_numpy(in_bytes.take(order, 0)).view(rows.dtype).view(len(order), *rows.shape[1:])


def _weight(
    kind: str, rows: torch.Tensor, shape: tuple[int, ...], place: TensorPlace, meta: Metadata
) -> torch.Tensor | StoredWeight:
    """Return the weight of a tensor, with rows in the model's order: a plain tensor if the file stores floats,
    otherwise a quantised weight."""
    grid = None if place.columns is None else place.columns(meta)
    if kind in FLOAT_KINDS:
        return rows if grid is None else grouped_heads(rows, *grid)
    if kind in KEPT_KINDS and len(shape) == 2:
        return QuantizedRows(kind, rows) if grid is None else TransposedRows(kind, rows, *grid)
    weight = LibraryRows(kind, rows, shape)
    return weight if grid is None else grouped_heads(weight.dequantize(), *grid)


def _changed(
    weight: torch.Tensor | StoredWeight, entry: TensorEntry, place: TensorPlace, meta: Metadata
) -> torch.Tensor:
    """Compute the numbers of a model's tensor from one tensor of the file, or from two tensors of the same layer."""
    assert place.change is not None
    if place.beside is None:
        return place.change(_numbers(weight))
    name = f"{entry.name.removesuffix(entry.name.split('.', 2)[2])}{place.beside}"
    other = meta.header.tensors.get(name)
    if other is None:
        raise SourceError(f"{meta.header.path}: tensor {shown(name)} is missing, though the file holds "
                          f"{shown(entry.name)}; it is damaged or incomplete: fetch it again")
    beside = _weight(other.kind.name, _read_rows(meta.header, other), other.shape, TensorPlace(name), meta)
    return place.change(_numbers(weight), _numbers(beside))


def _numbers(weight: torch.Tensor | StoredWeight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
