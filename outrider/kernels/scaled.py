"""Weights stored as short codes with scales, and the product with them in plain torch, which defines what the bits
mean.

All quantised formats use this one form: codes of 8 or 4 bits, a scale for every group of neighbouring inputs of an
output, optionally a zero point or an offset for every group, and optionally a factor for every output. The loaders of
the formats convert their files to this form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.kernels.code_kinds import CODES, FP4, FP8, INT4, INT8
from outrider.kernels.reference import gelu_tanh_mul, silu_mul, widened

FP8_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the codes 0 to 7; those of 8 to 15 are negative
TILE_OUTPUTS, TILE_INPUTS = 64, 128
TILED_GROUPS = (16, 32, 64)  # short groups whose codes may lie in tiles
BLOCK = 128  # outputs and inputs of a block of fp8 that has one scale
PIECE = 64 * TILE_OUTPUTS  # outputs whose codes are put in another order at a time
MAX_NUMBERS = 1 << 22  # made of codes at a time; bounds the memory of a product


def code_dtype(code: str) -> torch.dtype:
    return {FP8: torch.float8_e4m3fn, INT8: torch.int8}.get(code, torch.uint8)


def codes_per_byte(code: str) -> int:
    return 2 if code in (INT4, FP4) else 1


@dataclass(frozen=True)
class Scaled:
    """A weight [.., outputs, inputs]: (code - zero) * scale * factor, or code * scale + offset. Two codes of 4 bits
    share a byte: the first half of a group's columns is in the low bits, the second half in the high bits. An int4 code
    is stored plus 8."""

    code: str
    group: int  # inputs that share a scale; the last group of a row of 8-bit codes may be short
    codes: Tensor  # [.., outputs, inputs], or [.., outputs, inputs / 2] bytes
    scales: Tensor  # [.., outputs, groups], any float type
    zeros: Tensor | None = None  # [.., outputs, groups] whole numbers in float16
    factors: Tensor | None = None  # [.., outputs, 1] float32
    is_tiled: bool = False  # bytes of 4-bit codes lie in tiles, see `tiled`
    blocks: Tensor | None = None  # [outputs / 128, groups], the scales again where 128 outputs share them
    offsets: Tensor | None = None  # [.., outputs, groups], any float type; such a weight has several short groups

    def __post_init__(self) -> None:
        assert self.code in CODES and self.codes.dtype == code_dtype(self.code)
        assert self.offsets is None or (self.zeros is None and self.factors is None and self.scales.shape[-1] > 1)
        assert codes_per_byte(self.code) == 1 or (self.group % 2 == 0 and self.shape[-1] % self.group == 0)

    @property
    def shape(self) -> tuple[int, ...]:
        *outputs, width = self.codes.shape
        return *outputs, width * codes_per_byte(self.code)

    def __getitem__(self, index: int | slice | Tensor) -> Scaled:
        """Index the first axis: return the weight of one expert, or of some outputs."""
        held = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "blocks"}
        parts = {name: tensor[index] for name, tensor in held.items() if isinstance(tensor, Tensor)}
        return replace(self, blocks=None, **parts)

    @property
    def shifts(self) -> Tensor | None:
        """The zero points or the offsets; a weight has at most one of the two."""
        return self.zeros if self.offsets is None else self.offsets

    @property
    def has_tiles(self) -> bool:
        """Whether the weight [outputs, inputs] divides into whole tiles in a form that some kernel reads."""
        outputs, inputs = self.shape
        if outputs % TILE_OUTPUTS or inputs % TILE_INPUTS:
            return False
        is_short = self.code in (INT4, INT8) and self.group in TILED_GROUPS and self.scales.dtype == torch.bfloat16
        return (self.code == INT4 and self.group == TILE_INPUTS) or (
            is_short and self.zeros is None and self.factors is None)

    def tiled(self, is_tiled: bool = True) -> Scaled:
        """Bring the bytes of this weight into tiled order, or back into plain order, in place. In tiled order, 64 bytes
        of each of 64 outputs are stored together, in the order in which the threads of a tensor core hold them: four
        neighbours with two columns of two outputs. Codes of 4 bits are first paired across halves of 128 columns,
        whatever the group is. A slice of whole tiles of outputs stays tiled."""
        if is_tiled == self.is_tiled:
            return self
        assert self.has_tiles
        is_repacked = self.code == INT4 and self.group != TILE_INPUTS
        for codes in self.codes.split(PIECE):
            if is_tiled:
                codes.copy_(_to_tiles(_repack(codes, self.group, TILE_INPUTS) if is_repacked else codes))
            else:
                plain = _from_tiles(codes)
                codes.copy_(_repack(plain, TILE_INPUTS, self.group) if is_repacked else plain)
        return replace(self, is_tiled=is_tiled)

    @property
    def has_blocks(self) -> bool:
        """Whether the weight [outputs, inputs] divides into whole blocks of BLOCK x BLOCK, each of which may have one
        scale."""
        return self.code == FP8 and self.group == BLOCK and not any(size % BLOCK for size in self.shape)

    def with_blocks(self) -> Scaled:
        """Return this weight with `blocks` set, if every BLOCK outputs share their scales."""
        blocks = self.scales[::BLOCK].contiguous()
        is_shared = torch.equal(blocks.repeat_interleave(BLOCK, 0), self.scales)
        return replace(self, blocks=blocks if is_shared else None)

    def numbers(self) -> Tensor:
        """Return the dequantised weight in float32."""
        assert not self.is_tiled
        if codes_per_byte(self.code) == 1:
            values = self.codes.float()
        else:
            nibbles = self.nibbles()
            values = nibbles.float() - 8 if self.code == INT4 else self._e2m1(nibbles)
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        values *= self._by_column(self.scales)
        if self.offsets is not None:
            values += self._by_column(self.offsets)
        return values if self.factors is None else values.mul_(self.factors)

    def nibbles(self) -> Tensor:
        """Unpack codes of 4 bits [.., outputs, inputs], one in each byte."""
        return unpack_nibbles(self.codes, self.group)

    def _by_column(self, of_groups: Tensor) -> Tensor:
        if of_groups.shape[-1] == 1:
            return of_groups.float()
        return of_groups.float().repeat_interleave(self.group, -1)[..., : self.shape[-1]]

    def _e2m1(self, nibbles: Tensor) -> Tensor:
        table = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=nibbles.device)
        return table[nibbles.int()]


def arrange(weight: Scaled, dtype: torch.dtype) -> Scaled:
    """Bring the weight [outputs, inputs], in place, into the order that the products for token rows of this dtype read.
    In plain torch that is the order of the files."""
    return replace(weight.tiled(False), blocks=None)


# Bits of a byte's place in a tile, from the highest: of its output (r5 .. r0) and of its place among 64 (k5 .. k0).
# k5 | r5 r4 | r2 r1 | r0 | k2 k1 | k4 k3 | r3 | k0
_TILED = (2, 4, 4, 2, 4, 4, 2, 2)
_TILE_BYTES = 64  # of an output


def _to_tiles(codes: Tensor) -> Tensor:
    """Reorder codes [outputs, bytes] of whole tiles as `Scaled.tiled` says."""
    split = codes.view(-1, 4, 2, 4, 2, codes.shape[1] // _TILE_BYTES, 2, 4, 4, 2)  # r54 r3 r21 r0, k5 k43 k21 k0
    return split.permute(0, 5, 6, 1, 3, 4, 8, 7, 2, 9).reshape(codes.shape)


def _from_tiles(codes: Tensor) -> Tensor:
    tiles = codes.view(-1, codes.shape[1] // _TILE_BYTES, *_TILED)
    return tiles.permute(0, 3, 8, 4, 5, 1, 2, 7, 6, 9).reshape(codes.shape)


def _repack(codes: Tensor, group: int, other: int) -> Tensor:
    """Pack codes of 4 bits in another order: in groups of `other` inputs instead of `group`."""
    return pack_nibbles(unpack_nibbles(codes, group), other)


def unpack_nibbles(codes: Tensor, group: int) -> Tensor:
    """Unpack bytes [.., inputs / 2], in the order of `Scaled`, to codes of 4 bits [.., inputs], one in each byte."""
    pairs = codes.unflatten(-1, (-1, group // 2))
    return torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def pack_nibbles(nibbles: Tensor, group: int) -> Tensor:
    """Pack codes of 4 bits [.., inputs] into bytes [.., inputs / 2], in the order of `Scaled`."""
    low, high = nibbles.to(torch.uint8).unflatten(-1, (-1, 2, group // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def scaled_rows(weight: Scaled, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise some outputs of a weight [outputs, inputs]: [index, inputs]."""
    if weight.is_tiled:
        weight = replace(weight, codes=weight.codes.clone()).tiled(False)
    return weight[index].numbers().to(dtype)


