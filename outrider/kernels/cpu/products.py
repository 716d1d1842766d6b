"""Linear products on the CPU: chooses the fastest implementation for each number of token rows.

A library's product for 2 to 32 token rows costs up to three times that of one row, although it reads the weights, which
takes most of the time, only once in both cases. Verifying drafts pays only if several rows cost little more than one.

Figures behind the choice, in ms: all products of SmolLM2-135M (538 MB of float32), 2 cores with AVX-512, best of 11
(`bench/cpu_products.py` prints them for any machine). `packed` is oneDNN's reordered copy, `half` is bfloat16.

    token rows       1     2     4     5     8    16    32    64   128
    library       19.9  20.1  44.2  45.2  60.0  64.4  81.8 113.9 172.0
    packed        25.1  26.1  32.2  32.7  41.6  47.4  70.0 121.5 205.0
    native        19.0  19.2  22.6  23.2  29.8  37.7  62.4 117.3 262.1
    native half   11.9  12.0  14.3  14.5  19.5  39.7  57.8 106.1 215.2

At 64 token rows the library is level with native, and from there on ahead. Weights in a GGUF file's bits stay with the
native product (`kernels/quantized.py`): they would have to be dequantised first, which costs 40 ms more."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import cpu as native

# Where the table's columns cross. Library products take over when arithmetic, not reading, is the cost. On ARM they
# never do: native ones are written out there (`panel_neon.h`) and are faster for any number of token rows.
NATIVE_MAX_ROWS = 64 if platform.machine() in ("x86_64", "AMD64") else sys.maxsize - 1
PACKED_MIN_ROWS = 4 if platform.machine() in ("x86_64", "AMD64") else 2  # ARM's library is slow from 2 rows on
PACKED_MAX_ROWS = 64
LOOKED_AT_FIRST = 4096  # weights
PACKED_FOR_ROWS = 8  # the number of rows oneDNN is told when it lays out a packed copy


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether every float32 weight is a bfloat16 number, as in a checkpoint saved in bfloat16."""
    bits = weight.contiguous().view(torch.int32).flatten()
    # Most weights that are no such numbers show it among the first, and all of them take as long as an update's copies.
    return all(bool((some & 0xFFFF == 0).all()) for some in (bits[:LOOKED_AT_FIRST], bits))


class CpuProduct:
    """A product with one weight: x [tokens, inputs] -> x @ weight.T + bias [tokens, outputs]. Made by
    `make_product`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: bool, exact: bool) -> None:
        self.weight, self.bias = weight, bias
        self.copy: Tensor | None = None
        self.matrix: native.Matrix | None = None  # the weight for the native product
        self.few: Callable[[Tensor], Tensor] = self._library
        self.few_rows = range(0)
        is_served = weight.dtype is torch.float32 and weight.is_cpu and weight.is_contiguous()
        if is_served and native.available():
            self._use_native(packed, exact)
        elif exact:
            self.few, self.few_rows = self._row_by_row, range(1, sys.maxsize)
        elif is_served and packed and torch.backends.mkldnn.is_available():
            self._use_packed()

    @property
    def extra_bytes(self) -> int:
        """The bytes of the second copy of the weight, if there is one."""
        return 0 if self.copy is None else self.copy.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] in self.few_rows and x.dtype is self.weight.dtype:
            return self.few(x)
        return F.linear(x, self.weight, self.bias)

    def _use_native(self, packed: bool, exact: bool) -> None:
        if packed and fits_bfloat16(self.weight):
            self.copy = self.weight.to(torch.bfloat16)
        self.matrix = native.dense_matrix(self.weight if self.copy is None else self.copy, self.bias)
        self.few, self.few_rows = self._native, range(1, sys.maxsize if exact else NATIVE_MAX_ROWS + 1)

    def _use_packed(self) -> None:
        self.copy = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_FOR_ROWS)
        self.few, self.few_rows = self._packed, range(PACKED_MIN_ROWS, PACKED_MAX_ROWS + 1)

    def _library(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def _native(self, x: Tensor) -> Tensor:
        assert self.matrix is not None
        return native.product(x, self.matrix)

    def _packed(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.copy, self.bias, "none", [], "")
        return result

    def _row_by_row(self, x: Tensor) -> Tensor:
        """Multiply a copy of each token row in a call of its own, always of one shape, because a library may compute
        differently depending on where a row is in memory."""
        return torch.cat([F.linear(row.clone(), self.weight, self.bias) for row in x.split(1)])


def make_product(weight: Tensor, bias: Tensor | None = None, packed: bool = False, exact: bool = False) -> CpuProduct:
    """Make the product with one weight [outputs, inputs] of any dtype; dtypes other than float32 use the library.

    `packed` allows a second copy of the weight, counted in `extra_bytes`: in bfloat16 if that loses nothing
    (checkpoints saved in bfloat16; a few rows then take little more than half the time), or in oneDNN's layout if there
    is no native kernel. With `exact` a row's result has the same bits for every number of token rows.
    """
    return CpuProduct(weight, bias, packed, exact)


def make_exact_product(weight: Tensor, bias: Tensor | None = None, packed: bool = False) -> CpuProduct:
    """`make_product` for exact mode."""
    return make_product(weight, bias, packed, exact=True)
