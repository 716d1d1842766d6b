"""Linear layers. A layer declares its sizes and the names of its matrices; its format (`outrider/formats`) holds the
weight and computes products.

A layer does not depend on models or files. With several ranks a layer's declaration (`shard`) says which output or
input features each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from outrider.formats import (
    DenseLinear,
    FormatChoice,
    HeadLayout,
    InputShard,
    LinearDeclaration,
    LinearFormat,
    ModelSize,
    OutputShard,
    RankSize,
    activate,
)
from outrider.layers.base import FormatModule
from outrider.layers.context import StepContext
from outrider.layers.embedding import Embedding


class Linear(FormatModule[LinearFormat]):
    """A linear layer: y = x W' + b."""

    declared: LinearDeclaration
    format_base = LinearFormat
    is_product = True

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device,
        shard: OutputShard | InputShard | None = None,
    ) -> None:
        """in_features, out_features: the sizes of the whole layer. With `shard` this rank holds a part of them."""
        sizes = {"": ModelSize(out_features)}
        declared = LinearDeclaration(ModelSize(in_features), sizes, bias, dtype, device, shard=shard)
        super().__init__(declared, DenseLinear)

    @classmethod
    def from_weight(cls, weight: torch.Tensor) -> Linear:
        """Make a layer that uses an existing weight [out, in]."""
        out_features, in_features = weight.shape
        linear = cls(in_features, out_features, bias=False, dtype=weight.dtype, device=weight.device)
        linear.format = DenseLinear(linear.declared, weight=weight)
        return linear

    @property
    def in_features(self) -> RankSize:
        return self.declared.num_inputs

    @property
    def out_features(self) -> RankSize:
        return self.declared.num_outputs

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        if context.deltas is None:
            return self.format.product(x)
        return self.format.adapted(x, context.deltas.begin(self, x).add_to)

    def part(self, x: torch.Tensor, first: int, stop: int, context: StepContext) -> torch.Tensor:
        """Return the output features [first, stop) of the product."""
        if context.deltas is None:
            return self.format.part(x, first, stop)
        assert not isinstance(self.declared.shard, InputShard), "a part of a product that is summed over ranks"
        change = context.deltas.begin(self, x, first, stop)
        out = self.format.part(x, first, stop)
        change.add_to(out)
        return out

    def wide(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the product in float32, or float64 in a float64 model."""
        if context.deltas is None:
            return self.format.wide(x)
        return self.format.adapted(x, context.deltas.begin(self, x).add_to, is_wide=True)

    def activated(self, x: torch.Tensor, activation: str, context: StepContext) -> torch.Tensor:
        """Return the product with an activation applied: see `LinearFormat.activated` for the activations."""
        if context.deltas is None:
            return self.format.activated(x, activation)
        if isinstance(self.declared.shard, InputShard):
            return activate(self(x, context), activation)
        change = context.deltas.begin(self, x)
        return change.activated(self.format.product(x), activation)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, context: StepContext) -> None:
        """Add x W' + b to residual, in place."""
        if context.deltas is None:
            self.format.add_to(residual, x)
        else:  # rounded where a layer that adds later rounds: bits must not depend on the number of token rows
            residual.add_(self(x, context))


class JointMatrix(NamedTuple):
    """A single matrix in which other files of the same model store several of a layer's matrices, head by head.
    Low-rank deltas for the joint matrix then also work with checkpoints that have separate matrices."""

    parts: tuple[str, ...]  # names of the layer's own matrices
    layout: HeadLayout


class FusedLinear(Linear):
    """Several linear layers that read the same input, computed as one product. `stored`: name and output features of
    each, in order. `layouts`: the order of features where the checkpoint stores them head by head. `joint`: the joint
    matrices of other files, by name."""

    def __init__(
        self, in_features: int, stored: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device,
        layouts: Mapping[str, HeadLayout] | None = None, shard: OutputShard | InputShard | None = None,
        joint: Mapping[str, JointMatrix] | None = None,
    ) -> None:
        self.joint = joint or {}
        sizes = {name: ModelSize(size) for name, size in stored.items()}
        declared = LinearDeclaration(ModelSize(in_features), sizes, bias, dtype, device, layouts or {}, shard)
        FormatModule.__init__(self, declared, DenseLinear)

    @property
    def stored(self) -> dict[str, int]:
        return dict(self.declared.stored)


class TiedLinear(Linear):
    """A head that shares the weight and the format of an embedding, which loads it."""

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding
        FormatModule.__init__(self, embedding.declared, DenseLinear)

    @cached_property
    def format(self) -> LinearFormat:
        return self.embedding.format

    def declare_shard(self, shard: OutputShard | InputShard) -> None:
        """Do nothing: the embedding was sharded before."""
        self.declared = self.embedding.declared

    def declare_formats(self, choice: FormatChoice, prefix: str = "") -> None:
        """Do nothing: the embedding declares the format."""
