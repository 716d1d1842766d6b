"""Weights in the packed forms of packed.c, whose one product serves every kind of quantised weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.cpu.build import library
from outrider.kernels.cpu.matrix import PACKED, Matrix
from outrider.kernels.cpu.structures import PACKED_PART, PACKED_PARTS, UNPACKED_ROWS
from outrider.kernels.gguf_kinds import GROUP, KINDS, PACKED_4

PIECE_BYTES = 1 << 20  # of packed weights that a thread makes at a time


class PackedRows(NamedTuple):
    """Weight rows [outputs, inputs] in one packed form."""

    form: int
    table: Tensor | None  # int8 [16], in forms whose codes number its entries
    data: Tensor  # uint8 [lanes of weight rows, units of inputs, bytes of a unit]
    outputs: int
    inputs: int

    def describe(self, first: int = 0) -> bytes:
        """Describe these rows to the C code, as the rows of a matrix from `first` on."""
        return PACKED_PART.pack(data=self.data.data_ptr(), table=_address(self.table), first=first,
                                outputs=self.outputs, form=self.form)

    def look_up(self, rows: Tensor) -> Tensor:
        """Dequantise some rows of the weight to float32."""
        rows = rows.contiguous()
        assert rows.dtype is torch.int64
        found = torch.empty(len(rows), self.inputs)
        library().unpack_rows(self.describe(), self.inputs, rows.data_ptr(), len(rows), found.data_ptr(),
                              torch.get_num_threads())
        return found

    def take(self, rows: Tensor, out: PackedRows) -> None:
        """Copy some packed weight rows into the rows of `out`, which has the same form."""
        rows = rows.contiguous()
        assert rows.dtype is torch.int64 and (out.form, out.inputs, out.outputs) == (self.form, self.inputs, len(rows))
        if len(rows) and not (0 <= int(rows.min()) and int(rows.max()) < self.outputs):
            raise IndexError(f"take: a row is outside of the {self.outputs} weight rows")
        library().take_packed_rows(self.describe(), self.inputs, rows.data_ptr(), len(rows), out.data.data_ptr(),
                                   torch.get_num_threads())

    def coarsened(self) -> PackedRows:
        """Round the weight rows to 4 bits. The scale of every 32 inputs is set by the largest of them."""
        data = torch.empty(packed_shape(PACKED_4, self.outputs, self.inputs, GROUP), dtype=torch.uint8)
        library().coarsen_rows(self.describe(), self.inputs, data.data_ptr(), torch.get_num_threads())
        return PackedRows(PACKED_4, None, data, self.outputs, self.inputs)


def packed_lanes() -> int:
    """Return how many weight rows are interleaved on this machine."""
    return int(library().packed_lanes())


def packed_shape(form: int, outputs: int, inputs: int, unit: int) -> tuple[int, int, int]:
    """Return the shape of the data of packed weight rows. `unit`: how many inputs share a float32 scale."""
    return -(-outputs // packed_lanes()), inputs // unit, library().packed_unit_bytes(form)


def pack_rows(codes: Tensor, scale: Tensor, least: Tensor | None, inner_scale: Tensor | None,
              inner_least: Tensor | None, form: int, out: Tensor) -> None:
    """Pack codes [rows, inputs] and their scales: see `gguf_kinds.Unpacked`."""
    given = dict(codes=codes, scale=scale, least=least, inner_scale=inner_scale, inner_least=inner_least)
    held = {name: None if tensor is None else tensor.contiguous() for name, tensor in given.items()}
    addresses = {name: _address(tensor) for name, tensor in held.items()}
    assert out.is_contiguous() and out.shape[0] == -(-codes.shape[0] // packed_lanes())
    given_rows = UNPACKED_ROWS.pack(**addresses, rows=codes.shape[0], inputs=codes.shape[1])
    library().pack_rows(given_rows, out.data_ptr(), form, torch.get_num_threads())


def pack_blocks(kind: str, blocks: Tensor, out: PackedRows) -> None:
    """Pack a file's blocks [rows, blocks of a row, bytes of a block]. The blocks of a row must lie side by side."""
    known, lanes = KINDS[kind], packed_lanes()
    assert blocks.dtype is torch.uint8 and (known.form, out.outputs) == (out.form, blocks.shape[0])
    assert blocks.shape[1:] == (out.inputs // known.block, known.block_bytes) and out.data.is_contiguous()
    if blocks.stride()[1:] != (known.block_bytes, 1):
        blocks = blocks.contiguous()
    num, step = list(KINDS).index(kind), max(1, PIECE_BYTES // max(1, out.data[0].nbytes)) * lanes

    def pack(first: int) -> None:
        rows, target = blocks[first : first + step], out.data[first // lanes]
        library().pack_blocks(rows.data_ptr(), rows.stride(0), *rows.shape[:2], num, target.data_ptr())

    _in_threads(pack, range(0, out.outputs, step))


def _in_threads(work: Callable[[int], None], pieces: Sequence[int]) -> None:
    """Apply a function to all pieces, in as many threads as torch has. A model has hundreds of small tensors, for which
    OpenMP's threads, which spin while they wait, would make loading several times as much work."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads <= 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, pieces))


class PackedMatrix(Matrix):
    """A matrix whose weight rows are in several packed forms, the rows of one form after those of another. Products
    round token rows to 8, 16 or 24 bits, with a scale for every 32 inputs; 24 bits are as close as float32."""

    def __init__(self, parts: Sequence[PackedRows], bias: Tensor | None, activation_bits: int = 24) -> None:
        firsts = [sum(part.outputs for part in parts[:at]) for at in range(len(parts) + 1)]
        described = b"".join(part.describe(first) for part, first in zip(parts, firsts, strict=False))
        self.parts, self._described = tuple(parts), _in_memory(described)
        whole = PACKED_PARTS.pack(parts=self._described.data_ptr(), count=len(parts), digits=activation_bits // 8)
        super().__init__(_in_memory(whole), bias, PACKED, parts[0].inputs, firsts[-1])


def _in_memory(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