class Rounded(NamedTuple):
    """Token rows rounded to fp8: e4m3 codes [tokens, inputs] and float32 scales [tokens, groups]."""

    codes: Tensor
    scales: Tensor


def round_to_fp8(x: Tensor, group: int) -> Rounded:
    """Round x [tokens, inputs] to e4m3 codes with float32 scales [tokens, groups]: the scale of every `group`
    neighbouring inputs of a token row makes the largest of them 448. A scale depends on no other token row. Numbers are
    multiplied by the scale's reciprocal, because dividing each takes longer than reading it."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    largest = padded.abs().amax(-1).clamp_min(1e-12)
    codes = (padded * (FP8_MAX / largest)[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Rounded(codes.flatten(1)[:, : x.shape[1]], largest / FP8_MAX)


def rounded(x: Tensor, group: int) -> Tensor:
    """Round as `round_to_fp8` does, and return the rounded numbers in float32."""
    return Scaled(FP8, group, *round_to_fp8(x, group)).numbers()


def scaled_wide(x: Tensor, weight: Scaled, rounding: int = 0) -> Tensor:
    """Multiply x [tokens, inputs] with the weight [outputs, inputs]: [tokens, outputs] in float32 or float64. rounding:
    the token rows are first rounded to fp8 in groups of this many inputs; 0 leaves them as they are."""
    wide = widened(x) if rounding == 0 else rounded(x, rounding)
    outputs, inputs = weight.shape
    step = max(1, MAX_NUMBERS // inputs)
    out = torch.empty(x.shape[0], outputs, dtype=wide.dtype, device=x.device)
    for first in range(0, outputs, step):
        torch.mm(wide, weight[first : first + step].numbers().to(wide.dtype).T, out=out[:, first : first + step])
    return out


def scaled_linear(x: Tensor, weight: Scaled, bias: Tensor | None = None, rounding: int = 0) -> Tensor:
    """Return the product of `scaled_wide` plus the bias [outputs], in the dtype of x."""
    out = scaled_wide(x, weight, rounding)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def scaled_gated(x: Tensor, weight: Scaled, bias: Tensor | None, rounding: int, activation: str) -> Tensor:
    """Return act(gate) * up, where the first half of the product's outputs is the gate and the second half is up."""
    out = scaled_linear(x, weight, bias, rounding)
    return silu_mul(out) if activation == "silu" else gelu_tanh_mul(out)


