"""The mixture-of-experts layer that the families share: router, experts, shared expert, projections around them.

Knows the names of its tensors, fused or expert by expert; how the products are carried out is for `kernels.moe`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kernels import moe
from outrider.layers.linear import Linear, WeightSlot
from outrider.layers.router import Router


class FeedForward(Protocol):
    """What stands in a layer after attention: an MLP, or a mixture of them."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def weights(self, prefix: str) -> dict[str, WeightSlot]: ...

    def finalize(self) -> None: ...


class Experts:
    """Equal MLPs without biases, gated or not as their activation says, one tensor for each projection of all."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        expert_size: int,
        *,
        activation: str,
        is_fused: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """is_fused: the checkpoint holds all experts in one tensor for each projection, and not expert by expert."""
        assert activation in moe.GATED + moe.PLAIN
        self.num_experts = num_experts
        self.expert_size = expert_size
        self.activation = activation
        self.is_fused = is_fused
        rows = 2 * expert_size if self.is_gated else expert_size
        self.gate_up = torch.empty(num_experts, rows, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, hidden_size, expert_size, dtype=dtype, device=device)

    @property
    def is_gated(self) -> bool:
        return self.activation in moe.GATED

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        """Two tensors of all experts, or one for every expert and projection: views of the same two weights."""
        first = "gate_up_proj" if self.is_gated else "up_proj"
        if self.is_fused:
            return {
                f"{prefix}.{first}": WeightSlot.of(self.gate_up),
                f"{prefix}.down_proj": WeightSlot.of(self.down),
            }
        slots: dict[str, WeightSlot] = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            halves = gate_up.split(self.expert_size)
            for name, half in zip(("gate_proj", "up_proj") if self.is_gated else ("up_proj",), halves, strict=True):
                slots[f"{prefix}.{expert}.{name}.weight"] = WeightSlot.of(half)
            slots[f"{prefix}.{expert}.down_proj.weight"] = WeightSlot.of(down)
        return slots

    def finalize(self) -> None:
        """Nothing is derived from the weights."""

    def __call__(self, x: torch.Tensor, routed: moe.Routed, added: torch.Tensor | None = None) -> torch.Tensor:
        """What the experts make of x, and `added`."""
        return moe.experts(x, routed.ids, routed.weights, self.gate_up, self.down, self.activation, added)


class MoE:
    """experts(x) + shared(x). With `latent` the experts work between two projections, and the router and the shared
    expert still see x itself; with `shared_gate` a sigmoid of one product scales what the shared expert adds.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        shared: FeedForward | None = None,
        shared_name: str = "shared_experts",
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        assert router.rule.num_experts == experts.num_experts
        assert shared_gate is None or shared is not None
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_name = shared_name
        self.shared_gate = shared_gate
        self.latent = latent

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.router.weights(f"{prefix}.gate") | self.experts.weights(f"{prefix}.experts")
        if self.shared is not None:
            slots |= self.shared.weights(f"{prefix}.{self.shared_name}")
        if self.shared_gate is not None:
            slots |= self.shared_gate.weights(f"{prefix}.{self.shared_name}_gate")
        if self.latent is not None:
            first, second = self.latent
            slots |= first.weights(f"{prefix}.fc1_latent_proj") | second.weights(f"{prefix}.fc2_latent_proj")
        return slots

    def finalize(self) -> None:
        for part in (self.router, self.experts, self.shared, self.shared_gate, *(self.latent or ())):
            if part is not None:
                part.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]."""
        routed = self.router(x)
        shared = None if self.shared is None else self.shared(x)
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        if self.latent is None:
            return self.experts(x, routed, shared)
        enter, leave = self.latent
        out = leave(self.experts(enter(x), routed))
        return out if shared is None else out.add_(shared)
