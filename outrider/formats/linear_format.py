"""LinearFormat: the stored weight of one linear layer and every product with it.

A format is built empty from a declaration and must implement `tensors` and `product`. Every operation that may be fused
with a product has a default here that composes plain operations. A format overrides the operations for which it has
something faster."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from outrider.formats.weight_format import LINEAR, MatrixFormat
from outrider.kernels import cpu as native
from outrider.kernels import ops


class NativeProduct(NamedTuple):
    """A weight in the layout that native code reads, for layers that are one native call."""

    matrix: native.Matrix
    max_rows: int  # for more token rows another product is faster


class LinearFormat(MatrixFormat):
    """The stored form of a linear layer's weight [outputs, inputs], perhaps with a bias [outputs], and the products
    with it."""

    use, may_be_coded = LINEAR, True

    def prepare(self, allow_copy: bool) -> int:
        """Choose the kernels for the device. With `allow_copy` the format may hold a second copy of the weight. Return
        how many bytes it holds besides the slots' tensors."""
        return 0

    @property
    def plain_weight(self) -> torch.Tensor | None:
        """Return the weight as a plain tensor, for code that multiplies several weights in one product. None if the
        weight is not in the model's dtype, has a bias or must be exact."""
        return None

    def use_activation_bits(self, bits: int) -> float | None:
        """Round token rows to 8, 16 or 24 bits in products. Returns the largest error of a product with random
        activations, as a share of its largest result; None if the format has no such product."""
        return None

    def round_activations(self) -> None:
        """Round token rows to 8 bits in products that are prepared from now on, without measuring the error. It is for
        weights whose products need not be accurate. Nothing changes if the format has no such product."""

    @property
    def rounding(self) -> int:
        """Return the number of columns of a token row that share an fp8 scale, if products round token rows to fp8. The
        kernel that makes the rows may then round them itself. 0 if products do not round to fp8."""
        return 0

    def round_activated_for(self, reader: LinearFormat) -> None:
        """Let `activated` round its result for the product of `reader`, which must be the result's only use."""

    # Questions about the weight

    def dense(self) -> torch.Tensor | None:
        """Return the weight without quantisation. A format that stores codes dequantises them at each call, or returns
        None if it cannot."""
        return None

    # Products

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [tokens, inputs] with the weight and add the bias: [tokens, outputs]."""

    def part(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Return the output features [first, stop) of the product."""
        return self.product(x)[:, first:stop]

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in float32, or in float64 in a float64 model. Logits use it, because many logits would be
        equal after rounding to 16 bits."""
        out = self.product(x)
        return out if out.dtype == torch.float64 else out.float()

    def adapted(self, x: torch.Tensor, add: Callable[[torch.Tensor], None], is_wide: bool = False) -> torch.Tensor:
        """Return the product, or the wide product, after `add` has changed it in place. With a sharded weight, `add`
        gets this rank's part, before parts are summed or gathered."""
        out = self.wide(x) if is_wide else self.product(x)
        add(out)
        return out

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Return the product with an activation applied. "relu2" squares the positive part. All other activations gate,
        act(gate) * up, where the gate's output features come before those of up."""
        return activate(self.product(x), activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product to the residual stream in place."""
        residual.add_(self.product(x))

    @property
    def adds_single_row(self) -> bool:
        """Whether `add_to` is one kernel for a single token row."""
        return False

    def native_product(self) -> NativeProduct | None:
        """Return the weight for native code. None if native code cannot multiply with this format."""
        return None


def activate(out: torch.Tensor, activation: str, rounding: int = 0) -> torch.Tensor:
    """Apply an activation to a product, as `LinearFormat.activated` describes. rounding: the rounding that the product
    reading the result needs."""
    return ops.relu2(out) if activation == "relu2" else ops.gated(out, activation, rounding)


class EmbeddingFormat(LinearFormat):
    """The base class of formats that also serve embeddings, and heads that are tied to an embedding."""

    may_be_coded = False

    @abstractmethod
    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens: [tokens, inputs] in the model's dtype."""

    @property
    def table(self) -> torch.Tensor | None:
        """Return the weight in the model's dtype, for kernels that look up rows themselves. None if the format stores
        it in another form."""
        return None

    @property
    def packed_rows(self) -> native.PackedRows | None:
        """Return the packed weight, for native code that looks up rows itself. None if the weight is not in one packed
        form."""
        return None

    def dense(self) -> torch.Tensor:
        return self.look_up(torch.arange(self.declared.num_outputs, device=self.declared.device))
