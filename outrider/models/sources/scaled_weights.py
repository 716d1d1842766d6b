"""Converts the tensors of a quantised matrix to `kernels.scaled.Scaled`, the form in which all models keep codes with
scales."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from outrider.formats.scaled import ScaledWeight
from outrider.kernels.code_kinds import FP4, FP8, INT4, INT8
from outrider.kernels.scaled import Scaled, pack_nibbles
from outrider.models.sources.model_source import WeightError

EXPONENTS = torch.uint8, torch.float8_e8m0fnu  # scales that are powers of two
AGAIN = "fetch the files again, or quantise the model again"
BFLOAT16_FRACTION = 7  # bits below the exponent


def fp8_weight(name: str, codes: torch.Tensor, scales: torch.Tensor, group: int = 0, block: int = 1) -> ScaledWeight:
    """Make an fp8 matrix. codes: [outputs, inputs] in e4m3. scales: one for the whole matrix, one for each output, or
    [outputs / block, inputs / group], where the last block of either axis may be short. For a joint tensor of all
    experts both have a leading axis of experts."""
    require(name, "weight", codes, torch.float8_e4m3fn, dims=(2, 3))
    spread_scales = spread_of_each(name, scales, codes.shape, group, block)
    return ScaledWeight(Scaled(FP8, group or codes.shape[-1], codes, spread_scales))


def spread_of_each(name: str, scales: torch.Tensor, shape: Sequence[int], group: int = 0,
                   block: int = 1) -> torch.Tensor:
    """Call `spread` for a matrix, or for each expert's matrix if `shape` has an axis of experts."""
    *experts, outputs, inputs = shape
    if not experts:
        return spread(name, scales, outputs, inputs, group, block)
    if scales.shape[:1] != (*experts,):
        raise WeightError(f"the scales of {name} have shape {list(scales.shape)}; the weight holds {experts[0]} "
                          f"experts, so the first size must be {experts[0]}: {AGAIN}")
    return torch.stack([spread(name, own, outputs, inputs, group, block) for own in scales])


