"""Products with a weight matrix by the C code, which reads weights as float32, bfloat16, fp8 or packed
(`packed.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.cpu.build import available, library
from outrider.kernels.cpu.checks import is_matrix, is_vector
from outrider.kernels.cpu.structures import MATRIX

FLOATS, HALVES, PACKED, QUARTERS = range(4)  # as native.h numbers the ways to store a weight
FP8_SHIFT = 2.0**120  # by which the C code's numbers of e4m3 codes are too small
MOST_LANES = 16  # of a vector on any machine
_DENSE = {torch.float32: FLOATS, torch.bfloat16: HALVES}


class Matrix:
    """A weight [outputs, inputs] and perhaps a bias, as the C code reads them. Keeps both alive."""

    def __init__(self, data: Tensor, bias: Tensor | None, kind: int, inputs: int, outputs: int | None = None,
                 scales: Tensor | None = None, group: int = 0) -> None:
        self.data, self.bias, self.kind, self.scales = data, bias, kind, scales
        self.outputs, self.inputs = outputs or data.shape[0], inputs
        self.packed = MATRIX.pack(
            data=data.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
            row_bytes=data.stride(0) * data.element_size(), inputs=inputs, outputs=self.outputs, kind=kind,
            scales=0 if scales is None else scales.data_ptr(), group=group,
        )


def dense_matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix | None:
    """Describe a weight to the C code; a bfloat16 weight stands for float32 numbers of the same values. Returns None if
    the C code does not take the weight."""
    outputs, inputs = weight.shape
    is_good = weight.dtype in _DENSE and weight.is_cpu and weight.stride(1) == 1 and is_vector(bias, outputs)
    return Matrix(weight, bias, _DENSE[weight.dtype], inputs) if is_good and available() else None


def fp8_matrix(codes: Tensor, scales: Tensor, group: int, bias: Tensor | None = None) -> Matrix | None:
    """Describe a weight of e4m3 codes [outputs, inputs] with a scale [outputs, groups] for every `group` inputs.
    Returns None if the C code does not take it."""
    outputs, inputs = codes.shape
    shifted = scales.float().T.contiguous() * FP8_SHIFT
    is_good = (codes.is_cpu and codes.stride(1) == 1 and is_vector(bias, outputs) and bool(shifted.isfinite().all())
               and (group % MOST_LANES == 0 or group >= inputs))
    return Matrix(codes, bias, QUARTERS, inputs, scales=shifted, group=group) if is_good and available() else None


def product(x: Tensor, matrix: Matrix, threads: int | None = None) -> Tensor:
    """Multiply x [tokens, inputs] float32, at any row stride, with the matrix. threads: torch's number by default.

    The time hardly grows up to eight token rows. Rows do not depend on each other.
    """
    assert is_matrix(x) and x.shape[1] == matrix.inputs
    out = torch.empty(x.shape[0], matrix.outputs)
    library().product(
        matrix.packed, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], threads or torch.get_num_threads()
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `product` with a weight that is described to the C code (`dense_matrix`) at each call."""
    assert weight.is_cpu and weight.stride(1) == 1
    return product(x, Matrix(weight, bias, _DENSE[weight.dtype], weight.shape[1]))
