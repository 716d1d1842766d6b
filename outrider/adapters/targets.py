"""Targets: the products of a model that adapters may change, found by the names that PEFT gives their modules.

A target knows the shapes that a file's two factors must have, and brings them into the order and the part that this
rank's product has. Modules with several matrices (q, k and v) are a target for each.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import ClassVar, NamedTuple

import torch

from outrider.adapters.peft_folder import AdapterError, FactorPair
from outrider.core.step import AdapterReach
from outrider.formats import join_names
from outrider.formats.declared import Segment, VocabularyCut
from outrider.kernels.adapter_tables import ALIGNMENT, TargetRange
from outrider.layers.base import Module
from outrider.layers.embedding import Embedding
from outrider.layers.latent_attention import LatentExpansion
from outrider.layers.linear import Linear, TiedLinear
from outrider.layers.moe import Experts
from outrider.models.base import Model

WRAPPERS = ("model", "backbone", "language_model", "transformer")  # names around a decoder, which differ by version


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, eq=False)
class Target(ABC):
    """One product that adapters may change."""

    index: int  # its row in the arena's tables
    name: str  # of the module, without the names around the decoder
    is_planned: bool = True  # the arena is planned with room for it in every adapter
    reach: ClassVar[AdapterReach]  # the kind of products that it is one of

    @abstractmethod
    def sizes(self, rank: int) -> tuple[int, int]:
        """Numbers of the two factors on the rank that holds the most."""

    @abstractmethod
    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        """This rank's part of the factors as they lie in the arena."""

    @abstractmethod
    def check(self, pair: FactorPair) -> int:
        """The rank of a file's factors, or an AdapterError if they are those of another model."""

    def config_name(self, module: str) -> str:
        """The name of a file's module that patterns of the config are matched with."""
        return module

    def changed_parts(self, rest: str) -> set[tuple[int, int]]:
        """The parts of the product that a file's module changes. No two modules of a file may change the same one.
        rest: the module's name behind the target's."""
        return {(0, 0)}

    @property
    def is_served(self) -> bool:
        """Whether adapters may change it with the weights as they are stored here."""
        return True

    @property
    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """The output features of this rank's module, or of each of its experts, that the target is."""

    def room(self, rank: int) -> int:
        return sum(map(aligned, self.sizes(rank)))


class HeldFactors(NamedTuple):
    """The two factors of a target's change in the order in which the arena holds them."""

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


def _check_matrix(pair: FactorPair, num_inputs: int, num_outputs: int) -> int:
    """The rank of factors [rank, inputs] and [outputs, rank]."""
    rank = pair.a_shape[0] if pair.a_shape else 0
    if pair.a_shape != (rank, num_inputs) or pair.b_shape != (num_outputs, rank) or not rank:
        raise AdapterError(f"{pair.a} {list(pair.a_shape)} and {pair.b} {list(pair.b_shape)} do not fit the model, "
                           f"whose weight is [{num_outputs}, {num_inputs}]: the adapter is for another base model")
    return rank


