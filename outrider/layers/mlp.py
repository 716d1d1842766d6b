"""The gated MLP: down(act(gate(x)) * up(x)), with gate and up as one product.

Dense only: experts are layers of their own.
"""

from __future__ import annotations

import torch

from outrider.kernels import ops
from outrider.layers.linear import FusedLinear, Linear, WeightSlot
from outrider.layers.norm import RMSNorm

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # by the names configs use


class GatedMLP:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        assert activation in ACTIVATIONS
        self.activation = activation
        self.gate_up = FusedLinear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, WeightSlot]:
        return self.gate_up.weights(prefix) | self.down.weights(f"{prefix}.down_proj")

    def finalize(self) -> None:
        self.gate_up.finalize()
        self.down.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x))

    def add_single(self, residual: torch.Tensor, norm: RMSNorm) -> None:
        """residual += mlp(norm(residual)) for one token row on a GPU (`ops.is_single`)."""
        x = self.gate(norm(residual))
        ops.linear_add(residual, x, self.down.format.weight, self.down.format.bias)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """act(gate(x)) * up(x)"""
        if self.gate_up.format.bias is None and ops.gates_thin(x, self.gate_up.format.weight):
            return ops.gated_linear(x, self.gate_up.format.weight, self.activation)
        return ops.gated(self.gate_up(x), self.activation)
