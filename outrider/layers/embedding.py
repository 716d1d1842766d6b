"""The token embedding. A head that is tied to it is a `TiedLinear`, which shares its format.

The scale that Gemma applies is rounded to the weight's dtype, as in its reference code.
"""

from __future__ import annotations

import torch

from outrider.formats import DenseLinear, EmbeddingFormat, LinearDeclaration, ModelSize
from outrider.layers.base import FormatModule
from outrider.layers.context import StepContext


class Embedding(FormatModule[EmbeddingFormat]):
    declared: LinearDeclaration
    format_base = EmbeddingFormat

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device, scale: float | None = None
    ) -> None:
        sizes = {"": ModelSize(vocab_size)}
        super().__init__(LinearDeclaration(ModelSize(hidden_size), sizes, False, dtype, device), DenseLinear)
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    @classmethod
    def from_weight(cls, weight: torch.Tensor) -> Embedding:
        """Make an embedding that uses an existing table [vocabulary, hidden]."""
        made = cls(*weight.shape, dtype=weight.dtype, device=weight.device)
        made.format = DenseLinear(made.declared, weight=weight)
        return made

    @property
    def weight(self) -> torch.Tensor:
        """Return the table in the model's dtype. If the format stores codes, they are dequantised at each access."""
        return self.format.dense()

    def set_exact(self, exact: bool) -> None:
        """Do nothing: a lookup is exact in any mode. A tied head tells the format which products it needs."""

    def __call__(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the embeddings [tokens, hidden] of tokens [tokens] int64."""
        x = self.changed(tokens, context)
        return x if context.given_rows is None else context.given_rows.put_into(x)

    def changed(self, tokens: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the embeddings of token ids, with the row deltas of their requests added."""
        x = self.look_up(tokens)
        if context.deltas is not None and context.deltas.change(self):
            context.deltas.add_embeddings(x, self, tokens, 1.0 if self.scale is None else self.scale)
        return x

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of token ids, without deltas."""
        x = self.format.look_up(tokens)
        return x if self.scale is None else x * self.scale
