"""Finds the weights of a model that LoRA adapters may change (targets), by the names that PEFT gives their modules.

Modules with several matrices (q, k and v) have a target for each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.experts_target import ExpertsTarget
from outrider.features.adapters.peft_folder import AdapterError, FactorPair
from outrider.features.adapters.target import (
    EmbeddingTarget,
    ExpansionTarget,
    JointModule,
    LinearTarget,
    Target,
    TargetPart,
)
from outrider.formats import join_names
from outrider.kernels.delta_tables import TargetRange
from outrider.layers.base import Module
from outrider.layers.embedding import Embedding
from outrider.layers.latent_attention import LatentExpansion
from outrider.layers.linear import FusedLinear, Linear, TiedLinear
from outrider.layers.moe import Experts
from outrider.models.base import Model

WRAPPERS = ("model", "backbone", "language_model", "transformer")  # names around a decoder, which differ by version


def plain_name(module: str) -> str:
    """A module's name without the prefixes of wrappers around the decoder."""
    parts = module.split(".")
    while parts and parts[0] in WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


@dataclass(frozen=True)
class Targets:
    """All adapter targets of a model. A layer's targets are found by the id of the layer object."""

    all: tuple[Target, ...]
    of_module: Mapping[int, tuple[Target, ...]] = field(repr=False)  # by the id of the module that multiplies
    slot_name: Callable[[str], str] = field(repr=False, default=str)  # the model's name for a tensor of other files
    fixed: tuple[str, ...] = ()  # experts that adapters cannot change
    joint: Mapping[str, JointModule] = field(repr=False, default_factory=dict)  # by the module's name

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
        fixed = [name for name, module in modules.values() if isinstance(module, Experts) and not module.takes_deltas]
        joint = {join_names(name, matrix): JointModule(_named(of_module[key], name, parts), layout)
                 for key, (name, module) in modules.items() if isinstance(module, FusedLinear)
                 for matrix, (parts, layout) in module.joint.items()}
        return cls(tuple(found), {key: tuple(own) for key, own in of_module.items()}, model.slot_name, tuple(fixed),
                   joint)

    @cached_property
    def ranges(self) -> Mapping[int, TargetRange]:
        """The indexes of each linear layer's targets, by the layer's id."""
        return {key: TargetRange(own[0].index, tuple(target.bounds[1] for target in own))
                for key, own in self.of_module.items() if isinstance(own[0], LinearTarget)}

    @property
    def reach(self) -> DeltaReach:
        """The kinds of products that adapters of this model may change."""
        return reduce(operator.or_, (target.reach for target in self.all if target.is_served), DeltaReach.LINEARS)

    @property
    def bounds(self) -> list[int]:
        """A flat list with the begin and end of every target's output features within its layer, in the order of
        targets."""
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

    def find(self, module: str, pair: FactorPair) -> tuple[TargetPart, ...]:
        """Return the targets that a file's module changes, usually one. Raises an error that names the tensor if the
        model has no such module."""
        name = plain_name(module)
        # An adapter has the names of transformers' modules, the model those of its makers' files.
        published = plain_name(self.slot_name(f"model.{name}.weight").removesuffix(".weight"))
        for known in (name, published):
            if (target := self._by_name.get(known)) is not None:
                return (TargetPart(target),)
        if name in self.joint:
            return self.joint[name].parts(pair)
        for experts, targets in self._experts.items():
            if (inside := _below(experts, name, published)) is None:
                continue
            rest = targets[0].common_name(inside)
            own = next((target for target in targets if target.takes(rest, pair)), None)
            if own is not None:
                if not own.is_served:
                    raise AdapterError(f"{pair.a}: adapters cannot change experts that stay quantised: start the "
                                       "engine with keep_quantized=False")
                return (TargetPart(own, rest),)
        if any(_below(experts, name, published) is not None for experts in self.fixed):
            raise AdapterError(f"{pair.a}: adapters cannot change this model's experts, which have biases or "
                               "transposed weights: train an adapter for the other layers")
        raise AdapterError(f"{pair.a}: the model has no {name} that an adapter may change: the adapter is for another "
                           "base model")

    def planned_room(self, rank: int) -> int:
        """The number of elements that an adapter of this rank takes if it changes all planned targets."""
        return sum(target.room(rank) for target in self.all if target.is_planned)


def _below(owner: str, *names: str) -> str | None:
    """Return the first of `names` that is the owner's name or lies below it, without the owner's prefix. None if there
    is no such name."""
    return next((name[len(owner) + 1 :] for name in names if f"{name}.".startswith(f"{owner}.")), None)


def named_modules(module: Module, prefix: str = "") -> Iterator[tuple[str, Module]]:
    """Yield a module and, recursively, its parts, each with its name in the checkpoint."""
    yield prefix, module
    for name, part in module.parts():
        yield from named_modules(part, join_names(prefix, name))


def _named(targets: Sequence[Target], layer: str, parts: Sequence[str]) -> tuple[LinearTarget, ...]:
    """Those linear targets of a layer that have one of the given part names, in the order of `targets`."""
    names = [join_names(layer, part) for part in parts]
    return tuple(target for target in targets if isinstance(target, LinearTarget) and target.name in names)


def _targets_of(name: str, module: Module, index: int) -> list[Target]:
    if isinstance(module, Linear):
        return [LinearTarget(index=index + place, name=join_names(name, segment.name), linear=module, segment=segment)
                for place, segment in enumerate(module.declared.segments)]
    if isinstance(module, LatentExpansion):
        return [ExpansionTarget(index=index, name=name, expansion=module)]
    if isinstance(module, Embedding):
        return [EmbeddingTarget(index=index, name=name, embedding=module)]
    if isinstance(module, Experts) and module.takes_deltas:
        return [ExpertsTarget(index=index + is_down, name=name, experts=module, is_down=bool(is_down))
                for is_down in (0, 1)]
    return []