def _held_rows(b: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The rows of a segment that this rank holds."""
    parts = [b[held.start : held.stop] for held in segment.held]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearTarget(Target):
    """One matrix of a linear layer: `a` [rank, inputs] and `b` [rank, outputs]."""

    linear: Linear
    segment: Segment
    reach = AdapterReach.LINEARS

    @property
    def bounds(self) -> tuple[int, int]:
        return self.segment.rows.start, self.segment.rows.stop

    def sizes(self, rank: int) -> tuple[int, int]:
        cut = self.linear.declared.cut
        num_outputs = cut.width(self.segment.size) if isinstance(cut, VocabularyCut) else len(self.segment.rows)
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
    """The projection from the latent space to keys and values, which is used from both sides: `a` [rank, latent] and
    `b` [rank, heads x (key | value)]."""

    expansion: LatentExpansion
    reach = AdapterReach.LATENTS

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
    """A table of tokens: `a` [vocabulary, rank], which is looked up like the table itself, and `b` [rank, hidden]. With
    several ranks each holds all of it."""

    embedding: Embedding
    is_planned: bool = False
    reach = AdapterReach.EMBEDDINGS

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.embedding.declared.num_inputs

    @property
    def vocab_size(self) -> int:
        return self.embedding.declared.segments[0].size

    def sizes(self, rank: int) -> tuple[int, int]:
        return rank * self.vocab_size, rank * self.embedding.declared.num_inputs

    def check(self, pair: FactorPair) -> int:
        if not pair.is_embedding:
            raise AdapterError(f"{pair.a}: {self.name} is an embedding, whose factors are lora_embedding_A and _B")
        return _check_matrix(pair, self.vocab_size, self.embedding.declared.in_features)

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        (pair,) = pairs
        return HeldFactors(pair.a.t(), pair.b.t(), pair.b.shape[1], pair.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsTarget(Target):
    """One of the two projections of all experts: `a` [experts, rank, inputs] and `b` [experts, rank, outputs]. Files
    hold factors expert by expert, for all experts in three axes, or as PEFT wraps a joint parameter, in two. With
    several ranks each holds a part of the inner features."""

    experts: Experts
    is_down: bool
    is_planned: bool = False
    reach = AdapterReach.EXPERTS

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.held_outputs

    @property
    def is_served(self) -> bool:
        return self.experts.format.plain_parts is not None

    @property
    def num_inputs(self) -> int:
        declared = self.experts.declared
        return declared.expert_size if self.is_down else declared.hidden_size

    @property
    def is_gated(self) -> bool:
        return self.experts.is_gated and not self.is_down

    @cached_property
    def parts(self) -> Mapping[str, range]:
        """The output features of each matrix, by its name in files."""
        size = self.experts.declared.expert_size
        if self.is_down:
            return {"down_proj": range(self.experts.declared.hidden_size)}
        if not self.experts.is_gated:
            return {"up_proj": range(size)}
        return {"gate_up_proj": range(2 * size), "gate_proj": range(size), "up_proj": range(size, 2 * size)}

    @property
    def num_outputs(self) -> int:
        return max(part.stop for part in self.parts.values())

    @cached_property
    def _inner(self) -> range:
        """The inner features of an expert that this rank holds."""
        declared = self.experts.declared
        return range(declared.expert_size) if declared.cut is None else declared.cut.ranks.share(declared.expert_size)

    @property
    def held_inputs(self) -> int:
        """Input features of this rank's part."""
        return len(self._inner) if self.is_down else self.num_inputs

    @property
    def held_outputs(self) -> int:
        """Output features of this rank's part."""
        return self.num_outputs if self.is_down else (1 + self.is_gated) * len(self._inner)

    def sizes(self, rank: int) -> tuple[int, int]:
        # A gated expert whose gate and up were adapted apart has the ranks of both.
        count = self.experts.num_experts
        return count * rank * self.held_inputs, count * rank * self.held_outputs

    def common_name(self, rest: str) -> str:
        """A module's name below that of the experts, with the name that most families have for its matrix."""
        expert, _, matrix = rest.rpartition(".")
        names = dict(zip(self.experts.declared.names, ("gate_proj", "up_proj", "down_proj"), strict=True))
        return join_names(expert, names.get(matrix, matrix))

    def takes(self, rest: str, pair: FactorPair) -> bool:
        """Whether a module below the experts' name is (a part of) this projection."""
        expert, _, matrix = rest.rpartition(".")
        if matrix in self.parts:
            return expert == "" or expert in self._expert_names
        # PEFT's wrapper of a joint parameter does not say which one it is; the shapes do.
        shapes = pair.a_shape[-1:] + pair.b_shape[:1]
        if rest not in ("", "base_layer") or shapes != (self.num_inputs, self.num_outputs):
            return False
        if not self.experts.is_gated and self.num_inputs == self.num_outputs:
            raise AdapterError(f"{pair.a}: both projections of the experts have the shape {list(shapes[::-1])}: "
                               "which one is meant is not known; save the factors under the projections' names")
        return True

    def changed_parts(self, rest: str) -> set[tuple[int, int]]:
        """Experts, each with the first output feature of the matrices that are changed: gate and up are two."""
        expert, _, matrix = rest.rpartition(".")
        outputs = self.parts.get(matrix, range(self.num_outputs))
        begins = {part.start for part in self.parts.values() if part.start in outputs}
        experts = [int(expert)] if expert in self._expert_names else range(self.experts.num_experts)
        return {(index, begin) for index in experts for begin in begins}

    @cached_property
    def _expert_names(self) -> frozenset[str]:
        return frozenset(map(str, range(self.experts.num_experts)))

    def config_name(self, module: str) -> str:
        """PEFT's wrapper of a joint parameter goes by the parameter's name."""
        experts = module.removesuffix(".base_layer")
        return f"{experts}.{next(iter(self.parts))}" if experts.endswith("experts") else module

    def check(self, pair: FactorPair) -> int:
        return self._rank_of(pair, pair.a_shape, pair.b_shape)

    def _rank_of(self, pair: FactorPair, a: tuple[int, ...], b: tuple[int, ...]) -> int:
        count, inputs = self.experts.num_experts, self.num_inputs
        outputs = {len(part) for part in self.parts.values()}
        if len(a) == len(b) == 3 and a[0] == b[0] == count and a[2] == inputs and a[1] == b[2] and b[1] in outputs:
            return a[1]
        if len(a) == len(b) == 2 and a[1] == inputs and b[0] in outputs and a[0] == b[1]:
            is_joint = "experts.lora" in pair.a or "experts.base_layer." in pair.a
            if not is_joint:
                return a[0]
            if a[0] % count == 0:
                return a[0] // count
        raise AdapterError(f"{pair.a} {list(a)} and {pair.b} {list(b)} do not fit {count} experts of {inputs} inputs: "
                           "the adapter is for another base model")

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        """Scales are folded into the second factor: those of gate and up may differ."""
        count = self.experts.num_experts
        pieces: list[tuple[slice, range, torch.Tensor, torch.Tensor]] = []  # experts, outputs, factors with experts
        for pair in pairs:
            expert, _, matrix = pair.module.rpartition(".")
            a, b = pair.a, pair.b.double() * pair.scale
            if expert in self._expert_names:
                own = slice(int(expert), int(expert) + 1)
                pieces.append((own, self.parts[matrix], a[None], b[None]))
            elif a.dim() == 3:
                pieces.append((slice(None), self.parts[matrix], a, b))
            else:
                b = b.unflatten(1, (-1, count)).permute(2, 0, 1)  # PEFT has the experts behind the ranks
                pieces.append((slice(None), range(self.num_outputs), a.unflatten(0, (count, -1)), b))
        used = torch.zeros(count, dtype=torch.int64)
        for own, _, a, _ in pieces:
            used[own] += a.shape[1]
        rank = int(used.max())
        joint_a = pairs[0].a.new_zeros(count, rank, self.num_inputs)
        joint_b = torch.zeros(count, self.num_outputs, rank, dtype=torch.float64)
        used.zero_()
        for own, part, a, b in pieces:
            first = int(used[own].max())
            joint_a[own, first : first + a.shape[1]] = a.to(joint_a.dtype)
            joint_b[own, part.start : part.stop, first : first + a.shape[1]] = b
            used[own] += a.shape[1]
        held = slice(self._inner.start, self._inner.stop)
        if self.is_down:
            joint_a = joint_a[:, :, held]
        else:
            joint_b = joint_b.unflatten(1, (1 + self.is_gated, -1))[:, :, held].flatten(1, 2)
        return HeldFactors(joint_a, joint_b.transpose(1, 2), rank, 1.0)


def plain_name(module: str) -> str:
    """A module's name without the names around the decoder."""
    parts = module.split(".")
    while parts and parts[0] in WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


@dataclass(frozen=True)
class Targets:
    """All targets of a model. Linear layers are found by identity, as layers ask for their adapters."""

    all: tuple[Target, ...]
    of_module: Mapping[int, tuple[Target, ...]] = field(repr=False)  # by the id of the module that multiplies
    slot_name: Callable[[str], str] = field(repr=False, default=str)  # the model's name for a tensor of other files
    fixed: tuple[str, ...] = ()  # experts that adapters cannot change

    @classmethod
    def from_model(cls, model: Model) -> Targets:
        found: list[Target] = []
        of_module: dict[int, list[Target]] = {}
        modules = dict((id(module), (plain_name(name), module)) for name, module in named_modules(model))
        if isinstance(model.lm_head, TiedLinear):
            modules[id(model.lm_head)] = "lm_head", model.lm_head
        for key, (name, module) in modules.items():
            for target in _targets_of(name, module, len(found)):
                found.append(target)
                of_module.setdefault(key, []).append(target)
        fixed = [name for name, module in modules.values() if isinstance(module, Experts) and not module.is_adaptable]
        return cls(tuple(found), {key: tuple(own) for key, own in of_module.items()}, model.slot_name, tuple(fixed))

    @cached_property
    def ranges(self) -> Mapping[int, TargetRange]:
        """The targets of each linear layer, by its id."""
        return {key: TargetRange(own[0].index, tuple(target.bounds[1] for target in own))
                for key, own in self.of_module.items() if isinstance(own[0], LinearTarget)}

    @property
    def reach(self) -> AdapterReach:
        """The parts of the model that adapters may change."""
        return reduce(operator.or_, (target.reach for target in self.all if target.is_served), AdapterReach.LINEARS)

    @property
    def bounds(self) -> list[int]:
        """Begin and end of every target's output features within its layer, one target behind the other."""
        return [bound for target in self.all for bound in target.bounds]

    @cached_property
    def _by_name(self) -> Mapping[str, Target]:
        return {target.name: target for target in self.all if not isinstance(target, ExpertsTarget)}

    @cached_property
    def _experts(self) -> Mapping[str, tuple[ExpertsTarget, ...]]:
        by_name: dict[str, list[ExpertsTarget]] = {}
        for target in self.all:
            if isinstance(target, ExpertsTarget):
                by_name.setdefault(target.name, []).append(target)
        return {name: tuple(own) for name, own in by_name.items()}

    def find(self, module: str, pair: FactorPair) -> tuple[Target, str]:
        """The target of a file's module, and the rest of the module's name behind it. Refused by the tensor's name if
        the model has none."""
        name = plain_name(module)
        # An adapter has the names of transformers' modules, the model those of its makers' files.
        published = plain_name(self.slot_name(f"model.{name}.weight").removesuffix(".weight"))
        for known in (name, published):
            if (target := self._by_name.get(known)) is not None:
                return target, ""
        for experts, targets in self._experts.items():
            if (inside := _below(experts, name, published)) is None:
                continue
            rest = targets[0].common_name(inside)
            own = next((target for target in targets if target.takes(rest, pair)), None)
            if own is not None:
                if not own.is_served:
                    raise AdapterError(f"{pair.a}: experts that stay in the bits of their files take no adapters: "
                                       "start the engine with keep_quantized=False")
                return own, rest
        if any(_below(experts, name, published) is not None for experts in self.fixed):
            raise AdapterError(f"{pair.a}: experts with biases, or whose weights are stored input by output, take no "
                               "adapters: train the other layers")
        raise AdapterError(f"{pair.a}: the model has no {name} that an adapter may change: the adapter is for another "
                           "base model")

    @staticmethod
    def weight_shape(target: Target) -> tuple[int, ...]:
        """The shape of the weight that a target changes, as the checkpoint has it."""
        match target:
            case LinearTarget(linear=linear, segment=segment):
                return segment.size, linear.declared.in_features
            case EmbeddingTarget(embedding=embedding):
                return target.vocab_size, embedding.declared.in_features
        return ()

    def planned_room(self, rank: int) -> int:
        """Numbers of an adapter of this rank on all planned targets."""
        return sum(target.room(rank) for target in self.all if target.is_planned)


def _below(owner: str, *names: str) -> str | None:
    """The rest of the first name that is the owner's, or that of a module below it."""
    return next((name[len(owner) + 1 :] for name in names if f"{name}.".startswith(f"{owner}.")), None)


def named_modules(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """A module and its parts, with their names in the checkpoint."""
    yield prefix, module
    for name, part in module.parts():
        yield from named_modules(part, join_names(prefix, name))


def _targets_of(name: str, module: Module, index: int) -> list[Target]:
    if isinstance(module, Linear):
        return [LinearTarget(index=index + place, name=join_names(name, segment.name), linear=module, segment=segment)
                for place, segment in enumerate(module.declared.segments)]
    if isinstance(module, LatentExpansion):
        return [ExpansionTarget(index=index, name=name, expansion=module)]
    if isinstance(module, Embedding):
        return [EmbeddingTarget(index=index, name=name, embedding=module)]
    if isinstance(module, Experts) and module.is_adaptable:
        return [ExpertsTarget(index=index + is_down, name=name, experts=module, is_down=bool(is_down))
                for is_down in (0, 1)]
    return []
