"""Copies of the target's output matrix for draft heads: TargetRows, for heads with a reduced vocabulary, and
RoundedOutput, the whole matrix in 8 bits.

A wrong draft is rejected and never changes the text, so both copies may be rounded.

MTP modules and EAGLE-1 heads have no output and use the target's. In a model with a large vocabulary and few active
parameters, reading this matrix takes much of a draft's time. On a GPU such a head reads a copy in 8 bits with a scale
for every 32 inputs, in half the time. With SmolLM2's output the likeliest token stays the same at 99.5% of 1,210
positions. It would at 90% in fp8 with a scale for each token, and at 85% with 4 bits.

A copy is made of outputs of 2^26 numbers or more, because reading a smaller output takes only 30 us. It serves up to 64
token rows, follows `update_weights`, and takes a byte for each number: 0.5 GB for 248,320 tokens and a hidden size of
2,048. There is no copy with `keep_quantized=False`, with several ranks, with an output that is quantised already, or
with `adapt_drafter`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.formats import DenseLinear, EmbeddingFormat
from outrider.formats.gguf import GgufLinear
from outrider.formats.scaled import ScaledFormat, ScaledLinear
from outrider.kernels.code_kinds import INT8
from outrider.kernels.scaled import TILE_INPUTS, TILE_OUTPUTS
from outrider.layers import Linear, StepContext
from outrider.models.base import Decoder, Model
from outrider.models.sources.model_source import WeightError

GROUP = 32  # inputs that share a scale, as in Q8_0 of GGUF files
FEWEST_NUMBERS = 1 << 26  # of an output that is rounded: reading a smaller one takes a GPU no longer than 30 us
MOST_TOKEN_ROWS = 64  # that are multiplied with codes; a product of more reads numbers as fast
_EIGHT_BITS = ScaledFormat(INT8, GROUP, torch.bfloat16)  # in fp8 one likeliest token of ten would be another


class TargetRows:
    """A copy of some rows of the target's output, as a linear layer. On a CPU the copy keeps the blocks of a GGUF file,
    and has 8 bits if the target is quantised in another form. Rounding can cost a draft but never changes the text."""

    def __init__(self, output: Linear, ids: torch.Tensor, dtype: torch.dtype, may_round: bool) -> None:
        """ids: [outputs], the tokens of the copied rows. may_round: the copy may have 8 bits. `take` fills the copy
        when the target has its weights."""
        self._output, self._ids = output, ids
        inputs, device = output.declared.in_features, ids.device
        self.linear = Linear(inputs, len(ids), bias=False, dtype=dtype, device=device)
        self._coded: ScaledFormat | None = None
        if may_round and isinstance(output.format, GgufLinear) and output.format.packed_rows is not None:
            self.linear.format = output.format.with_outputs(self.linear.declared)
            return
        stored = ScaledFormat(INT8, GROUP)
        is_plain = isinstance(output.format, DenseLinear)
        is_rounded = may_round and device.type == "cpu" and not is_plain
        if is_rounded and ScaledLinear.serves(self.linear.declared, [stored], device):
            self._coded, self.linear.format = stored, ScaledLinear(self.linear.declared, [stored])

    def tensors(self) -> list[torch.Tensor]:
        return _tensors(self.linear)

    def take(self) -> None:
        """Copy the target's current rows into the copy, in place. The caller must then prepare the copy's format."""
        held, own = self._output.format, self.linear.format
        if isinstance(own, GgufLinear):
            assert isinstance(held, GgufLinear)
            own.take_rows(held, self._ids)
            return
        if isinstance(held, EmbeddingFormat):
            rows = held.look_up(self._ids)
        elif (dense := held.dense()) is not None:
            rows = dense[self._ids]
        else:
            raise WeightError("this head copies rows of the target's output layer, which the format "
                              f"{type(held).__name__} does not allow: use a head with an output layer of its own")
        _fill(self.linear, {"weight": rows} if self._coded is None else self._coded.make(rows.float()).parts())


class RoundedOutput:
    """A copy of the target's whole output in 8 bits, for the drafts of few requests on a GPU."""

    def __init__(self, target: Decoder) -> None:
        """Allocate the copy. `take` fills it, which needs the target's weights."""
        self._target = target
        declared = target.lm_head.declared
        self.linear = Linear(declared.in_features, declared.num_outputs, bias=False, dtype=declared.dtype,
                             device=declared.device)
        self.linear.format = ScaledLinear(self.linear.declared, [_EIGHT_BITS])

    @classmethod
    def try_build(cls, target: Model) -> RoundedOutput | None:
        """Build the copy, or return None if it would save no time: the output is small or quantised already, or its
        device has no fast kernel for 8-bit weights."""
        if not isinstance(target, Decoder) or target.device.type != "cuda" or target.dtype != torch.bfloat16:
            return None
        declared = target.lm_head.declared
        is_plain = isinstance(target.lm_head.format, DenseLinear) and not declared.has_bias and declared.shard is None
        if not is_plain or declared.num_numbers < FEWEST_NUMBERS:
            return None
        if declared.num_outputs % TILE_OUTPUTS or declared.num_inputs % TILE_INPUTS:
            return None
        return cls(target) if ScaledLinear.serves(declared, [_EIGHT_BITS], declared.device) else None

    def serves(self, hidden: torch.Tensor) -> bool:
        """Whether the copy computes the logits of these token rows faster than the output itself."""
        return len(hidden) <= MOST_TOKEN_ROWS

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute logits with the copy; see `Model.logits`."""
        return self._target.limited(self.linear.wide(hidden, context))

    def tensors(self) -> list[torch.Tensor]:
        return _tensors(self.linear)

    def take(self) -> None:
        """Round the current output into the copy, in place."""
        numbers = self._target.lm_head.format.dense()
        assert numbers is not None, "only plain outputs are rounded"
        _fill(self.linear, _EIGHT_BITS.make(numbers).parts())
        self.linear.format.prepare(allow_copy=False)


def _tensors(linear: Linear) -> list[torch.Tensor]:
    return [slot.target for slot in linear.format.slots("").values()]


def _fill(linear: Linear, parts: Mapping[str, torch.Tensor]) -> None:
    """Store the parts of a weight, given by name, in the layer's slots, which may have been filled and reordered
    before."""
    linear.format.restore_order()
    for name, slot in linear.format.slots("").items():
        slot.store(parts[name].to(slot.target.dtype))
    linear.format.finalize()
