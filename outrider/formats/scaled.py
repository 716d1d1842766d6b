"""ScaledLinear and ScaledExperts: weights kept as codes of 8 or 4 bits with scales (fp8, int8, int4, fp4).

Sources convert the many encodings of files to one, `kernels.scaled.Scaled`, which defines the meaning of codes and
scales. Only codes and scales are allocated. Where a file asks for it, products on a GPU round each token row to fp8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from outrider.formats.declared import ExpertsDeclaration, InputShard, LinearDeclaration, StoredFormat, StoredTensor
from outrider.formats.experts import ExpertsFormat
from outrider.formats.linear_format import EmbeddingFormat, LinearFormat, NativeProduct, activate
from outrider.formats.slots import DUMMY_RANGE, Draw, Recode
from outrider.kernels import cpu as native
from outrider.kernels import moe, ops, scaled
from outrider.kernels.buffers import empty_weight
from outrider.kernels.code_kinds import FP8, INT4, INT8
from outrider.kernels.experts_on_host import native_experts
from outrider.kernels.quantized import ACTIVATION_BITS, kept_bits_are_fast, rounding_error
from outrider.kernels.scaled import Scaled
from outrider.kernels.scaled_on_host import host_weight, packed_rows

INT4_GROUPS = (128, 64, 32)  # inputs that may share a scale, the best first
# Linear layers with fewer numbers have short groups with offsets in int4, and with fewer still they are coded in int8:
# their bytes count little, and models that consist of them are sensitive.
FEWEST_NUMBERS_IN_LONG_GROUPS, FEWEST_NUMBERS_IN_INT4, SHORT_GROUP = 1 << 24, 1 << 20, 32
# Linear layers with fewer numbers leave token rows as they are: rounding them to fp8 costs as much quality as rounding
# the weights, and an additional launch, which reading so few bytes does not pay back.
FEWEST_NUMBERS_TO_ROUND = 1 << 22
DUMMY_SCALE = DUMMY_RANGE / 8
LEAST_OUTPUTS = 16  # of layers that are coded at load: gates of one output are sensitive and small


@dataclass(frozen=True)
class ScaledFormat(StoredFormat):
    """The stored format of a matrix of codes: the kind of the codes and how many inputs share a scale."""

    group: int = 0  # inputs that share a scale; 0 if all of an output do
    scale_dtype: torch.dtype = torch.float32
    has_zeros: bool = False
    has_factors: bool = False
    rounds: bool = False  # token rows may be rounded to fp8, in groups of the weight's size
    is_made: bool = False  # the files have plain numbers, which are coded when they are read
    has_offsets: bool = False
    recode: Recode | None = None  # the files have other bits, of which codes are made when they are read

    def width(self, inputs: int) -> int:
        """Return the number of inputs that share a scale, for a matrix with this many inputs."""
        return self.group or inputs

    def rounding(self, declared: LinearDeclaration) -> int:
        """Return the number of inputs that share a scale in token rows that are rounded to fp8. 0 if rows are not
        rounded; on a CPU they never are, because products there are in float32."""
        is_large = declared.num_numbers >= FEWEST_NUMBERS_TO_ROUND
        rounds = self.rounds and is_large and declared.device.type == "cuda"
        return min(self.width(declared.num_inputs), declared.num_inputs) if rounds else 0

    def make(self, weight: torch.Tensor) -> ScaledWeight:
        """Quantise a weight [.., outputs, inputs]."""
        makers: dict[str, Callable[[torch.Tensor], Scaled]] = {
            FP8: scaled.to_fp8_rows, INT8: partial(scaled.to_int8_groups, group=self.group),
            INT4: partial(scaled.to_int4_groups, group=self.group, has_offsets=self.has_offsets)}
        made = scaled.by_outputs(makers[self.kind], weight.flatten(0, -2))
        outputs, offsets = weight.shape[:-1], made.offsets
        return ScaledWeight(replace(made, codes=made.codes.unflatten(0, outputs),
                                    scales=made.scales.unflatten(0, outputs),
                                    offsets=None if offsets is None else offsets.unflatten(0, outputs)))

    def empty(self, *outputs: int, inputs: int, device: torch.device) -> Scaled:
        """Allocate codes and scales for a weight [.., outputs, inputs], without content."""
        group = self.width(inputs)
        codes = *outputs, inputs // scaled.codes_per_byte(self.kind)
        # Group by group in memory, as kernels read them: outputs side by side.
        groups = *outputs[:-1], -(-inputs // group), outputs[-1]

        def of_groups(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(groups, dtype=dtype, device=device).transpose(-1, -2)

        return Scaled(
            self.kind, group, empty_weight(*codes, dtype=scaled.code_dtype(self.kind), device=device),
            of_groups(self.scale_dtype), of_groups(torch.float16) if self.has_zeros else None,
            torch.empty(*outputs, 1, device=device) if self.has_factors else None,
            offsets=of_groups(self.scale_dtype) if self.has_offsets else None)

    def tensors(self, weight: Scaled) -> list[StoredTensor]:
        codes_per_byte, per_column = scaled.codes_per_byte(self.kind), self.group or None
        held = [
            StoredTensor("weight", weight.codes, self.kind, inputs_per_column=codes_per_byte,
                         quantize=self.make if self.is_made else None, recode=self.recode),
            StoredTensor("weight_scale", weight.scales, inputs_per_column=per_column,
                         draw=_fill(1 if self.has_factors else DUMMY_SCALE)),
        ]
        if weight.zeros is not None:
            held.append(StoredTensor("weight_zero", weight.zeros, inputs_per_column=per_column, draw=_fill(0)))
        if weight.offsets is not None:
            held.append(StoredTensor("weight_offset", weight.offsets, inputs_per_column=per_column, draw=_fill(0)))
        if weight.factors is not None:
            held.append(StoredTensor("weight_factor", weight.factors, inputs_per_column=None, draw=_fill(DUMMY_SCALE)))
        return held

    def fits(self, declared: LinearDeclaration) -> bool:
        """Whether this rank's part of the matrix consists of whole groups. If the codes have offsets, an output must
        have several groups."""
        inputs, width = declared.inputs, self.width(declared.in_features)
        if self.has_offsets and width >= declared.num_inputs:
            return False
        if scaled.codes_per_byte(self.kind) == 2 and (width % 2 or declared.in_features % width):
            return False
        is_sharded = isinstance(declared.shard, InputShard) and (self.group or scaled.codes_per_byte(self.kind) == 2)
        splits = inputs.start % width or (inputs.stop % width and inputs.stop != declared.in_features)
        return not is_sharded or not splits


@dataclass(frozen=True)
class ScaledWeight:
    """A weight with codes and scales, as a source yields it."""

    weight: Scaled

    @property
    def kind(self) -> str:
        return self.weight.code

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def parts(self) -> dict[str, torch.Tensor]:
        weight = self.weight
        parts = {"weight": weight.codes, "weight_scale": weight.scales, "weight_zero": weight.zeros,
                 "weight_factor": weight.factors, "weight_offset": weight.offsets}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def __getitem__(self, index: int | slice) -> ScaledWeight:
        """Return one expert of a joint weight, or some outputs of a matrix."""
        return ScaledWeight(self.weight[index])

    def is_finite(self) -> bool:
        held = self.weight.scales, self.weight.offsets
        return all(bool(numbers.float().isfinite().all()) for numbers in held if numbers is not None)

    def dequantize(self) -> torch.Tensor:
        return self.weight.numbers()


def _fill(value: float) -> Draw:
    def draw(target: torch.Tensor, generator: torch.Generator) -> None:
        target.fill_(value)

    return draw


def is_on_host(declared: LinearDeclaration | ExpertsDeclaration) -> bool:
    """Whether native CPU products serve the layer."""
    return declared.device.type == "cpu" and declared.dtype == torch.float32


class ScaledLinear(EmbeddingFormat):
    def __init__(self, declared: LinearDeclaration, stored: Sequence[ScaledFormat]) -> None:
        super().__init__(declared, stored)
        self._stored = stored[0]
        self._weight = self._stored.empty(declared.num_outputs, inputs=declared.num_inputs, device=declared.device)
        self._rounding = self._stored.rounding(declared)
        self._packed: native.Matrix | None = None  # the weight for the native product
        self._activation_bits = ACTIVATION_BITS
        self._reader: LinearFormat | None = None  # multiplies with the result of `activated`
        self.set_exact(False)

    @classmethod
    def serves(cls, declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        first = stored[0]
        if len(set(stored)) > 1 or not isinstance(first, ScaledFormat) or not first.fits(declared):
            return False
        # Without a kernel of its own a GPU is faster with numbers.
        return device.type == "cpu" or ops.scaled_linear.serves_on(device, declared.dtype)

    def tensors(self) -> Sequence[StoredTensor]:
        return self._stored.tensors(self._weight)

    def set_exact(self, exact: bool) -> None:
        self._exact, self._arrange = exact, ops.arrange_codes.variant(exact)
        self._linear, self._wide = ops.scaled_linear.variant(exact), ops.scaled_wide.variant(exact)

    def finalize(self) -> None:
        self._weight = replace(self._weight, is_tiled=False)  # all codes were written as files have them

    def restore_order(self) -> None:
        self._weight = self._weight.tiled(False)

    def prepare(self, allow_copy: bool) -> int:
        """Reorder the codes for the device's kernels. On a CPU choose the native product, which is exact in any mode.
        Codes that it cannot read are dequantised in each product."""
        self._weight = self._arrange(self._weight, self.declared.dtype)
        may_copy = allow_copy or self._activation_bits == 8  # token rows of so few bits have no other product
        held = None
        if is_on_host(self.declared):
            held = host_weight(self._weight, self._bias, may_copy, self._activation_bits)
        self._packed = None if held is None else held.matrix
        return 0 if held is None else held.copied_bytes

    def round_activations(self) -> None:
        self._activation_bits = 8

    def use_activation_bits(self, bits: int) -> float | None:
        rows = packed_rows(self._weight) if is_on_host(self.declared) and kept_bits_are_fast() else None
        if rows is None:
            return None
        self._activation_bits = bits
        return rounding_error([rows], self._bias, bits)

    def native_product(self) -> NativeProduct | None:
        return None if self._packed is None else NativeProduct(self._packed, sys.maxsize)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return native.product(x, self._packed)
        return self._linear(x, self._weight, self._bias, self._rounding)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        given = x, self._weight, self._bias, self._rounding, activation
        if self._packed is None and not self._exact and ops.scaled_gated.has_kernel(*given):
            return ops.scaled_gated(*given)
        return activate(self.product(x), activation, 0 if self._reader is None else self._reader.rounding)

    def round_activated_for(self, reader: LinearFormat) -> None:
        self._reader = reader

    @property
    def rounding(self) -> int:
        is_left = self._weight.blocks is not None or self._rounding >= self.declared.num_inputs
        return self._rounding if is_left and not self._exact else 0

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return native.product(x, self._packed)
        out = self._wide(x, self._weight, self._rounding)
        return out if self._bias is None else out.add_(self._bias)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return ops.scaled_rows(self._weight, tokens, self.declared.dtype)


class ScaledExperts(ExpertsFormat):
    """Experts whose projections are codes, perhaps of different kinds. The checkpoint has them expert by expert or
    joint."""

    def __init__(self, declared: ExpertsDeclaration, stored: Sequence[ScaledFormat]) -> None:
        super().__init__(declared, stored)
        self._stored = stored[0], stored[-1]  # of the first projection and of down, the last one of each expert
        self._mix, self._exact = ops.scaled_experts, False
        self._rounds = stored[0].rounds and declared.device.type == "cuda"  # as in ScaledLinear
        self._gate_up, self._down = (
            held.empty(declared.num_experts, each.num_outputs, inputs=each.num_inputs, device=each.device)
            for held, each in zip(self._stored, declared.projections, strict=True))
        self._matrices: list[list[native.Matrix]] = []  # of each expert, for native products
        self._activation_bits = ACTIVATION_BITS

    @classmethod
    def serves(cls, declared: ExpertsDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        first, down = stored[0], stored[-1]
        if not isinstance(first, ScaledFormat) or not isinstance(down, ScaledFormat) or first.rounds != down.rounds:
            return False
        of_each = len(declared.projections[0].stored) + 1  # matrices of an expert, of which down is the last
        if any(held != (first if (at + 1) % of_each else down) for at, held in enumerate(stored)):
            return False
        if not all(held.fits(each) for held, each in zip((first, down), declared.projections, strict=True)):
            return False
        return device.type == "cpu" or ops.scaled_experts.serves_on(device, declared.dtype)

    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        first, down = (held.tensors(weight) for held, weight in zip(self._stored, (self._gate_up, self._down),
                                                                    strict=True))
        return (_joint(first), _joint(down)) if self.declared.is_joint else (first, down)

    def set_exact(self, exact: bool) -> None:
        self._mix, self._exact = ops.scaled_experts.variant(exact), exact

    @property
    def rounding(self) -> int:
        is_left = self._rounds and not self._stored[0].group and not self._exact
        return self.declared.hidden_size if is_left else 0

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None,
        biases: moe.ExpertBiases | None = None,
    ) -> torch.Tensor:
        if self._matrices:
            return native_experts(x, routed, self._matrices, activation, added, biases)
        return self._mix(x, routed.ids, routed.weights, self._gate_up, self._down, activation, added, self._rounds,
                         biases)

    def prepare(self, allow_copy: bool) -> int:
        may_copy = allow_copy or self._activation_bits == 8
        experts = range(self.declared.num_experts if is_on_host(self.declared) else 0)
        held = [[host_weight(weight[expert], None, may_copy, self._activation_bits)
                 for weight in (self._gate_up, self._down)] for expert in experts]
        found = [[each for each in both if each is not None] for both in held]
        are_served = all(len(both) == 2 for both in found)
        self._matrices = [[each.matrix for each in both] for both in found] if are_served else []
        return sum(each.copied_bytes for both in found for each in both) if are_served else 0

    def use_activation_bits(self, bits: int) -> float | None:
        first, down = (packed_rows(weight[0]) if is_on_host(self.declared) and kept_bits_are_fast() else None
                       for weight in (self._gate_up, self._down))
        if first is None or down is None:
            return None
        self._activation_bits = bits
        return max(rounding_error([rows], None, bits) for rows in (first, down))


def _joint(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors under the suffixes of a joint matrix's name, without the leading `weight`."""
    return [held._replace(name=held.name.removeprefix("weight")) for held in tensors]


def choose_made(quantization: str, *declared: LinearDeclaration) -> ScaledFormat | None:
    """Choose the format to which the setting `quantization` converts a linear layer, or all projections of experts, at
    load. None if the weight is not converted: it is very small, or no int4 group divides its inputs."""
    if min(size for each in declared for size in each.stored.values()) < LEAST_OUTPUTS:
        return None
    if quantization == FP8:
        return ScaledFormat(FP8, rounds=True, is_made=True)
    group = next((group for group in INT4_GROUPS if all(each.num_inputs % group == 0 for each in declared)), None)
    if group is None:
        return None
    num_numbers = declared[0].num_numbers if len(declared) == 1 else sys.maxsize  # experts are many
    if num_numbers < FEWEST_NUMBERS_IN_INT4:
        return ScaledFormat(INT8, SHORT_GROUP, torch.bfloat16, is_made=True)
    if num_numbers < FEWEST_NUMBERS_IN_LONG_GROUPS and declared[0].num_inputs > SHORT_GROUP:
        return ScaledFormat(INT4, SHORT_GROUP, torch.bfloat16, is_made=True, has_offsets=True)
    return ScaledFormat(INT4, group, torch.bfloat16, is_made=True)
