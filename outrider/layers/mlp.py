"""The gated MLP: down(act(gate(x)) * up(x)), with gate and up as one product. Experts are in `layers.moe`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.ranks import ShardSize
from outrider.formats import InputShard, LinearFormat, OutputShard, PackedPart, RankGroup, Ranks
from outrider.kernels.activations import GATED, silu_limit
from outrider.layers.base import FeedForward, Module
from outrider.layers.context import StepContext
from outrider.layers.linear import FusedLinear, Linear

INNER_KEYS = ("intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
              "shared_intermediate_size")
ACTIVATIONS = GATED  # names as in configs
PACKED = "gate_up_proj"


class GatedMLP(FeedForward):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        is_packed: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """is_packed: whether the checkpoint has gate and up in one tensor, gate first."""
        stored = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        if is_packed:
            stored = {PACKED: 2 * intermediate_size}
        assert activation in ACTIVATIONS or silu_limit(activation) is not None
        self.activation = activation
        self.gate_up = FusedLinear(hidden_size, stored, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("", self.gate_up), ("down_proj", self.down)

    def shard_sizes(self) -> Sequence[ShardSize]:
        return (ShardSize(INNER_KEYS, self.down.declared.in_features),)

    def shard(self, group: RankGroup) -> None:
        """Shard the inner features over the ranks."""
        packed = {PACKED: [PackedPart(self.down.declared.in_features)] * 2}
        self.gate_up.declare_shard(OutputShard(Ranks.from_group(group), packed=packed))
        self.down.declare_shard(InputShard.from_group(group))

    def prepare(self) -> None:
        """Choose how the first product rounds its result, to suit the second product. Called when the formats are
        prepared."""
        self.gate_up.format.round_activated_for(self.down.format)

    def readers(self) -> Sequence[LinearFormat]:
        return (self.gate_up.format,)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.down(self.gate_up.activated(x, self.activation, context), context)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, context: StepContext) -> None:
        """Add mlp(x) to residual, in place."""
        self.down.add_to(residual, self.gate_up.activated(x, self.activation, context), context)
