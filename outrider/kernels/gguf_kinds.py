"""GGUF's kinds of quantised weights: how the bytes of a block become codes and scales. Each kind is one declaration.

A weight is scale * (code - offset) + least; the codes of some kinds are indices into a table. In kinds with blocks of
256 weights, the block's scale is multiplied by one integer for every 32 or 16 weights, and so is `least`. These are
plain torch operations, which define what the bits mean; `cpu/packed_blocks.c` reads the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # weights of a row that are packed together


class Unpacked(NamedTuple):
    """Weight rows [rows, inputs] taken apart into codes and scales. `inner_scale` and `inner_least` are the integers
    within each block, or None."""

    codes: Tensor  # uint8 [rows, inputs]
    scale: Tensor  # float32 [rows, blocks]
    least: Tensor | None = None  # likewise
    inner_scale: Tensor | None = None  # int8 [rows, blocks, 8 or 16]
    inner_least: Tensor | None = None


@dataclass(frozen=True)
class GgufKind:
    block: int  # weights of a block
    block_bytes: int
    form: int  # in which cpu/packed.c keeps it
    halves: tuple[int, ...]  # bytes of a block at which numbers in float16 begin
    unpack: Callable[[Tensor], Unpacked]  # blocks uint8 [rows, blocks, block_bytes] -> parts
    offset: int = 0
    table: tuple[int, ...] | None = None

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Dequantise blocks to float32 numbers [rows, inputs]."""
        parts = self.unpack(blocks)
        codes = parts.codes.view(torch.int8).float() - self.offset
        if self.table is not None:
            codes = torch.tensor(self.table, dtype=torch.float32)[parts.codes.int()]
        weights = codes * _of_each_weight(parts.scale, parts.inner_scale, codes.shape[1])
        if parts.least is not None:
            weights += _of_each_weight(parts.least, parts.inner_least, codes.shape[1])
        return weights