def spread(
    name: str, scales: torch.Tensor, outputs: int, inputs: int, group: int = 0, block: int = 1
) -> torch.Tensor:
    """Repeat scales to [outputs, groups], in float32 unless they are e4m3. Scales that are powers of two may be given
    as bytes of exponents."""
    scales = from_exponents(scales) if scales.dtype in EXPONENTS else scales
    if not scales.is_floating_point():
        raise WeightError(f"the scales of {name} have dtype {scales.dtype}, and a float type is needed: {AGAIN}")
    scales = scales if scales.dtype == torch.float8_e4m3fn or block == 0 else scales.float()
    groups = -(-inputs // group) if group else 1
    if not group and scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1)
    rows = -(-outputs // max(block, 1))
    if tuple(scales.shape) != (rows, groups) and not (groups == 1 and tuple(scales.shape) == (rows,)):
        raise WeightError(f"the scales of {name} have shape {list(scales.shape)}, and a matrix of {outputs} x {inputs} "
                          f"needs {[rows, groups]}: {AGAIN}")
    scales = scales.view(rows, groups)
    return scales if rows == outputs else scales.repeat_interleave(block, 0)[:outputs]


def from_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two from bytes (E8M0), in bfloat16, which represents them exactly."""
    bytes_ = exponents.view(torch.uint8)
    if bool((bytes_ == 255).any()):
        raise WeightError(f"a scale (of type E8M0) is NaN: {AGAIN}")
    bits = torch.where(bytes_ == 0, 1 << BFLOAT16_FRACTION - 1, bytes_.short() << BFLOAT16_FRACTION)
    return bits.short().view(torch.bfloat16)


def int8_weight(name: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> ScaledWeight:
    """Make an int8 matrix. codes: [outputs, inputs], with scales and zero points for each output or for the whole
    matrix. A joint tensor of all experts is read as in `fp8_weight`."""
    require(name, "weight", codes, torch.int8, dims=(2, 3))
    offsets = None if zeros is None else spread_of_each(name, zeros.float(), codes.shape).half()
    return ScaledWeight(Scaled(INT8, codes.shape[-1], codes, spread_of_each(name, scales, codes.shape), offsets))


def integer_groups(name: str, values: torch.Tensor, bits: int, group: int, scales: torch.Tensor,
                   zeros: torch.Tensor | None) -> Scaled:
    """Make a matrix of integers in groups. values: [outputs, inputs], integers from 0 on, of 4 or 8 bits. zeros:
    [outputs, groups]; None means the middle of the range. If the last group of 4-bit codes is short, the result has
    8-bit codes and will be dequantised, because formats store only whole groups of 4-bit codes."""
    outputs, inputs = values.shape
    middle, width = 1 << bits - 1, group or inputs
    require_groups(name, "zero points", zeros, outputs, -(-inputs // width))
    offsets = None if zeros is None else (zeros - middle).half()
    scales = spread(name, scales, outputs, inputs, group)
    if bits == 4 and inputs % width == 0 and width % 2 == 0:
        return Scaled(INT4, width, pack_nibbles(values, width), scales, offsets)
    return Scaled(INT8, width, (values - middle).to(torch.int8), scales, offsets)


def require_groups(name: str, what: str, tensor: torch.Tensor | None, outputs: int, groups: int) -> None:
    if tensor is not None and tuple(tensor.shape) != (outputs, groups):
        raise WeightError(f"the {what} of {name} have shape {list(tensor.shape)}, and {[outputs, groups]} is needed: "
                          f"{AGAIN}")


def order_by_groups(name: str, groups: torch.Tensor, inputs: int, width: int) -> torch.Tensor:
    """The file's columns in the order of their groups. groups: [inputs], the group of each input. All groups but the
    last must have `width` inputs."""
    order = groups.argsort(stable=True)
    if tuple(groups.shape) != (inputs,) or not torch.equal(groups[order].long(), torch.arange(inputs) // width):
        raise WeightError(f"the indices of groups of {name} (g_idx, shape {list(groups.shape)}) do not give each of "
                          f"its {inputs} inputs to one group of {width}: {AGAIN}")
    return order


def unpack(name: str, words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Unpack unsigned integers of this many bits from int32 words along an axis, the lowest bits first."""
    require(name, "packed tensor", words, torch.int32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words.movedim(axis, -1).unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
    return values.to(torch.int16).flatten(-2).movedim(-1, axis)


def fp4_weight(name: str, packed: torch.Tensor, scales: torch.Tensor, group: int,
               factor: torch.Tensor | None = None) -> ScaledWeight:
    """Make a 4-bit float matrix. packed: [.., outputs, inputs / 2] bytes, the even column in the low bits; scales: [..,
    outputs, inputs / group]; factor: multiplies the whole matrix."""
    require(name, "packed weight", packed, torch.uint8, dims=(2, 3))
    *outputs, width = packed.shape
    if tuple(scales.shape) != (*outputs, 2 * width // group) or 2 * width % group:
        raise WeightError(f"the scales of {name} have shape {list(scales.shape)}, and codes of {[*outputs, 2 * width]} "
                          f"need {[*outputs, 2 * width // group]}: {AGAIN}")
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    if factor is not None and not (factor.numel() == 1 and factor.is_floating_point() and 0 < factor < torch.inf):
        raise WeightError(f"the factor of {name} must be one number above 0, got {factor.flatten()[:4].tolist()} in "
                          f"{factor.dtype}: {AGAIN}")
    if scales.dtype not in (torch.float8_e4m3fn, *EXPONENTS):
        raise WeightError(f"the scales of {name} have dtype {scales.dtype}, and its quantization_config needs "
                          f"{torch.float8_e4m3fn} or powers of two (E8M0): {AGAIN}")
    factors = None if factor is None else factor.float().reshape(1, 1).expand(outputs[-1], 1)
    scales = scales if scales.dtype == torch.float8_e4m3fn else from_exponents(scales)
    return ScaledWeight(Scaled(FP4, group, pack_nibbles(nibbles, group), scales, factors=factors))


def require(name: str, what: str, tensor: torch.Tensor, dtype: torch.dtype, dims: Collection[int] = (2,)) -> None:
    if tensor.dtype != dtype or tensor.dim() not in dims:
        raise WeightError(f"the {what} of {name} has dtype {tensor.dtype} and shape {list(tensor.shape)}, and its "
                          f"quantization_config needs a matrix of {dtype}: {AGAIN}")
