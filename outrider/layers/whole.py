"""WholeLayer: a pre-norm decoder layer handed to the attention backend in one piece, where one native call does it all.

Only describes the layer; its parts stay what they are and do the same arithmetic where the backend declines.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.kernels.native import LayerWeights
from outrider.layers.attention import SelfAttention
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles
from outrider.mixers.cached import Attend
from outrider.mixers.paged.base import PagedLayer


class WholeLayer:
    def __init__(self, input_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        assert input_norm.eps == mlp_norm.eps
        self._parts = (input_norm, attention, mlp_norm, mlp)
        self._linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        self._described: tuple[Any, LayerWeights] | None = None  # the first product it was made for, and the layer

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, attend: Attend
    ) -> torch.Tensor | None:
        """What the layer's MLP adds to the residual stream, all else added; None if it must be done in parts."""
        weights, attention = self._weights(), self._parts[1]
        if weights is None:
            return None
        norms = None if attention.head_norm is None else attention.head_norm.norms
        paged: PagedLayer = attend.mixer(attention.layer.index)
        return paged.whole(weights, delta, residual, angles, norms)

    def _weights(self) -> LayerWeights | None:
        """None as long as a product is not native: before `pack`, and on other devices and types. Made anew when the
        products are."""
        first = self._linears[0].format.product
        if self._described is not None and self._described[0] is first:
            return self._described[1]
        input_norm, _, mlp_norm, mlp = self._parts
        products = [linear.format.product for linear in self._linears]
        matrices = [product.matrix for product in products if product is not None and product.matrix is not None]
        if len(matrices) < len(products):
            return None
        max_tokens = min(product.few_rows.stop - 1 for product in products if product is not None)
        weights = LayerWeights(input_norm.scale, mlp_norm.scale, input_norm.eps, *matrices,
                               gelu=mlp.activation != "silu", max_tokens=max_tokens)
        self._described = (first, weights)
        return weights
