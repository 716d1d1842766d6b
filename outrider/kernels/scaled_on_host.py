"""Weights of codes with scales, prepared for the native products of a CPU. `kernels.scaled` says what the bits mean.

Fp8 codes are multiplied where they are, with the same bits as a product with their float32 numbers. Integers and 4-bit
floats are copied into the packed forms of GGUF weights; 4-bit floats in groups of 16 inputs are copied as fp8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels import cpu as native
from outrider.kernels.code_kinds import FP4, FP8, INT4, INT8
from outrider.kernels.gguf_kinds import GROUP, Unpacked
from outrider.kernels.quantized import empty_rows, kept_bits_are_fast
from outrider.kernels.scaled import E2M1, Scaled

# By code and whether there are zero points or offsets: the GGUF kind whose packed form holds such codes.
PACKED_KINDS = {(INT8, False): "Q8_0", (INT4, False): "Q4_0", (INT4, True): "Q4_1", (FP4, False): "MXFP4"}
PACKED_AT_ONCE = 1 << 24  # weights that are unpacked into bytes at a time while they are packed


class HostWeight(NamedTuple):
    """A weight as native products read it."""

    matrix: native.Matrix
    rows: native.PackedRows | None  # the packed codes, whose products round token rows
    copied_bytes: int  # memory beside that of the weight itself


def host_weight(weight: Scaled, bias: Tensor | None, allow_copy: bool, activation_bits: int = 24) -> HostWeight | None:
    """Prepare the weight [outputs, inputs] for native products with float32 token rows. Returns None if no native
    product reads its codes."""
    scales = weight.scales.float() if weight.factors is None else weight.scales.float() * weight.factors
    if weight.code == FP8:
        matrix = native.fp8_matrix(weight.codes, scales, weight.group, bias) if weight.zeros is None else None
        return None if matrix is None else HostWeight(matrix, None, scales.nbytes)
    rows = packed_rows(weight) if allow_copy and kept_bits_are_fast() else None
    if rows is not None:
        return HostWeight(native.PackedMatrix([rows], bias, activation_bits), rows, rows.data.nbytes)
    if weight.code == FP4 and allow_copy:
        codes = torch.tensor((*E2M1, *(-value for value in E2M1))).to(torch.float8_e4m3fn).view(torch.uint8)
        wide = codes[weight.nibbles().int()].view(torch.float8_e4m3fn)
        matrix = native.fp8_matrix(wide, scales, weight.group, bias)
        return None if matrix is None else HostWeight(matrix, None, wide.nbytes + scales.nbytes)
    return None


def packed_rows(weight: Scaled) -> native.PackedRows | None:
    """Copy a weight of integers or 4-bit floats into a packed form of cpu/packed.c. Returns None for other codes, and
    if the groups are not whole blocks of 32 inputs."""
    outputs, inputs = weight.shape
    kind = PACKED_KINDS.get((weight.code, weight.shifts is not None))
    if kind is None or not native.available() or weight.group % GROUP or inputs % GROUP:
        return None
    packed, lanes = empty_rows(kind, outputs, inputs, torch.device("cpu")), native.packed_lanes()
    step = max(1, PACKED_AT_ONCE // (lanes * inputs))
    for first in range(0, len(packed.data), step):
        rows = weight[first * lanes : (first + step) * lanes]
        native.pack_rows(*_unpacked(rows), packed.form, packed.data[first : first + step])
    return packed


def _unpacked(weight: Scaled) -> Unpacked:
    """Take some weight rows apart into codes and scales, with a scale for every 32 inputs."""
    codes = weight.codes.view(torch.uint8) if weight.code == INT8 else weight.nibbles()
    scales = weight.scales.float() if weight.factors is None else weight.scales.float() * weight.factors
    least = None  # the number of code 0, of integers that are stored plus 8
    if weight.zeros is not None:
        least = -(weight.zeros.float() + 8) * scales
    elif weight.offsets is not None:
        least = weight.offsets.float() - 8 * scales
    blocks = weight.shape[-1] // GROUP

    def of_blocks(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(weight.group // GROUP, -1)[:, :blocks]

    # The table of 4-bit floats holds twice their values.
    scale = of_blocks(scales / 2 if weight.code == FP4 else scales)
    return Unpacked(codes, scale, None if least is None else of_blocks(least))
