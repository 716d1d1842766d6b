"""Products with a weight matrix by the C code, which reads weights as floats, halves or the blocks of GGUF."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.native.build import available, library
from outrider.kernels.native.checks import is_matrix, is_vector
from outrider.kernels.native.structures import MATRIX

# How native.h numbers the ways to store a weight.
FLOATS, HALVES, Q8_0, Q4_0, Q4_1 = range(5)
INT8 = 3  # added to a kind of blocks: token rows are rounded to 8 bits
LANES = 6  # likewise, and weight rows are interleaved
_DENSE = {torch.float32: FLOATS, torch.bfloat16: HALVES}


class Matrix:
    """A weight [outputs, inputs] and perhaps a bias, as the C code reads them. Keeps both alive."""

    def __init__(self, data: Tensor, bias: Tensor | None, kind: int, inputs: int) -> None:
        self.data, self.bias, self.kind = data, bias, kind
        self.outputs, self.inputs = data.shape[0], inputs
        self.packed = self._pack(0)
        if kind == Q4_1:
            self.packed = self._pack(library().find_exact_least(self.packed))

    def _pack(self, least_is_exact: int) -> bytes:
        """`least_is_exact`: whether products with one token row may take the quicker way; the C code finds out."""
        data, bias = self.data, self.bias
        return MATRIX.pack(
            data=data.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
            row_bytes=data.stride(0) * data.element_size(), inputs=self.inputs, outputs=self.outputs, kind=self.kind,
            least_is_exact=least_is_exact,
        )  # fmt: skip


def dense_matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix | None:
    """A float32 weight, or bfloat16 that stands for the same float32 numbers; None if the C code does not take it."""
    outputs, inputs = weight.shape
    is_good = weight.dtype in _DENSE and weight.is_cpu and weight.stride(1) == 1 and is_vector(bias, outputs)
    return Matrix(weight, bias, _DENSE[weight.dtype], inputs) if is_good and available() else None


def int8_matrix(rows: Tensor, bias: Tensor | None, kind: int, inputs: int) -> Matrix:
    """A weight in blocks, whose products round token rows to 8 bits. Where the C code is faster with interleaved weight
    rows, they are interleaved in a copy; the results have the same bits."""
    if not library().interleaved_rows():
        return Matrix(rows, bias, kind + INT8, inputs)
    return interleaved(rows, bias, kind, inputs)


def interleaved(rows: Tensor, bias: Tensor | None, kind: int, inputs: int) -> Matrix:
    """A copy of a weight in blocks with 16 weight rows interleaved, the last ones with zeros: see int8_lanes.c."""
    assert HALVES < kind <= Q4_1
    copy = torch.empty(-(-rows.shape[0] // 16) * 16, rows.shape[1], dtype=torch.uint8)
    matrix, rows = Matrix(copy[: rows.shape[0]], bias, kind + LANES, inputs), rows.contiguous()
    library().interleave(rows.data_ptr(), matrix.packed, torch.get_num_threads())
    return matrix


def product(x: Tensor, matrix: Matrix, threads: int | None = None) -> Tensor:
    """x [tokens, inputs] float32, rows at any distance, times the matrix, by torch's number of threads or another.

    The cost is nearly flat up to eight token rows, and rows do not depend on each other."""
    assert is_matrix(x) and x.shape[1] == matrix.inputs
    out = torch.empty(x.shape[0], matrix.outputs)
    library().product(
        matrix.packed, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], threads or torch.get_num_threads()
    )  # fmt: skip
    return out


def dequantize(matrix: Matrix, first: int, out: Tensor) -> None:
    """Weight rows [first, first + rows of out) as float32; the matrix is stored in blocks."""
    assert HALVES < matrix.kind <= Q4_1 and first + out.shape[0] <= matrix.outputs
    assert out.is_contiguous() and out.dtype is torch.float32 and out.shape[1] == matrix.inputs
    library().dequantize(matrix.packed, first, out.shape[0], out.data_ptr(), torch.get_num_threads())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` with a weight as it comes: see `dense_matrix`."""
    assert weight.is_cpu and weight.stride(1) == 1
    return product(x, Matrix(weight, bias, _DENSE[weight.dtype], weight.shape[1]))
