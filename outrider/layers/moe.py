"""The mixture-of-experts layer that the families share: router, experts, shared expert, projections around them.

The layer declares its tensors, joint or expert by expert. A format owns the experts' weights and products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.core.ranks import ShardSize
from outrider.formats import (
    DenseExperts,
    ExpertsDeclaration,
    ExpertsFormat,
    InputShard,
    LinearFormat,
    ModelSize,
    RankGroup,
    StoredWeight,
    UnsummedRanks,
    WeightSlot,
)
from outrider.kernels import activations, moe, ops
from outrider.layers.base import FeedForward, FormatModule, Module
from outrider.layers.context import StepContext
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.router import Router


@dataclass(frozen=True)
class TransposedSlot(WeightSlot):
    """A slot for a tensor of all experts whose matrices the checkpoint stores transposed, inputs before outputs. The
    target in memory has outputs before inputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        first, *others = super().shape
        return (first, *reversed(others))

    @property
    def has_file_order(self) -> bool:
        return False

    def store(self, tensor: torch.Tensor) -> None:
        super().store(self.turned(tensor))

    @classmethod
    def turned(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose the checkpoint's tensor to outputs before inputs."""
        return tensor.transpose(1, -1)

    @classmethod
    def coded(cls, slot: WeightSlot) -> WeightSlot:
        """Return a slot that transposes an unquantised tensor of the checkpoint and then quantises it."""
        assert slot.quantize is not None
        first, *others = slot.numbers_shape
        return replace(slot, quantize=TurnedNumbers(cls, slot.quantize), numbers_shape=(first, *reversed(others)))


@dataclass(frozen=True)
class TurnedNumbers:
    """Transposes an unquantised tensor of the checkpoint to outputs before inputs, then quantises it."""

    slot_class: type[TransposedSlot]
    quantize: Callable[[torch.Tensor], StoredWeight]

    def __call__(self, tensor: torch.Tensor) -> StoredWeight:
        return self.quantize(self.slot_class.turned(tensor))


class Experts(FormatModule[ExpertsFormat]):
    """A group of MLPs with equal shapes. The activation determines whether they are gated. Families with biases in
    experts use a subclass."""

    declared: ExpertsDeclaration
    format_base = ExpertsFormat
    is_product = True

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        activation: str,
        is_fused: bool = False,
        is_transposed: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        dtype: torch.dtype,
        device: torch.device,
        shard: InputShard | None = None,
    ) -> None:
        """is_fused: the checkpoint has one tensor of all experts for each projection, instead of tensors by expert.
        is_transposed: unquantised tensors are stored as [experts, inputs, outputs]. names: gate, up and down in a
        checkpoint with tensors by expert. shard: this rank holds a part of every expert's inner features."""
        assert activations.is_known(activation)
        assert is_fused or not is_transposed
        self.num_experts = num_experts
        self.activation = activation
        self._is_transposed = is_transposed
        sizes = num_experts, ModelSize(hidden_size), ModelSize(expert_size)
        declared = ExpertsDeclaration(*sizes, self.is_gated, is_fused, dtype, device, shard, names)
        super().__init__(declared, DenseExperts)

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(("moe_intermediate_size", "intermediate_size"), self.declared.expert_size),)

    def shard(self, group: RankGroup) -> None:
        """Shard every expert's inner features over the ranks."""
        self.declare_shard(InputShard.from_group(group))

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        slots = super().weights(prefix)
        if not self._is_transposed:
            return slots
        if any(slot.kind is not None for slot in slots.values()):  # codes of numbers, and the scales that go with them
            return {name: slot if slot.quantize is None else self.transposed(name).coded(slot)
                    for name, slot in slots.items()}
        return {name: self.transposed(name)(slot.target, shard=slot.shard) for name, slot in slots.items()}

    def transposed(self, name: str) -> type[TransposedSlot]:
        """Return the slot class for a checkpoint's tensor that stores inputs before outputs."""
        return TransposedSlot

    @property
    def is_gated(self) -> bool:
        return self.activation not in activations.PLAIN

    @property
    def takes_deltas(self) -> bool:
        """Whether row deltas may change the experts. They may not if the experts have biases, or if their tensors have
        inputs before outputs, because the factors of deltas are then in the other order."""
        return self.biases is None and not self._is_transposed

    @property
    def biases(self) -> moe.ExpertBiases | None:
        """Return this rank's biases. None if the experts have no biases."""
        return None

    def __call__(self, x: torch.Tensor, routed: moe.Routed, context: StepContext,
                 added: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted sum of each token row's experts, plus `added`."""
        biases = () if self.biases is None else (self.biases,)  # a format from outside may know of none
        out = self.format.mix(x, routed, self.activation, added, *biases)
        if context.deltas is not None and context.deltas.change(self):
            context.deltas.mix(out, self, x, routed, added)
        return out


class MoE(FeedForward):
    """A mixture of experts: experts(x) + shared(x). With `latent` the experts work between two projections, while
    router and shared expert read x itself. With `shared_gate` the shared expert's result is multiplied by
    sigmoid(shared_gate(x))."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: FeedForward | None = None,
        shared_name: str = "shared_experts",
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
        router_name: str = "gate",
    ) -> None:
        assert router.rule.num_experts == experts.num_experts
        assert shared_gate is None or shared is not None
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_name = shared_name
        self.shared_gate = shared_gate
        self.latent = latent
        self.router_name = router_name
        self._group: RankGroup | None = None  # the ranks over which the whole result is summed

    def parts(self) -> Sequence[tuple[str, Module]]:
        parts: list[tuple[str, Module]] = [(self.router_name, self.router), ("experts", self.experts)]
        if self.shared is not None:
            parts.append((self.shared_name, self.shared))
        if self.shared_gate is not None:
            parts.append((f"{self.shared_name}_gate", self.shared_gate))
        if self.latent is not None:
            parts += zip(("fc1_latent_proj", "fc2_latent_proj"), self.latent, strict=True)
        return parts

    def shard(self, group: RankGroup) -> None:
        """Shard the experts and the shared expert by inner features. The results of both are added first and summed
        over ranks once. For this, every rank holds the whole projection behind the experts and applies it to its own
        part."""
        unsummed = UnsummedRanks(group.rank, group.count)
        self._group = group
        self.experts.shard(unsummed)
        if self.shared is not None:
            self.shared.shard(unsummed)
        if self.latent is not None:
            self.latent[1].declare_shard(replace(InputShard.from_group(unsummed), pieces=1))

    def readers(self) -> Sequence[LinearFormat | ExpertsFormat]:
        """Return the formats of the weights that read the layer's input, without the router's, which needs the input
        unrounded."""
        shared = () if self.shared is None else self.shared.readers()
        return [*shared, self.experts.format if self.latent is None else self.latent[0].format]

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute the layer for x [tokens, hidden]."""
        mixed = self._mix(x, context)
        return mixed if self._group is None else self._group.sum(mixed)

    def _mix(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return this rank's share of the result, before the sum over ranks."""
        routed = self.router(x, context)
        joint = self._with_shared(x, routed) if context.deltas is None else None
        if joint is not None:
            return joint
        shared = None if self.shared is None else self.shared(x, context)
        if shared is not None and self.shared_gate is not None:
            shared = ops.sigmoid_scale(shared, self.shared_gate(x, context))
        if self.latent is None:
            return self.experts(x, routed, context, shared)
        enter, leave = self.latent
        out = leave(self.experts(enter(x, context), routed, context), context)
        return out if shared is None else out.add_(shared)

    def _with_shared(self, x: torch.Tensor, routed: moe.Routed) -> torch.Tensor | None:
        """Compute experts(x) + shared(x) by one kernel, or return None if no kernel computes both."""
        shared, activation = self.shared, self.experts.activation
        if self.shared_gate is not None or self.latent is not None or not isinstance(shared, GatedMLP):
            return None
        if shared.activation != activation:
            return None
        return self.experts.format.mix_with_shared(x, routed, activation, shared.gate_up.format, shared.down.format)


class ScaledInputMoE(MoE):
    """A mixture of experts that multiplies x by each expert's score before the expert, and adds the results without
    weights to shared(x). The activation inside an expert makes this differ from a weighted sum of results."""

    def readers(self) -> Sequence[LinearFormat | ExpertsFormat]:
        """Return the formats of the shared expert, which alone reads x itself. The other experts read x multiplied by a
        score."""
        return () if self.shared is None else self.shared.readers()

    def _mix(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        ids, weights = self.router(x, context)
        shared = None if self.shared is None else self.shared(x, context)
        ones = torch.ones_like(weights)
        if ids.shape[1] == 1:
            return self.experts((x * weights).to(x.dtype), moe.Routed(ids, ones), context, shared)
        # One row for each pair of a token and an expert.
        rows = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
        pairs = moe.Routed(ids.reshape(-1, 1), ones.reshape(-1, 1))
        made = self.experts(rows, pairs, context).unflatten(0, ids.shape)
        mixed = moe.combine(made, ones)
        return mixed if shared is None else mixed.add_(shared)
