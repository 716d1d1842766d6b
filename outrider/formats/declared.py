"""Declarations of weights: sizes, names, dtype and the part that a rank holds, before any memory is taken.

A layer declares its weight; a format is built from the declaration, allocates what it stores and nothing else, and gets
the slots of its tensors from here. Sizes of the checkpoint (`ModelSize`) and of one rank (`RankSize`) are two types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, NewType

import torch

from outrider.formats.slots import Draw, HeadLayout, TensorCut, WeightSlot, draw_dummy

ModelSize = NewType("ModelSize", int)  # a size of the checkpoint's tensors
RankSize = NewType("RankSize", int)  # a size of the tensors that one rank holds
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True)
class StoredFormat:
    """How a source stores a weight. Subclasses add what a format must know beside the kind: a group's size, say."""

    kind: str  # name under which `register_format` finds the format that keeps it


@dataclass(frozen=True)
class Ranks:
    """One rank among those that hold a weight together."""

    rank: int
    count: int

    def share(self, size: ModelSize, pieces: int | None = None) -> range:
        """This rank's part of `size` features in equal pieces, one for each rank. With fewer pieces than ranks,
        neighbouring ranks hold the same piece."""
        pieces = self.count if pieces is None else pieces
        if size % pieces:
            raise ValueError(f"{size} features cannot be cut into {pieces} equal parts: use another number of ranks")
        width = size // pieces
        first = self.rank * pieces // self.count * width
        return range(first, first + width)


@dataclass(frozen=True)
class OutputCut:
    """Every rank holds some output features of each segment. A rank's product is its part of the outputs."""

    ranks: Ranks
    pieces: Mapping[str, int] = field(default_factory=dict)  # of segments that are cut into fewer pieces than ranks


@dataclass(frozen=True)
class InputCut:
    """Every rank holds some input features. The layer's product is the sum of the ranks' products."""

    ranks: Ranks
    reduce: Callable[[torch.Tensor], torch.Tensor]  # a rank's product -> the sum over all ranks


class StoredTensor(NamedTuple):
    """A tensor of a format, for all segments of a weight: [outputs / outputs_per_row, inputs / inputs_per_column, ..].
    Sizes that do not divide are rounded up, as in a matrix of scales for blocks."""

    name: str  # last component of its names in the checkpoint
    tensor: torch.Tensor
    kind: str | None = None  # see WeightSlot
    outputs_per_row: int = 1
    inputs_per_column: int | None = 1  # None if no axis of the tensor follows the input features
    draw: Draw = draw_dummy