def _of_each_weight(outer: Tensor, inner: Tensor | None, width: int) -> Tensor:
    numbers = outer if inner is None else (outer.unsqueeze(-1) * inner).flatten(1)
    return numbers.repeat_interleave(width // numbers.shape[1], 1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 that begins at this byte of each block, as float32 [rows, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _bits(packed: Tensor, size: int) -> Tensor:
    """Unpack numbers of `size` bits from bytes [.., n]: [.., 8 / size, n], the lowest bits first."""
    shifts = torch.arange(0, 8, size, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    return (packed.unsqueeze(-2) >> shifts) & ((1 << size) - 1)


def _in_rows(codes: Tensor) -> Tensor:
    return codes.flatten(1)


def _flat(least_at: int | None, ones_at: int | None, nibbles_at: int) -> Callable[[Tensor], Unpacked]:
    """Declare a kind with blocks of 32 weights: a scale, an optional minimum, an optional fifth bit for each weight,
    and 16 bytes with the lower four bits of both halves of the block."""

    def unpack(blocks: Tensor) -> Unpacked:
        codes = _bits(blocks[..., nibbles_at : nibbles_at + 16], 4).flatten(-2)
        if ones_at is not None:
            codes = codes | _bits(blocks[..., ones_at : ones_at + 4], 1).transpose(-1, -2).flatten(-2) << 4
        return Unpacked(_in_rows(codes), _half(blocks, 0), None if least_at is None else _half(blocks, least_at))

    return unpack


def _unpack_q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_in_rows(blocks[..., 2:]), _half(blocks, 0))


def _unpack_mxfp4(blocks: Tensor) -> Unpacked:
    """Unpack MXFP4. The scale is a power of two, given by its exponent. Half of it is used, because the table holds
    twice the values."""
    scale = torch.exp2(blocks[..., 0].double() - 128).float()
    return Unpacked(_in_rows(_bits(blocks[..., 1:], 4)), scale)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the scales and minimums of eight groups, six bits each, from 12 bytes."""
    first, second, third = packed.split(4, -1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scale.view(torch.int8), least.view(torch.int8)


def _unpack_q4_k(blocks: Tensor) -> Unpacked:
    codes = _bits(blocks[..., 16:].unflatten(-1, (4, 32)), 4)
    scale, least = _six_bit_pairs(blocks[..., 4:16])
    return Unpacked(_in_rows(codes), _half(blocks, 0), -_half(blocks, 2), scale, least)


def _unpack_q5_k(blocks: Tensor) -> Unpacked:
    codes = _bits(blocks[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-3, -2) | _bits(blocks[..., 16:48], 1) << 4
    scale, least = _six_bit_pairs(blocks[..., 4:16])
    return Unpacked(_in_rows(codes), _half(blocks, 0), -_half(blocks, 2), scale, least)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    low = _bits(blocks[..., :128].unflatten(-1, (2, 64)), 4).unflatten(-1, (2, 32)).flatten(-3, -2)
    codes = low | _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2) << 4
    return Unpacked(_in_rows(codes), _half(blocks, 208), inner_scale=blocks[..., 192:208].view(torch.int8))


def _unpack_q3_k(blocks: Tensor) -> Unpacked:
    low = _bits(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3, -2)
    codes = low | _bits(blocks[..., :32], 1) << 2
    scale = _bits(blocks[..., 96:104], 4).flatten(-2) | _bits(blocks[..., 104:108], 2).flatten(-2) << 4
    return Unpacked(_in_rows(codes), _half(blocks, 108), inner_scale=scale.view(torch.int8) - 32)


def _unpack_q2_k(blocks: Tensor) -> Unpacked:
    codes = _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    scale, least = ((blocks[..., :16] >> shift & 15).view(torch.int8) for shift in (0, 4))
    return Unpacked(_in_rows(codes), _half(blocks, 80), -_half(blocks, 82), scale, least)


def _unpack_iq4_xs(blocks: Tensor) -> Unpacked:
    codes = _bits(blocks[..., 8:].unflatten(-1, (8, 16)), 4)
    low, high = (_bits(blocks[..., first:stop], size).transpose(-1, -2).flatten(-2)
                 for first, stop, size in ((4, 8, 4), (2, 4, 2)))
    return Unpacked(_in_rows(codes), _half(blocks, 0), inner_scale=(low | high << 4).view(torch.int8) - 32)


# Numbers of the forms in native.h.
(PACKED_8, PACKED_TABLE, PACKED_4, PACKED_4_LEAST, PACKED_5, PACKED_5_LEAST, NESTED_TABLE, NESTED_4_LEAST,
 NESTED_5_LEAST, NESTED_6_HALVES, NESTED_3_HALVES, NESTED_2_LEAST_HALVES) = range(12)
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the 4-bit floats

# packed_blocks.c numbers the kinds in this order.
KINDS = {
    "Q8_0": GgufKind(32, 34, PACKED_8, (0,), _unpack_q8_0),
    "Q4_0": GgufKind(32, 18, PACKED_4, (0,), _flat(None, None, 2), offset=8),
    "Q4_1": GgufKind(32, 20, PACKED_4_LEAST, (0, 2), _flat(2, None, 4)),
    "Q5_0": GgufKind(32, 22, PACKED_5, (0,), _flat(None, 2, 6), offset=16),
    "Q5_1": GgufKind(32, 24, PACKED_5_LEAST, (0, 2), _flat(2, 4, 8)),
    "IQ4_NL": GgufKind(32, 18, PACKED_TABLE, (0,), _flat(None, None, 2), table=_UNEVEN),
    "MXFP4": GgufKind(32, 17, PACKED_TABLE, (), _unpack_mxfp4, table=_FLOATS),
    "Q2_K": GgufKind(256, 84, NESTED_2_LEAST_HALVES, (80, 82), _unpack_q2_k),
    "Q3_K": GgufKind(256, 110, NESTED_3_HALVES, (108,), _unpack_q3_k, offset=4),
    "Q4_K": GgufKind(256, 144, NESTED_4_LEAST, (0, 2), _unpack_q4_k),
    "Q5_K": GgufKind(256, 176, NESTED_5_LEAST, (0, 2), _unpack_q5_k),
    "Q6_K": GgufKind(256, 210, NESTED_6_HALVES, (208,), _unpack_q6_k, offset=32),
    "IQ4_XS": GgufKind(256, 136, NESTED_TABLE, (0,), _unpack_iq4_xs, table=_UNEVEN),
}
