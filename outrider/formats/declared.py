"""Declarations of weights: sizes, names, dtype and the shard that a rank holds, before any memory is taken.

A layer declares its weight. A format is built from the declaration, allocates exactly the tensors that it stores, and
asks the declaration for the slots through which the loader fills them. Sizes in the checkpoint (`ModelSize`) and on one
rank (`RankSize`) have different types, so that they cannot be confused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, NewType

import torch

from outrider.formats.ranks import RankGroup, UnsummedRanks
from outrider.formats.slots import Draw, HeadLayout, Recode, StoredWeight, TensorShard, WeightSlot, draw_dummy

ModelSize = NewType("ModelSize", int)  # a size of the checkpoint's tensors
RankSize = NewType("RankSize", int)  # a size of the tensors that one rank holds
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class StoredFormat:
    """The way in which a source stores a weight. `kind` is the name of the encoding. Subclasses add facts that a format
    needs, such as the group size."""

    kind: str  # name under which `register_format` finds the format that keeps it


@dataclass(frozen=True)
class Ranks:
    """One rank's number, and the number of ranks that share a weight."""

    rank: int
    count: int

    @classmethod
    def from_group(cls, group: RankGroup) -> Ranks:
        return cls(group.rank, group.count)

    def share(self, size: ModelSize, pieces: int | None = None) -> range:
        """Return this rank's part of `size` features in equal pieces, one for each rank. With fewer pieces than ranks,
        neighbouring ranks hold the same piece."""
        pieces = self.count if pieces is None else pieces
        if not 1 <= pieces <= self.count:
            raise ValueError(f"{pieces} pieces cannot be held by {self.count} ranks: there must be from 1 to "
                             f"{self.count}. This is a bug of the model's class: please report it")
        if size % pieces:
            raise ValueError(f"{size} features cannot be sharded into {pieces} equal parts: choose a "
                             f"tensor_parallel_size that divides {size}")
        width = size // pieces
        first = self.rank * pieces // self.count * width
        return range(first, first + width)


ALONE = Ranks(0, 1)


class PackedPart(NamedTuple):
    """One of several matrices that the checkpoint stores in one tensor, one after another along the outputs."""

    size: int  # its output features
    pieces: int | None = None  # into which it is sharded; None if each rank gets one


@dataclass(frozen=True)
class OutputShard:
    """A weight sharded by outputs: every rank holds some output features of each segment and computes that part of the
    product."""

    ranks: Ranks
    pieces: Mapping[str, int] = field(default_factory=dict)  # of segments that have fewer pieces than ranks
    packed: Mapping[str, Sequence[PackedPart]] = field(default_factory=dict)  # of segments with parts of their own

    def held(self, name: str, size: ModelSize) -> tuple[range, ...]:
        """Return the output features of a segment that this rank holds."""
        ranges: list[range] = []
        first = 0
        for part in self.packed.get(name, (PackedPart(size, self.pieces.get(name)),)):
            share = self.ranks.share(ModelSize(part.size), part.pieces)
            ranges.append(range(first + share.start, first + share.stop))
            first += part.size
        assert first == size, f"the parts of {name} have {first} features, the segment {size}"
        return tuple(ranges)


