"""TargetRows: the output of a head with a reduced vocabulary, made of the target's rows of its tokens."""

from __future__ import annotations

import torch

from outrider.formats import DenseLinear, EmbeddingFormat
from outrider.formats.gguf import GgufLinear
from outrider.formats.scaled import ScaledFormat, ScaledLinear
from outrider.kernels.scaled import INT8
from outrider.layers import Linear
from outrider.models.sources.base import WeightError

GROUP = 32  # inputs that share a scale, as in Q8_0 of GGUF files


class TargetRows:
    """A copy of some rows of the target's output, as a linear layer. On a CPU the copy has the target's bits if these
    are those of a GGUF file, and 8 bits if the target's own rows are other codes: rounding can cost a draft, and never
    changes the text."""

    def __init__(self, output: Linear, ids: torch.Tensor, dtype: torch.dtype, may_round: bool) -> None:
        """ids: [outputs] the tokens whose rows are taken. may_round: the copy may have 8 bits. `take` fills the copy,
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
        return [slot.target for slot in self.linear.format.slots("").values()]

    def take(self) -> None:
        """Copy the rows as they are now, in place. Products are prepared by the caller."""
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
            raise WeightError(f"the target's output in the format {type(held).__name__} gives no rows to a head: use a "
                              "head with an output of its own")
        parts = {"weight": rows} if self._coded is None else self._coded.make(rows.float()).parts()
        self.linear.format.restore_order()
        for name, slot in self.linear.format.slots("").items():
            slot.store(parts[name].to(slot.target.dtype))
        self.linear.format.finalize()