class Segment(NamedTuple):
    """One matrix of the checkpoint in the weight of a linear layer."""

    name: str  # below the layer's own name; "" if the checkpoint has the layer's weight as one matrix
    size: ModelSize  # output features of the matrix
    held: range  # those that this rank holds
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
    cut: OutputCut | InputCut | None = None

    def __post_init__(self) -> None:
        if self.in_features * sum(self.stored.values()) * self.dtype.itemsize > MAX_BYTES:
            raise OverflowError("a weight of more bytes than there are addresses")

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        first = 0
        for name, size in self.stored.items():
            held, layout = range(size), self.layouts.get(name)
            if isinstance(self.cut, OutputCut):
                held = self.cut.ranks.share(size, self.cut.pieces.get(name))
                layout = None if layout is None else _share_heads(layout, size // len(held))
            segments.append(Segment(name, size, held, range(first, first + len(held)), layout))
            first += len(held)
        return tuple(segments)

    @cached_property
    def inputs(self) -> range:
        """The input features that this rank holds."""
        cut = self.cut
        return cut.ranks.share(self.in_features) if isinstance(cut, InputCut) else range(self.in_features)

    @property
    def num_inputs(self) -> RankSize:
        return RankSize(len(self.inputs))

    @property
    def num_outputs(self) -> RankSize:
        return RankSize(self.segments[-1].rows.stop)

    def matrices(self) -> Iterable[str]:
        """Names of the checkpoint's matrices below the layer's own name."""
        return self.stored

    def without_bias(self) -> LinearDeclaration:
        return replace(self, has_bias=False)

    def slot(self, segment: Segment, held: StoredTensor) -> WeightSlot:
        """The slot of the checkpoint's tensor that holds one segment of a format's tensor."""
        per_row, per_column = held.outputs_per_row, held.inputs_per_column
        rows = _in_units(segment.rows, per_row, self.num_outputs)
        target, part, axis = held.tensor[rows.start : rows.stop], _in_units(segment.held, per_row, segment.size), 0
        shape = [-(-segment.size // per_row), *target.shape[1:]]
        if isinstance(self.cut, InputCut) and per_column is not None:
            shape[1] = -(-self.in_features // per_column)
            part, axis = _in_units(self.inputs, per_column, self.in_features), 1
        cut = None if len(part) == shape[axis] else TensorCut(tuple(shape), axis, (part,))
        return WeightSlot(target, segment.layout, cut, held.kind, held.draw)


@dataclass(frozen=True)
class ExpertsDeclaration:
    """Equal MLPs without biases: gate and up, or up alone, [expert size, hidden] each, and down [hidden, expert size].
    With several ranks each holds a part of every expert, and `reduce` sums their results."""

    num_experts: int
    hidden_size: ModelSize
    expert_size: ModelSize
    is_gated: bool
    is_joint: bool  # the checkpoint has one tensor of all experts for each projection, not tensors by expert
    dtype: torch.dtype
    device: torch.device
    cut: InputCut | None = None  # by the expert's inner features, which are the inputs of `down`

    def __post_init__(self) -> None:
        if 3 * self.num_experts * self.hidden_size * self.expert_size * self.dtype.itemsize > MAX_BYTES:
            raise OverflowError("experts of more bytes than there are addresses")

    @property
    def held(self) -> range:
        """The inner features of every expert that this rank holds."""
        return range(self.expert_size) if self.cut is None else self.cut.ranks.share(self.expert_size)

    @property
    def num_inner(self) -> RankSize:
        return RankSize(len(self.held))

    @property
    def firsts(self) -> tuple[str, ...]:
        """The projections before the activation, in the order of their rows."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)

    def matrices(self) -> Iterator[str]:
        """Names of the checkpoint's matrices below the experts' own name; there may be many."""
        if self.is_joint:
            yield from (self.joint_first, "down_proj")
        else:
            every = (*self.firsts, "down_proj")
            yield from (f"{expert}.{name}" for expert in range(self.num_experts) for name in every)

    @property
    def joint_first(self) -> str:
        return "gate_up_proj" if self.is_gated else "up_proj"

    def slots(self, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, WeightSlot]:
        """Slots of two tensors with a row for every feature and a column for every input: [experts, rows, hidden] and
        [experts, hidden, inner], by their names below the experts' own."""
        size, held, hidden = self.expert_size, self.held, self.hidden_size

        def slot(target: torch.Tensor, rows: int, columns: int, axis: int, *parts: range) -> WeightSlot:
            shape = (*target.shape[:-2], rows, columns)
            is_whole = self.cut is None
            return WeightSlot(target, cut=None if is_whole else TensorCut(shape, len(shape) - 2 + axis, parts))

        if self.is_joint:
            both = [range(n * size + held.start, n * size + held.stop) for n in range(len(self.firsts))]
            return {self.joint_first: slot(gate_up, size * len(both), hidden, 0, *both),
                    "down_proj": slot(down, hidden, size, 1, held)}
        slots: dict[str, WeightSlot] = {}
        for expert in range(self.num_experts):
            for name, rows in zip(self.firsts, gate_up[expert].split(self.num_inner), strict=True):
                slots[f"{expert}.{name}.weight"] = slot(rows, size, hidden, 0, held)
            slots[f"{expert}.down_proj.weight"] = slot(down[expert], hidden, size, 1, held)
        return slots


def _share_heads(layout: HeadLayout, pieces: int) -> HeadLayout:
    if layout.num_heads % pieces:
        raise ValueError(f"{layout.num_heads} heads cannot be cut into {pieces} equal parts")
    return replace(layout, num_heads=layout.num_heads // pieces)


def _in_units(features: range, unit: int, size: int) -> range:
    """A range of features in rows or columns of `unit` features each; the last of all `size` may be incomplete."""
    if features.start % unit or (features.stop % unit and features.stop != size):
        raise ValueError(f"features {features.start} to {features.stop} do not consist of whole groups of {unit}")
    return range(features.start // unit, -(-features.stop // unit))