@dataclass(frozen=True)
class VocabularyShard(OutputShard):
    """A vocabulary sharded by tokens: every rank holds the rows of some tokens in an embedding or a head.
    The last rank holds fewer rows if the vocabulary does not divide. Embeddings are summed over ranks and logits are
    gathered, so both are whole on every rank."""

    group: RankGroup = field(kw_only=True)

    @classmethod
    def from_group(cls, group: RankGroup) -> VocabularyShard:
        return cls(Ranks.from_group(group), group=group)

    def width(self, size: ModelSize) -> int:
        """Return the number of rows that every rank but the last holds."""
        return -(-size // self.ranks.count)

    def held(self, name: str, size: ModelSize) -> tuple[range, ...]:
        first = self.ranks.rank * self.width(size)
        if first >= size:
            raise ValueError(f"a vocabulary of {size} tokens is too small for {self.ranks.count} ranks: lower "
                             "tensor_parallel_size")
        return (range(first, min(first + self.width(size), size)),)


@dataclass(frozen=True)
class InputShard:
    """A weight sharded by inputs: every rank holds some input features. The layer's result is the sum of all ranks'
    products."""

    ranks: Ranks
    reduce: Callable[[torch.Tensor], torch.Tensor]  # a rank's product -> the sum over all ranks
    pieces: int | None = None  # into which the features are sharded; None if each rank gets one, 1 if each holds all

    @classmethod
    def from_group(cls, group: RankGroup) -> InputShard:
        made = UnsummedShard if isinstance(group, UnsummedRanks) else InputShard
        return made(Ranks.from_group(group), group.sum)


@dataclass(frozen=True)
class UnsummedShard(InputShard):
    """A weight sharded by inputs whose products the layer does not sum over ranks. The caller first adds other results
    of this rank, and then sums everything over ranks once. Rank 0 adds the bias, the others do not."""


class StoredTensor(NamedTuple):
    """One of the tensors in which a format stores a weight, such as its codes or scales. It holds the rows of all
    segments: [outputs / outputs_per_row, inputs / inputs_per_column, ..], where quotients are rounded up."""

    name: str  # last component of its names in the checkpoint
    tensor: torch.Tensor
    kind: str | None = None  # see WeightSlot
    outputs_per_row: int = 1
    inputs_per_column: int | None = 1  # None if no axis of the tensor follows the input features
    draw: Draw = draw_dummy
    quantize: Callable[[torch.Tensor], StoredWeight] | None = None  # see WeightSlot
    recode: Recode | None = None  # likewise


class Segment(NamedTuple):
    """One matrix of the checkpoint in the weight of a linear layer."""

    name: str  # below the layer's own name; "" if the checkpoint has the layer's weight as one matrix
    size: ModelSize  # output features of the matrix
    held: tuple[range, ...]  # those that this rank holds
    rows: range  # where they lie in this rank's weight
    layout: HeadLayout | None


@dataclass(frozen=True)
class LinearDeclaration:
    """A weight [outputs, inputs], perhaps with a bias [outputs], made of segments that the checkpoint holds."""

    in_features: ModelSize
    stored: Mapping[str, ModelSize]  # output features of each segment, by its name
    has_bias: bool
    dtype: torch.dtype  # dtype of the model
    device: torch.device
    layouts: Mapping[str, HeadLayout] = field(default_factory=dict)  # of segments that are stored head by head
    shard: OutputShard | InputShard | None = None

    def __post_init__(self) -> None:
        if self.num_numbers * self.dtype.itemsize > MAX_BYTES:
            raise OverflowError("a weight would have more bytes than a 64-bit address can count: correct the sizes in "
                                "the config")

    @property
    def num_numbers(self) -> ModelSize:
        """Return the number of elements of the whole weight, on all ranks together."""
        return ModelSize(self.in_features * sum(self.stored.values()))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        shard = self.shard if isinstance(self.shard, OutputShard) else OutputShard(ALONE)
        segments: list[Segment] = []
        first = 0
        for name, size in self.stored.items():
            layout, held = self.layouts.get(name), shard.held(name, size)
            layout = None if layout is None else layout.share(size // sum(map(len, held)))
            segments.append(Segment(name, size, held, range(first, first + sum(map(len, held))), layout))
            first = segments[-1].rows.stop
        return tuple(segments)

    @cached_property
    def inputs(self) -> range:
        """Return the number of input features that this rank holds."""
        if isinstance(self.shard, InputShard):
            return self.shard.ranks.share(self.in_features, self.shard.pieces)
        return ALONE.share(self.in_features)

    @property
    def num_inputs(self) -> RankSize:
        return RankSize(len(self.inputs))

    @property
    def num_outputs(self) -> RankSize:
        return RankSize(self.segments[-1].rows.stop)

    def matrices(self) -> Iterable[str]:
        """Return the names of the layer's matrices in the checkpoint, relative to the layer's name."""
        return self.stored

    def without_bias(self) -> LinearDeclaration:
        return replace(self, has_bias=False)

    def slot(self, segment: Segment, held: StoredTensor, rows_axis: int = 0) -> WeightSlot:
        """Return the slot that the checkpoint's tensor of one segment fills. `held`: the format's tensor, of which the
        slot is a part. `rows_axis`: the axis of the output features; axes before it are not sharded."""
        per_row, per_column, axis = held.outputs_per_row, held.inputs_per_column, rows_axis
        rows = _in_units(segment.rows, per_row, self.num_outputs)
        target = held.tensor.narrow(axis, rows.start, len(rows))
        parts = tuple(_in_units(part, per_row, segment.size) for part in segment.held)
        shape = list(target.shape)
        shape[axis] = -(-segment.size // per_row)
        if isinstance(self.shard, InputShard) and per_column is not None:
            axis, parts = axis + 1, (_in_units(self.inputs, per_column, self.in_features),)
            shape[axis] = -(-self.in_features // per_column)
        is_whole = sum(map(len, parts)) == shape[axis]
        shard = None if is_whole else TensorShard(tuple(shape), axis, parts)
        return WeightSlot(target, segment.layout, shard, held.kind, held.draw, held.quantize,
                          (*target.shape[:rows_axis], segment.size, self.in_features), held.recode)


@dataclass(frozen=True)
class ExpertsDeclaration:
    """The declaration of experts, which are MLPs of equal size without biases. Each has gate and up, or up alone,
    [expert size, hidden] each, and down [hidden, expert size]. With several ranks each rank holds a part of every
    expert, and `reduce` sums the results."""

    num_experts: int
    hidden_size: ModelSize
    expert_size: ModelSize
    is_gated: bool
    is_joint: bool  # the checkpoint has one tensor of all experts for each projection, not tensors by expert
    dtype: torch.dtype
    device: torch.device
    shard: InputShard | None = None  # by the expert's inner features, which are the inputs of `down`
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert's projections

    def __post_init__(self) -> None:
        if 3 * self.num_experts * self.hidden_size * self.expert_size * self.dtype.itemsize > MAX_BYTES:
            raise OverflowError("the experts would have more bytes than a 64-bit address can count: correct the sizes "
                                "in the config")

    @cached_property
    def projections(self) -> tuple[LinearDeclaration, LinearDeclaration]:
        """Return the declarations of the two projections: the first (gate and up, or only up) and down. They are for
        one expert, or for all experts if the checkpoint has joint tensors."""
        gate, up, down_name = self.names
        names = (gate, up) if self.is_gated else (up,)
        stored, packed = dict.fromkeys(names, self.expert_size), {}
        if self.is_joint and self.is_gated:
            stored = {"gate_up_proj": ModelSize(2 * self.expert_size)}
            packed = {"gate_up_proj": [PackedPart(self.expert_size)] * 2}
        first_shard = None if self.shard is None else OutputShard(self.shard.ranks, packed=packed)
        first = LinearDeclaration(self.hidden_size, stored, False, self.dtype, self.device, shard=first_shard)
        down = {down_name: self.hidden_size}
        return first, LinearDeclaration(self.expert_size, down, False, self.dtype, self.device, shard=self.shard)

    def matrices(self) -> Iterator[str]:
        """Return the names of the experts' matrices in the checkpoint, relative to the name of the experts' module.
        There may be many."""
        names = [name for projection in self.projections for name in projection.stored]
        if self.is_joint:
            yield from names
        else:
            yield from (f"{expert}.{name}" for expert in range(self.num_experts) for name in names)

    def slots(self, first: Sequence[StoredTensor], down: Sequence[StoredTensor]) -> dict[str, WeightSlot]:
        """Return the slots of the tensors [experts, rows, ..] of both projections, by their names below the experts'
        own name. A tensor's name is added to that of a joint matrix ("gate_up_proj" + name) or of an expert's matrix
        ("0.gate_proj." + name)."""
        separator = "" if self.is_joint else "."
        joint = {f"{segment.name}{separator}{held.name}": projection.slot(segment, held, rows_axis=1)
                 for projection, tensors in zip(self.projections, (first, down), strict=True)
                 for segment in projection.segments for held in tensors}
        if self.is_joint:
            return joint
        each = {name: slot.unbind() for name, slot in joint.items()}
        return {f"{expert}.{name}": slots[expert] for expert in range(self.num_experts) for name, slots in each.items()}


def _in_units(features: range, unit: int, size: int) -> range:
    """Convert a range of features to rows or columns of `unit` features each. Only the last of all `size` features may
    end within a unit."""
    if features.start % unit or (features.stop % unit and features.stop != size):
        raise ValueError(f"features {features.start} to {features.stop} are not whole groups of {unit}, so they cannot "
                         "be held by one rank: choose another tensor_parallel_size")
    return range(features.start // unit, -(-features.stop // unit))
