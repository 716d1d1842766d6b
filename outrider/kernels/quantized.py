"""Weights in the quantised bits of a GGUF file: as they are in the file, and packed for products on the CPU.

Such a weight stands for the float32 numbers that dequantising it gives. Packed weights stand for the same numbers in
about as many bytes (`cpu/packed.c`). This file knows GGUF's kinds of weights, not its files.
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

from outrider.kernels import cpu as native
from outrider.kernels.buffers import empty_weight
from outrider.kernels.cpu.measured import remembered
from outrider.kernels.cpu.packed import PackedMatrix, PackedRows, packed_shape
from outrider.kernels.gguf_kinds import GROUP, KINDS

EXPONENT_BITS = 0x7C00  # exponent of a float16; with all bits set it is an infinity or NaN
DUMMY_SCALE = 2.0**-14  # of random weights
TRIAL_SHAPE = (8192, 2048)  # shape of the weight whose products are timed: 64 MB in float32, more than a cache holds
TRIAL_REPEATS = 5
TRIAL_MARGIN = 1.25  # by which one thread may be slower with kept bits: several threads share what memory delivers
ACTIVATION_BITS = 16  # to which products with weights of few bits round token rows unless asked otherwise
ERROR_ROWS = 8  # token rows whose products tell how much rounding activations costs


@dataclass(frozen=True)
class QuantizedRows:
    """A weight [outputs, inputs] as the file has it: `data` [outputs, bytes of a row]."""

    kind: str
    data: Tensor

    def __post_init__(self) -> None:
        assert self.data.dtype is torch.uint8 and self.data.is_contiguous()
        assert self.data.shape[1] % KINDS[self.kind].block_bytes == 0, "rows are whole blocks"

    @property
    def shape(self) -> tuple[int, int]:
        kind = KINDS[self.kind]
        return self.data.shape[0], self.data.shape[1] // kind.block_bytes * kind.block

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.blocks()}

    def blocks(self) -> Tensor:
        """The bytes of each block: [outputs, blocks of a row, bytes of a block]."""
        return self.data.view(self.data.shape[0], -1, KINDS[self.kind].block_bytes)

    def is_finite(self) -> bool:
        """Whether all scales are finite: none of these float16 numbers is infinite or NaN."""
        halves = ((self.blocks()[..., at + 1].numpy() & (EXPONENT_BITS >> 8)) for at in KINDS[self.kind].halves)
        return all(int(half.max(initial=0)) < EXPONENT_BITS >> 8 for half in halves)

    def dequantize(self) -> Tensor:
        """Return the weight [outputs, inputs] in float32."""
        return KINDS[self.kind].dequantize(self.blocks())

    def pack(self) -> PackedRows:
        packed = empty_rows(self.kind, *self.shape, torch.device("cpu"))
        native.pack_blocks(self.kind, self.blocks(), packed)
        return packed


@dataclass(frozen=True)
class TransposedRows(QuantizedRows):
    """A weight whose input features are heads that the file stores transposed: [heads of a group, groups, size]. A
    block may hold parts of several heads, so the weight is dequantised before it is brought into the model's order."""

    groups: int
    heads: int
    size: int

    def dequantize(self) -> Tensor:
        return grouped_heads(super().dequantize(), self.groups, self.heads, self.size)


def grouped_heads(weight: Tensor, groups: int, heads: int, size: int) -> Tensor:
    """Reorder the last axis from heads * groups * size to groups * heads * size."""
    return weight.unflatten(-1, (heads, groups, size)).transpose(-3, -2).flatten(-3)


def empty_rows(name: str, outputs: int, inputs: int, device: torch.device) -> PackedRows:
    """Allocate packed rows of a kind; `device` may be torch's meta device."""
    kind = KINDS[name]
    data = empty_weight(*packed_shape(kind.form, outputs, inputs, kind.block), dtype=torch.uint8, device=device)
    table = None if kind.table is None else torch.tensor(kind.table, dtype=torch.int8)
    return PackedRows(kind.form, table, data, outputs, inputs)


def draw_rows(name: str, target: Tensor, generator: torch.Generator) -> None:
    """Fill packed rows with random codes and small scales (dummy weights)."""
    numbers = 2 if len(KINDS[name].halves) == 2 else 1
    target.random_(0, 256, generator=generator)
    heads = target.view(*target.shape[:2], -1)[..., : 4 * numbers * native.packed_lanes()]
    heads.copy_(torch.tensor([DUMMY_SCALE]).view(torch.uint8).repeat(heads.shape[-1] // 4))


def round_activations(x: Tensor, bits: int = 8) -> Tensor:
    """Round x [tokens, inputs] as products with 8 or 16 activation bits round it. Every 32 inputs share a scale that
    makes the largest of them 127 or -127, and each input is rounded to an integer. With 16 bits the remainder is
    rounded too, to a multiple of 1/254."""
    blocks = x.view(x.shape[0], -1, GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # a number over a tensor would be rounded twice
    rest = blocks * inverse.nan_to_num(0, 0, 0)
    found = torch.zeros_like(blocks, dtype=torch.float64)
    for digit in range(bits // 8):
        whole = rest.round()
        found += whole.double() / 254**digit
        rest = (rest - whole) * 254
    return (found * (largest / 127)).to(x.dtype).view_as(x)


def rounding_error(parts: Sequence[PackedRows], bias: Tensor | None, bits: int) -> float:
    """Measure the error of products whose activations, normally distributed, are rounded to this many bits. Returns the
    largest error as a share of the largest result. Several token rows are used, because the one result of a single row
    and output could be near 0 by chance."""
    if bits == 24:
        return 0.0
    x = torch.randn(ERROR_ROWS, parts[0].inputs, generator=torch.Generator().manual_seed(0))
    rounded, close = (native.product(x, PackedMatrix(parts, bias, digits)) for digits in (bits, 24))
    return float((rounded - close).abs().max() / close.abs().max().clamp_min(1e-30))


@functools.cache
def kept_bits_are_fast() -> bool:
    """Whether decoding with quantised weights takes no longer than with float32 weights.

    The answer is known for x86. On other processors it is measured once for every build of the native kernels.
    """
    if not native.available() or platform.machine() in ("x86_64", "AMD64"):
        return native.available()
    return remembered("kept_bits_are_fast", _time_kept_bits)


def _time_kept_bits() -> bool:
    """Time products with one weight, larger than the caches, in quantised and in float32 form. Takes about 0.2 s."""
    outputs, inputs = TRIAL_SHAPE
    packed = empty_rows("Q4_1", outputs, inputs, torch.device("cpu"))
    packed.data.zero_()
    dense = native.Matrix(torch.ones(TRIAL_SHAPE), None, native.FLOATS, inputs)
    kept_seconds, dense_seconds = product_seconds([PackedMatrix([packed], None, ACTIVATION_BITS), dense])
    return kept_seconds <= TRIAL_MARGIN * dense_seconds


def product_seconds(matrices: Sequence[native.Matrix]) -> list[float]:
    """Measure the product of each matrix with one token row, and return the seconds of its fastest run; the matrices
    take turns. Only this thread's CPU time counts, so a busy machine measures the same as a quiet one."""
    seconds = [math.inf] * len(matrices)
    for _ in range(TRIAL_REPEATS):
        for at, matrix in enumerate(matrices):
            x, start = torch.ones(1, matrix.inputs), time.thread_time()
            native.product(x, matrix, threads=1)
            seconds[at] = min(seconds[at], time.thread_time() - start)
    return seconds
