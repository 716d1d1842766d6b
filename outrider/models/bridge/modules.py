"""Modules that replace those of transformers. Each wraps a layer of this package.

They take tensors [.., features] with any leading axes, as transformers' modules do, and call layers with token rows and
the step's context. On the meta device, where a model is outlined, they only compute the shape of their result."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.kernels.moe import Routed
from outrider.layers import Embedding, Experts, GatedMLP, Linear, RMSNorm, SelfAttention
from outrider.models.bridge.current_step import CurrentStep


class BridgedModule(nn.Module):
    """A module of transformers' model without parameters: the layer inside holds the weights in their format."""

    def __init__(self, step: CurrentStep) -> None:
        super().__init__()
        self.step = step


class WeightIsRead(AttributeError):
    """Raised if code reads the weight or bias of a linear module. The layer stores both in a form that other code
    cannot use."""


class BridgedLinear(BridgedModule):
    def __init__(self, linear: Linear, step: CurrentStep) -> None:
        super().__init__(step)
        self.linear = linear
        self.in_features, self.out_features = int(linear.in_features), int(linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if x.is_meta:
            return x.new_empty(shape)
        return self.linear(x.reshape(-1, self.in_features), self.step.context).view(shape)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise WeightIsRead(name)
        return super().__getattr__(name)


class JoinedProduct:
    """One product for several linear modules that are called one after the other with the same tensor."""

    def __init__(self, linear: Linear, sizes: list[int], step: CurrentStep) -> None:
        self.linear, self.sizes, self.step = linear, sizes, step
        self._input: torch.Tensor | None = None
        self._results: tuple[torch.Tensor, ...] = ()

    def result(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the output of module `index` for x. The first module called with x computes the outputs of all."""
        if self._input is not x:
            if x.is_meta:
                joined = x.new_empty(*x.shape[:-1], sum(self.sizes))
            else:
                joined = self.linear(x.reshape(-1, x.shape[-1]), self.step.context).view(*x.shape[:-1], -1)
            self._input, self._results = x, joined.split(self.sizes, dim=-1)
        result = self._results[index]
        if index == len(self.sizes) - 1:  # a tensor that is kept would cost memory until the next step
            self._input, self._results = None, ()
        return result


class BridgedPart(BridgedModule):
    """One of the modules that share a `JoinedProduct`."""

    def __init__(self, joined: JoinedProduct, index: int) -> None:
        super().__init__(joined.step)
        self.joined, self.index = joined, index
        self.out_features = joined.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined.result(x, self.index)


class BridgedHead(BridgedModule):
    """The output projection. Its logits are float32 (float64 in a float64 model)."""

    def __init__(self, linear: Linear, step: CurrentStep) -> None:
        super().__init__(step)
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], int(self.linear.out_features))
        if x.is_meta:
            return x.new_empty(shape)
        return self.linear.wide(x.reshape(-1, x.shape[-1]), self.step.context).view(shape)


class BridgedEmbedding(BridgedModule):
    """The token embedding. Vectors that a request gives instead of token ids replace its rows."""

    def __init__(self, embedding: Embedding, step: CurrentStep) -> None:
        super().__init__(step)
        self.embedding, self.hidden_size = embedding, int(embedding.declared.num_inputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        shape = (*tokens.shape, self.hidden_size)
        if tokens.is_meta:
            return torch.empty(shape, dtype=self.embedding.declared.dtype, device="meta")
        return self.embedding(tokens.reshape(-1), self.step.context).view(shape)


class BridgedNorm(BridgedModule):
    def __init__(self, norm: RMSNorm, step: CurrentStep) -> None:
        super().__init__(step)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x) if x.is_meta else self.norm(x)


class BridgedMLP(BridgedModule):
    def __init__(self, mlp: GatedMLP, step: CurrentStep) -> None:
        super().__init__(step)
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_meta:
            return torch.empty_like(x)
        return self.mlp(x.reshape(-1, x.shape[-1]), self.step.context).view(x.shape)


class BridgedExperts(BridgedModule):
    def __init__(self, experts: Experts, step: CurrentStep) -> None:
        super().__init__(step)
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute the experts. hidden_states: [tokens, hidden]; top_k_index, top_k_weights: [tokens, k]."""
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states)
        wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        routed = Routed(top_k_index.contiguous(), top_k_weights.to(wide).contiguous())
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.experts(rows, routed, self.step.context).view(hidden_states.shape)


class BridgedAttention(BridgedModule):
    """Self-attention as one block of this package: one product for q, k and v, then kernels that do norms, rope, cache
    write and attention together."""

    def __init__(self, attention: SelfAttention, step: CurrentStep) -> None:
        super().__init__(step)
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
                **_: Any) -> tuple[torch.Tensor, None]:
        if hidden_states.is_meta:
            return torch.empty_like(hidden_states), None
        angles = self.step.angles_of(*position_embeddings)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.attention(rows, angles, self.step.context).view(hidden_states.shape), None
