"""Weights kept in the bits of a GGUF file, and the product with them on the CPU.

A weight stands for the float32 numbers that dequantising gives, and the product has exactly the bits it would have
with those: they are made on the way into the registers. Knows GGUF's layouts, not its files.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.native.measured import remembered

BLOCK = 32  # weights that share a scale: GGUF's unit
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
KINDS = tuple(BLOCK_BYTES)
EXPONENT_BITS = 0x7C00  # exponent of a float16; with all bits set it is an infinity or NaN
TRIAL_SHAPE = (8192, 2048)  # shape of the weight whose products are timed: 64 MB in float32, more than a cache holds
TRIAL_REPEATS = 5
TRIAL_MARGIN = 1.25  # by which one thread may be slower with kept bits: several threads share what memory delivers


@dataclass(frozen=True)
class QuantizedRows:
    """A weight [outputs, inputs] as `data` [outputs, bytes of a row]."""

    kind: str
    data: Tensor

    def __post_init__(self) -> None:
        assert self.kind in BLOCK_BYTES and self.data.dtype is torch.uint8 and self.data.is_contiguous()
        assert self.data.shape[1] % BLOCK_BYTES[self.kind] == 0, "rows are whole blocks"

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] // BLOCK_BYTES[self.kind] * BLOCK

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.blocks()}

    def is_finite(self) -> bool:
        """Whether the scales are numbers: no float16 among them has all bits of its exponent set."""
        halves = self.data.view(torch.int16).view(self.data.shape[0], -1, BLOCK_BYTES[self.kind] // 2).numpy()
        scales = (halves[..., at] for at in range(self._num_scales))  # both at once would take three times as long
        return all(int((scale & EXPONENT_BITS).max(initial=0)) < EXPONENT_BITS for scale in scales)

    @property
    def _num_scales(self) -> int:
        return 2 if self.kind == "Q4_1" else 1

    def blocks(self) -> Tensor:
        """[outputs, blocks of a row, bytes of a block]."""
        return self.data.view(self.data.shape[0], -1, BLOCK_BYTES[self.kind])

    def _scales(self) -> list[Tensor]:
        """Numbers of each block [outputs, blocks, 1]: its scale and, for Q4_1, what is added."""
        blocks = self.blocks()
        return [blocks[..., 2 * at : 2 * at + 2].contiguous().view(torch.float16).float()
                for at in range(self._num_scales)]

    def dequantize(self) -> Tensor:
        """The weight [outputs, inputs] in float32, by plain torch operations: this defines what the bits mean."""
        blocks, scales = self.blocks(), self._scales()
        if self.kind == "Q8_0":
            weights = blocks[..., 2:].contiguous().view(torch.int8).float() * scales[0]
        else:
            nibbles = blocks[..., 2 * len(scales) :]
            values = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).float()
            weights = values * scales[0] + scales[1] if self.kind == "Q4_1" else (values - 8) * scales[0]
        return weights.view(self.shape)

    def look_up(self, rows: Tensor) -> Tensor:
        """The numbers of some rows, by the native code."""
        found = torch.empty(len(rows), self.shape[1])
        native.dequantize(QuantizedRows(self.kind, self.data[rows]).matrix(None), 0, found)
        return found

    def draw_blocks(self, target: Tensor, generator: torch.Generator) -> None:
        """Random values in blocks [rows, blocks, bytes] whose scales are the smallest normal float16."""
        target.random_(0, 256, generator=generator)
        target[..., : 2 * self._num_scales] = torch.tensor([0, 4] * self._num_scales, dtype=torch.uint8)

    def matrix(self, bias: Tensor | None, activation_bits: int = 32) -> native.Matrix:
        """For the native code; with 8 activation bits its products round token rows: see `round_activations`."""
        kind = {"Q8_0": native.Q8_0, "Q4_0": native.Q4_0, "Q4_1": native.Q4_1}[self.kind]
        make = native.int8_matrix if activation_bits == 8 else native.Matrix
        return make(self.data, bias, kind, self.shape[1])


def round_activations(x: Tensor) -> Tensor:
    """x [tokens, inputs] as products with 8 activation bits see it: every 32 inputs share a scale, by which the
    largest of them becomes 127 or -127, and are rounded to integers."""
    blocks = x.view(x.shape[0], -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # a number over a tensor would be rounded twice
    return ((blocks * inverse.nan_to_num(0, 0, 0)).round() * (largest / 127)).view_as(x)


class QuantizedProduct:
    """x [tokens, inputs] -> x @ weight.T + bias by the native code, for any number of token rows: a row has the same
    bits alone and among others. With 8 activation bits it is rounded first: see `round_activations`."""

    def __init__(self, rows: QuantizedRows, bias: Tensor | None, activation_bits: int = 32) -> None:
        self.rows, self.bias = rows, bias
        self.matrix = rows.matrix(bias, activation_bits)
        is_copied = self.matrix.data.data_ptr() != rows.data.data_ptr()
        self.extra_bytes = self.matrix.data.nbytes if is_copied else 0

    def __call__(self, x: Tensor) -> Tensor:
        return native.product(x, self.matrix)

    def rounding_error(self) -> float:
        """The largest error of a product with normally distributed activations, as a share of the largest result."""
        x = torch.randn(1, self.matrix.inputs, generator=torch.Generator().manual_seed(0))
        exact = native.product(x, self.rows.matrix(self.bias))
        return float((self(x) - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


@functools.cache
def kept_bits_are_fast() -> bool:
    """Whether decoding with kept bits takes no longer than with float32 weights.

    Known for x86. Elsewhere it is measured once for every build of the native kernels."""
    if not native.available() or platform.machine() in ("x86_64", "AMD64"):
        return native.available()
    return remembered("kept_bits_are_fast", _time_kept_bits)


def _time_kept_bits() -> bool:
    """Multiplies one weight larger than the caches both ways, about 0.2 s."""
    outputs, inputs = TRIAL_SHAPE
    rows = QuantizedRows("Q4_1", torch.zeros(outputs, inputs // BLOCK * BLOCK_BYTES["Q4_1"], dtype=torch.uint8))
    dense = native.Matrix(torch.ones(TRIAL_SHAPE), None, native.FLOATS, inputs)
    kept_seconds, dense_seconds = product_seconds([rows.matrix(None), dense])
    return kept_seconds <= TRIAL_MARGIN * dense_seconds


def product_seconds(matrices: Sequence[native.Matrix]) -> list[float]:
    """For each matrix the shortest of a few products with one token row, in turns, in one thread's own time: so a busy
    machine measures what a quiet one does."""
    seconds = [math.inf] * len(matrices)
    for _ in range(TRIAL_REPEATS):
        for at, matrix in enumerate(matrices):
            x, start = torch.ones(1, matrix.inputs), time.thread_time()
            native.product(x, matrix, threads=1)
            seconds[at] = min(seconds[at], time.thread_time() - start)
    return seconds
