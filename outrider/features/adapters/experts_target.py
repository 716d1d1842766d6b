"""ExpertsTarget: one projection of all experts of a MoE layer, as a target of LoRA adapters.

Adapter files hold its factors in several ways: a module for each expert, tensors of three axes for all experts, or the
wrapper that PEFT puts around a joint parameter. All of them are joined into the two factors that the arena holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from outrider.core.step_messages import DeltaReach
from outrider.features.adapters.peft_folder import AdapterError, FactorPair
from outrider.features.adapters.target import HeldFactors, NamedPair, Target
from outrider.formats import join_names
from outrider.layers.moe import Experts


class ExpertFactors(NamedTuple):
    """The two factors that one module of a file has. They cover some of the experts and some of their output
    features."""

    experts: slice
    outputs: range
    a: torch.Tensor  # [experts, rank, inputs]
    b: torch.Tensor  # [experts, outputs, rank] float64, with the scale of the product

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsTarget(Target):
    """One of the two projections of all experts, with LoRA factors `a` [experts, rank, inputs] and `b` [experts, rank,
    outputs]. With several ranks each holds a part of the inner features."""

    experts: Experts
    is_down: bool
    is_planned: bool = False
    reach = DeltaReach.EXPERTS

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
        """The range of output features of each matrix, by the matrix's name in files."""
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
        """The range of an expert's inner (intermediate) features that this rank holds."""
        declared = self.experts.declared
        size, shard = declared.expert_size, declared.shard
        return range(size) if shard is None else shard.ranks.share(size)

    @property
    def held_inputs(self) -> int:
        """The number of input features of this rank's part."""
        return len(self._inner) if self.is_down else self.num_inputs

    @property
    def held_outputs(self) -> int:
        """The number of output features of this rank's part."""
        return self.num_outputs if self.is_down else (1 + self.is_gated) * len(self._inner)

    def sizes(self, rank: int) -> tuple[int, int]:
        count = self.experts.num_experts
        return count * rank * self.held_inputs, count * rank * self.held_outputs

    def common_name(self, rest: str) -> str:
        """The module's name relative to the experts' name. Its last part becomes gate_proj, up_proj or down_proj, as
        most families name the matrix."""
        expert, _, matrix = rest.rpartition(".")
        names = dict(zip(self.experts.declared.names, ("gate_proj", "up_proj", "down_proj"), strict=True))
        return join_names(expert, names.get(matrix, matrix))

    def takes(self, rest: str, pair: FactorPair) -> bool:
        """Whether a module of an adapter file changes this projection or a part of it. rest: the module's name below
        the experts' name."""
        expert, _, matrix = rest.rpartition(".")
        if matrix in self.parts:
            return expert == "" or expert in self._expert_names
        # PEFT's wrapper of a joint parameter does not say which one it is; the shapes do.
        shapes = pair.a_shape[-1:] + pair.b_shape[:1]
        if rest not in ("", "base_layer") or shapes != (self.num_inputs, self.num_outputs):
            return False
        if not self.experts.is_gated and self.num_inputs == self.num_outputs:
            raise AdapterError(f"{pair.a}: gate_up_proj and down_proj of the experts both have the shape "
                               f"{list(shapes[::-1])}, so that it is not clear which one this tensor changes; save the "
                               "factors under the projections' names")
        return True

    def changed_parts(self, rest: str) -> set[tuple[int, int]]:
        """Return a pair (expert, first output feature) for every matrix that the module changes; gate and up are two
        matrices."""
        expert, _, matrix = rest.rpartition(".")
        outputs = self.parts.get(matrix, range(self.num_outputs))
        begins = {part.start for part in self.parts.values() if part.start in outputs}
        experts = [int(expert)] if expert in self._expert_names else range(self.experts.num_experts)
        return {(index, begin) for index in experts for begin in begins}

    def held_rank(self, rest: str, rank: int) -> int:
        """The LoRA rank for which the arena must have room. If gate and up have separate factors, these are stored one
        after the other, so the rank is doubled."""
        return 2 * rank if self.is_gated and rest.endswith(("gate_proj", "up_proj")) else rank

    @cached_property
    def _expert_names(self) -> frozenset[str]:
        return frozenset(map(str, range(self.experts.num_experts)))

    def config_name(self, module: str) -> str:
        """Return the name that is matched with the patterns in the adapter's config. If PEFT has wrapped a joint
        parameter, it is the name of the parameter."""
        experts = module.removesuffix(".base_layer")
        return f"{experts}.{next(iter(self.parts))}" if experts.endswith("experts") else module

    def check(self, pair: FactorPair) -> int:
        a, b = pair.a_shape, pair.b_shape
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
                           "the adapter is for another base model. Use its own")

    def factors(self, pairs: Sequence[NamedPair]) -> HeldFactors:
        """Join the factors of all modules. Scales are folded into the second factor, because gate and up may have
        different ones."""
        pieces = [self._factors_of(pair) for pair in pairs]
        count = self.experts.num_experts
        used = torch.zeros(count, dtype=torch.int64)  # ranks of each expert
        for own in pieces:
            used[own.experts] += own.rank
        rank = int(used.max())
        joint_a = pairs[0].a.new_zeros(count, rank, self.num_inputs)
        joint_b = torch.zeros(count, self.num_outputs, rank, dtype=torch.float64)
        used.zero_()
        for own in pieces:
            first = int(used[own.experts].max())
            joint_a[own.experts, first : first + own.rank] = own.a.to(joint_a.dtype)
            joint_b[own.experts, own.outputs.start : own.outputs.stop, first : first + own.rank] = own.b
            used[own.experts] += own.rank
        held = slice(self._inner.start, self._inner.stop)
        if self.is_down:
            joint_a = joint_a[:, :, held]
        else:
            joint_b = joint_b.unflatten(1, (1 + self.is_gated, -1))[:, :, held].flatten(1, 2)
        return HeldFactors(joint_a, joint_b.transpose(1, 2), rank, 1.0)

    def _factors_of(self, pair: NamedPair) -> ExpertFactors:
        count = self.experts.num_experts
        expert, _, matrix = pair.module.rpartition(".")
        a, b = pair.a, pair.b.double() * pair.scale
        if expert in self._expert_names:
            return ExpertFactors(slice(int(expert), int(expert) + 1), self.parts[matrix], a[None], b[None])
        if a.dim() == 3:
            return ExpertFactors(slice(None), self.parts[matrix], a, b)
        b = b.unflatten(1, (-1, count)).permute(2, 0, 1)  # PEFT has the experts behind the ranks
        return ExpertFactors(slice(None), range(self.num_outputs), a.unflatten(0, (count, -1)), b)
