"""Tensors of a GGUF file, dequantised or in the file's own bits. One tensor at a time is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.formats import StoredWeight
from outrider.kernels.quantized import QuantizedRows
from outrider.models.sources.base import SourceError
from outrider.models.sources.gguf_families import Family, Metadata, TensorPlace
from outrider.models.sources.gguf_header import Header, TensorEntry, TensorKind
from outrider.models.sources.gguf_tensors import FLOAT_KINDS, KEPT_KINDS, dequantised, raw_bytes

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LibraryRows:
    """A weight [outputs, inputs] whose bits only the gguf library reads, as bytes [outputs, bytes of a row]: no format
    keeps it."""

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
    # Largest first: what the model has not been given yet is not in memory, so the largest costs nothing extra.
    for entry in sorted(header.tensors.values(), key=lambda e: -math.prod(e.shape)):
        place = family.place(entry.name)
        if place is None:
            continue
        data = torch.from_numpy(raw_bytes(header.path, entry))
        if entry.kind.name in FLOAT_KINDS:
            data = data.view(FLOATS[entry.kind.name])
        rows = data.view(*entry.shape[:-1], -1)
        if place.heads is not None:
            rows = _put_halves_back(rows, header, entry, place.heads)
        yield from _stored(rows, entry, place)


def _stored(
    rows: torch.Tensor, entry: TensorEntry, place: TensorPlace
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """The weights of one tensor of the file, by name: one, or one for each expert."""
    names = [place.name]
    if "{expert}" in place.name:
        names = [place.name.replace("{expert}", str(expert)) for expert in range(entry.shape[0])]
    kind, shape = entry.kind.name, entry.shape[-2:]
    for name, own in zip(names, rows.unbind() if len(names) > 1 else [rows], strict=True):
        if kind in FLOAT_KINDS:
            yield name, own if place.change is None else place.change(own.float())
        elif kind in KEPT_KINDS and len(shape) == 2 and place.change is None:
            yield name, QuantizedRows(kind, own)
        else:
            weight = LibraryRows(kind, own, shape)
            yield name, weight if place.change is None else place.change(weight.dequantize())


def _put_halves_back(rows: torch.Tensor, header: Header, entry: TensorEntry, key: str) -> torch.Tensor:
    """[heads * dim, in], or bytes of rows: GGUF interleaves the two halves of a head for Llama's rope; put the halves
    back in a row."""
    meta = Metadata(header)
    num_heads = meta.get(key) or meta.need("attention.head_count")
    if len(entry.shape) != 2 or entry.shape[0] % (2 * num_heads):
        raise SourceError(f"{header.path}: tensor {entry.name!r} of shape {entry.shape} does not hold two halves for "
                          f"each of {num_heads} heads. Fetch the file again.")
    out, width = rows.shape
    return rows.view(num_heads, out // num_heads // 2, 2, width).transpose(1, 2).reshape(out, width)
