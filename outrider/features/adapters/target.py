"""Target: one weight of a model that LoRA adapters may change.

A target knows the shapes that a file's two factors must have. It cuts the factors to the part that this rank computes,
in the order of this rank's weights. Experts are in `experts_target.py`; `targets.py` finds a model's targets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.peft_folder import AdapterError, FactorPair
from outrider.formats import HeadLayout
from outrider.formats.declared import Segment, VocabularyShard
from outrider.kernels.delta_tables import ALIGNMENT
from outrider.layers.embedding import Embedding
from outrider.layers.latent_attention import LatentExpansion
from outrider.layers.linear import Linear


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(ABC):
    """One product of a model (a layer's multiplication by a weight) that adapters may change."""

    index: int  # its row in the arena's tables
    name: str  # of the module, without the names around the decoder
    is_planned: bool = True  # the arena is planned with room for it in every adapter
    reach: ClassVar[DeltaReach]  # the kind of products that it is one of

    @abstractmethod
    def sizes(self, rank: int) -> tuple[int, int]:
        """Return the number of elements of each of the two factors, on the rank with the largest part."""

    @abstractmethod
    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        """This rank's part of the two factors, in the layout of the arena (`arena.py`)."""

    @abstractmethod
    def check(self, pair: FactorPair) -> int:
        """Return the rank of a file's factors. Raises AdapterError if they do not fit this model."""

    def config_name(self, module: str) -> str:
        """Return the name that is matched with the patterns in the adapter's config, for a module of a file."""
        return module

    def changed_parts(self, rest: str) -> set[tuple[int, int]]:
        """The parts of the product that a file's module changes. Two modules of a file must not change the same part.
        rest: the part of the module's name after the target's name."""
        return {(0, 0)}

    def held_rank(self, rest: str, rank: int) -> int:
        """The LoRA rank for which the arena must have room, if a file's module has the rank `rank`."""
        return rank

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Whether adapters may change this target. The format in which its weights are stored may not allow it."""
        return ()

    @property
    def is_served(self) -> bool:
        """Whether adapters may change this target, with the format in which its weights are stored."""
        return True

    @property
    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """The first output feature that the target covers, and the one after the last, in this rank's module or in each
        of its experts."""

    def room(self, rank: int) -> int:
        return sum(map(aligned, self.sizes(rank)))


class HeldFactors(NamedTuple):
    """The two factors of a target's change, as the arena holds them."""

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float  # of their product


@dataclass(frozen=True)
class NamedPair:
    """The factors of one module of a file, with the scale of their product."""

    module: str  # as the target knows it: the rest of the name behind the target's
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class TargetPart(NamedTuple):
    """The part of a file's module that belongs to one target."""

    target: Target
    rest: str = ""  # of the module's name, behind the target's
    rows: torch.Tensor | None = None  # of the second factor, in the target's order; None: all, as they are

    def of_pair(self, pair: FactorPair) -> FactorPair:
        """The module's pair of factors, with the shape of the second one cut to the rows of this part."""
        return pair if self.rows is None else replace(pair, b_shape=(len(self.rows), *pair.b_shape[1:]))

    def of_factor(self, b: torch.Tensor) -> torch.Tensor:
        return b if self.rows is None else b[self.rows]


@dataclass(frozen=True)
class JointModule:
    """A module of an adapter file whose one matrix changes several targets of a layer. The rows of each attention head
    contain a part for every target."""

    targets: tuple[LinearTarget, ...]
    layout: HeadLayout

    def parts(self, pair: FactorPair) -> tuple[TargetPart, ...]:
        sizes = [target.segment.size for target in self.targets]
        _check_matrix(pair, self.targets[0].linear.declared.in_features, sum(sizes))
        rows = self.layout.sort(torch.arange(sum(sizes))).split(sizes)
        return tuple(TargetPart(target, rows=own) for target, own in zip(self.targets, rows, strict=True))


def _check_matrix(pair: FactorPair, num_inputs: int, num_outputs: int) -> int:
    """Return the rank of a pair of factors. Raises an error unless their shapes are [rank, inputs] and [outputs,
    rank]."""
    rank = pair.a_shape[0] if pair.a_shape else 0
    if pair.a_shape != (rank, num_inputs) or pair.b_shape != (num_outputs, rank) or not rank:
        raise AdapterError(f"{pair.a} {list(pair.a_shape)} and {pair.b} {list(pair.b_shape)} do not fit the model, "
                           f"whose weight is [{num_outputs}, {num_inputs}]: the adapter is for another base model. "
                           "Use its own")
    return rank


def _held_rows(b: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The rows of a segment that this rank holds."""
    parts = [b[held.start : held.stop] for held in segment.held]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearTarget(Target):
    """One matrix of a linear layer, with LoRA factors `a` [rank, inputs] and `b` [rank, outputs]."""

    linear: Linear
    segment: Segment
    reach = DeltaReach.LINEARS

    @property
    def bounds(self) -> tuple[int, int]:
        return self.segment.rows.start, self.segment.rows.stop

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.segment.size, self.linear.declared.in_features

    def sizes(self, rank: int) -> tuple[int, int]:
        shard = self.linear.declared.shard
        num_outputs = shard.width(self.segment.size) if isinstance(shard, VocabularyShard) else len(self.segment.rows)
        return rank * self.linear.declared.num_inputs, rank * num_outputs

    def check(self, pair: FactorPair) -> int:
        return _check_matrix(pair, self.linear.declared.in_features, self.segment.size)

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        (pair,) = pairs
        inputs, segment = self.linear.declared.inputs, self.segment
        b = _held_rows(pair.b, segment)
        if segment.layout is not None:
            b = segment.layout.sort(b)
        return HeldFactors(pair.a[:, inputs.start : inputs.stop], b.t(), b.shape[1], pair.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpansionTarget(Target):
    """MLA's projection from the latent space to keys and values (kv_b_proj), which attention uses in both directions.
    Its LoRA factors are `a` [rank, latent] and `b` [rank, heads x (key | value)]."""

    expansion: LatentExpansion
    reach = DeltaReach.LATENTS

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.expansion.declared.num_outputs

    def sizes(self, rank: int) -> tuple[int, int]:
        declared = self.expansion.declared
        return rank * declared.num_inputs, rank * declared.num_outputs

    def check(self, pair: FactorPair) -> int:
        (segment,) = self.expansion.declared.segments
        return _check_matrix(pair, self.expansion.declared.in_features, segment.size)

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        (pair,), (segment,) = pairs, self.expansion.declared.segments
        return HeldFactors(pair.a, _held_rows(pair.b, segment).t(), pair.b.shape[1], pair.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingTarget(Target):
    """The embedding table, with LoRA factors `a` [vocabulary, rank], which is looked up like the table itself, and `b`
    [rank, hidden]. With several ranks each holds all of both."""

    embedding: Embedding
    is_planned: bool = False
    reach = DeltaReach.EMBEDDINGS

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.embedding.declared.num_inputs

    @property
    def vocab_size(self) -> int:
        return self.embedding.declared.segments[0].size

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.embedding.declared.in_features

    def sizes(self, rank: int) -> tuple[int, int]:
        return rank * self.vocab_size, rank * self.embedding.declared.num_inputs

    def check(self, pair: FactorPair) -> int:
        if not pair.is_embedding:
            raise AdapterError(f"{pair.a}: {self.name} is an embedding, so its factors must be named lora_embedding_A "
                               "and lora_embedding_B: save the adapter with PEFT")
        return _check_matrix(pair, self.vocab_size, self.embedding.declared.in_features)

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        (pair,) = pairs
        return HeldFactors(pair.a.t(), pair.b.t(), pair.b.shape[1], pair.scale)
