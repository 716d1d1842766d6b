"""Formats that wrap the format of one rank's shard, and exchange data with other ranks before or after its product.

Products of sharded input features are summed; the bias is added once, after the sum, and every rank holds all of it.
Embeddings of a sharded vocabulary are summed, and logits are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from outrider.formats.declared import (
    InputShard,
    LinearDeclaration,
    StoredTensor,
    UnsummedShard,
    VocabularyShard,
)
from outrider.formats.experts import ExpertsFormat
from outrider.formats.linear_format import EmbeddingFormat, LinearFormat
from outrider.formats.slots import WeightSlot
from outrider.kernels import moe


class AroundLinear(LinearFormat):
    """The base class of wrappers around the format of this rank's shard, which holds the weight and computes products.
    """

    def __init__(self, declared: LinearDeclaration, inner: LinearFormat) -> None:
        super().__init__(declared)
        self._inner = inner

    def tensors(self) -> Sequence[StoredTensor]:
        return self._inner.tensors()

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return self._inner.slots(prefix) | super().slots(prefix)

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes

    def finalize(self) -> None:
        self._inner.finalize()

    def restore_order(self) -> None:
        self._inner.restore_order()

    def prepare(self, allow_copy: bool) -> int:
        return self._inner.prepare(allow_copy)

    def set_exact(self, exact: bool) -> None:
        self._inner.set_exact(exact)

    def round_activations(self) -> None:
        self._inner.round_activations()

    def use_activation_bits(self, bits: int) -> float | None:
        return self._inner.use_activation_bits(bits)


class SummedLinear(AroundLinear):
    """A linear layer sharded by inputs: its products are summed over ranks. The inner format has no bias."""

    def __init__(self, declared: LinearDeclaration, shard: InputShard, inner: LinearFormat) -> None:
        super().__init__(declared, inner)
        self._reduce = shard.reduce
        self._adds_bias = not isinstance(shard, UnsummedShard) or shard.ranks.rank == 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._reduce(self._inner.product(x)))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._reduce(self._inner.wide(x)))

    def adapted(self, x: torch.Tensor, add: Callable[[torch.Tensor], None], is_wide: bool = False) -> torch.Tensor:
        return self._with_bias(self._reduce(self._inner.adapted(x, add, is_wide)))

    def _with_bias(self, total: torch.Tensor) -> torch.Tensor:
        return total + self._bias if self._bias is not None and self._adds_bias else total


class SharedVocabulary(AroundLinear, EmbeddingFormat):
    """An embedding or head divided among ranks by tokens: this rank holds the rows of some tokens. Tokens of other
    ranks are looked up as zeros, and the sum over ranks adds their rows. Logits are gathered."""

    def __init__(self, declared: LinearDeclaration, shard: VocabularyShard, inner: LinearFormat) -> None:
        assert not declared.has_bias
        super().__init__(declared, inner)
        (segment,), (self._held,) = declared.segments, declared.segments[0].held
        self._size, self._width, self._group = segment.size, shard.width(segment.size), shard.group

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._inner, EmbeddingFormat)
        own = tokens - self._held.start
        others = (own < 0) | (own >= len(self._held))
        found = self._inner.look_up(own.clamp(0, len(self._held) - 1))
        return self._group.sum(found.masked_fill(others.unsqueeze(-1), 0))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._gathered(self._inner.product(x))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self._gathered(self._inner.wide(x))

    def adapted(self, x: torch.Tensor, add: Callable[[torch.Tensor], None], is_wide: bool = False) -> torch.Tensor:
        return self._gathered(self._inner.adapted(x, add, is_wide))

    def dense(self) -> torch.Tensor:
        """Return the whole table, gathered from all ranks."""
        table = self._inner.dense()
        assert table is not None
        return self._gathered(table, 0)

    def _gathered(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gather the parts of all ranks along `dim`, the axis of the vocabulary, and cut off the padding."""
        if self._width * self._group.count == self._size:
            return self._group.gather(part, dim)
        missing = self._width - part.shape[dim]
        padded = F.pad(part, (0, missing) if dim == -1 else (0, 0, 0, missing))
        return self._group.gather(padded, dim).narrow(dim, 0, self._size).contiguous()


class SummedExperts(ExpertsFormat):
    """Experts of which this rank holds a part; their weighted sums are summed over ranks."""

    def __init__(self, shard: InputShard, inner: ExpertsFormat) -> None:
        super().__init__(inner.declared)
        self._inner, self._reduce = inner, shard.reduce

    def tensors(self) -> tuple[Sequence[StoredTensor], Sequence[StoredTensor]]:
        return self._inner.tensors()

    def finalize(self) -> None:
        self._inner.finalize()

    def set_exact(self, exact: bool) -> None:
        self._inner.set_exact(exact)

    def prepare(self, allow_copy: bool) -> int:
        return self._inner.prepare(allow_copy)

    def use_activation_bits(self, bits: int) -> float | None:
        return self._inner.use_activation_bits(bits)

    def mix(
        self, x: torch.Tensor, routed: moe.Routed, activation: str, added: torch.Tensor | None = None,
        biases: moe.ExpertBiases | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token row's experts, summed over ranks. `added` and `biases` are this rank's
        parts, so that the sum over ranks adds each of them once."""
        return self._reduce(self._inner.mix(x, routed, activation, added, biases))