# Codes of a weight of numbers


def by_outputs(make: Callable[[Tensor], Scaled], weight: Tensor) -> Scaled:
    """Convert a weight [outputs, ..] to codes with `make`, some outputs at a time, because the float32 numbers of a
    large matrix and of its errors would take several times the memory of its codes."""
    pieces = weight.split(max(1, MAX_NUMBERS // weight.shape[1]))
    first = make(pieces[0])
    if len(pieces) == 1:
        return first
    outputs, offsets = weight.shape[0], first.offsets
    whole = replace(first, codes=first.codes.new_empty(outputs, first.codes.shape[1]),
                    scales=first.scales.new_empty(outputs, first.scales.shape[1]),
                    offsets=None if offsets is None else offsets.new_empty(outputs, offsets.shape[1]))
    start = 0
    for piece in pieces:
        made, part = make(piece), whole[start : start + len(piece)]
        part.codes.copy_(made.codes)
        part.scales.copy_(made.scales)
        if part.offsets is not None and made.offsets is not None:
            part.offsets.copy_(made.offsets)
        start += len(piece)
    return whole


def to_fp8_rows(weight: Tensor) -> Scaled:
    """Convert a weight [outputs, inputs] to fp8 with a scale for every output."""
    codes, scales = round_to_fp8(weight, weight.shape[1])
    return Scaled(FP8, weight.shape[1], codes, scales)


def to_int8_groups(weight: Tensor, group: int) -> Scaled:
    """Convert a weight [outputs, inputs] to int8 with a bfloat16 scale for every `group` inputs of an output. The scale
    turns the number of largest magnitude in its group into 127 or -127."""
    numbers = weight.float().unflatten(1, (-1, group))
    scales = (numbers.abs().amax(-1, keepdim=True) / 127).bfloat16()
    codes = (numbers / scales.float()).nan_to_num_(0, 0, 0).round_().clamp_(-127, 127).to(torch.int8)
    return Scaled(INT8, group, codes.flatten(1), scales.squeeze(-1))


def to_int4_groups(weight: Tensor, group: int, has_offsets: bool = False) -> Scaled:
    """Convert a weight [outputs, inputs] to int4 with a bfloat16 scale for every group, and optionally an offset.

    Several ranges of codes are tried, each of which clips more of a group's extremes than the one before. The codes of
    each range get the scale and offset with the least squared error, and the group takes the range whose error is
    smallest. The error of a number is weighted by its size plus the group's root mean square, so that a few large
    numbers are not given up for many small ones. Groups with numbers that are not finite get a scale of NaN.
    """
    numbers = weight.float().unflatten(1, (-1, group))
    low, high = torch.aminmax(numbers, dim=-1, keepdim=True)
    # 16 codes reach from -8 to 7 steps: around the middle of the group, or with -8 at its extreme.
    middle = (low + high) / 2 if has_offsets else torch.zeros_like(low)
    widest = (high - low) / 15 if has_offsets else torch.where(high > -low, high, low) / -8
    numbers = numbers - middle
    importance = numbers.abs() + numbers.square().mean(-1, keepdim=True).sqrt()
    scale, offset, least = torch.zeros_like(low), middle, torch.full_like(low, torch.inf)
    for kept in (1.0, 0.9, 0.8, 0.7):
        step = widest * kept
        codes = _int4(numbers - step / 2 if has_offsets else numbers, step)
        fit, shift, error = _fit_codes(codes, numbers, importance, middle, has_offsets)
        is_worse = error >= least
        scale, offset = torch.where(is_worse, scale, fit), torch.where(is_worse, offset, shift)
        least = torch.where(is_worse, least, error)
    codes = pack_nibbles((_int4(numbers - (offset - middle), scale) + 8).flatten(1), group)
    return Scaled(INT4, group, codes, scale.squeeze(-1).bfloat16(),
                  offsets=offset.squeeze(-1).bfloat16() if has_offsets else None)


def _fit_codes(
    codes: Tensor, numbers: Tensor, importance: Tensor, middle: Tensor, has_offsets: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scale, offset, error) of each group: the scale and offset with the least squared error for these codes,
    rounded to bfloat16, and that error minus the sum of the numbers' squares. The offset includes `middle`, which was
    subtracted from `numbers`."""

    def total(values: Tensor) -> Tensor:
        return values.sum(-1, keepdim=True)

    least = torch.finfo(torch.float32).tiny  # groups whose numbers are all equal get a scale of 0
    weighted = importance * codes
    qq, qx = total(weighted * codes), total(weighted * numbers)
    if not has_offsets:
        scale = (qx / qq.clamp_min(least)).bfloat16().float()
        return scale, middle, scale * (scale * qq - 2 * qx)
    one, q, x = total(importance), total(weighted), total(importance * numbers)
    scale = (one * qx - q * x) / (one * qq - q * q).clamp_min(least)
    offset = (middle + (x - scale * q) / one.clamp_min(least)).bfloat16().float()
    scale, shift = scale.bfloat16().float(), offset - middle
    return scale, offset, scale * (scale * qq - 2 * qx) + shift * (shift * one + 2 * (scale * q - x))


def _int4(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).nan_to_num_(0, 0, 0).round_().clamp_(-8, 7)
