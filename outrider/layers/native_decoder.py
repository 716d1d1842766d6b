"""NativeDecoderLayer: a decoder layer that is one native call on the CPU, with the bits of its parts done one by one.

It hands weights and token rows to the native attention backend; where that declines, the plain layer runs.
"""

from __future__ import annotations

import torch

from outrider.kernels.native import LayerWeights
from outrider.layers.attention import SelfAttention
from outrider.layers.base import DecoderLayer
from outrider.layers.decoder import FusedLayer, PreNormLayer
from outrider.layers.rotary import Angles
from outrider.mixers.cached import Attend
from outrider.mixers.paged.base import PagedLayer
from outrider.mixers.paged.native_backend import NativeBackend


class NativeDecoderLayer(FusedLayer):
    def __init__(self, plain: PreNormLayer, attention: SelfAttention, weights: LayerWeights) -> None:
        super().__init__(plain)
        self.index, self.native_weights = attention.layer.index, weights
        self.head_norms = None if attention.head_norm is None else attention.head_norm.norms

    @classmethod
    def try_build(cls, plain: DecoderLayer) -> NativeDecoderLayer | None:
        """None if the layer is of another shape, or if a format has no native product (other devices and types)."""
        if not isinstance(plain, PreNormLayer) or (parts := plain.attention_and_mlp()) is None:
            return None
        attention, mlp = parts
        linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        products = [product for linear in linears if (product := linear.format.native_product()) is not None]
        if len(products) < len(linears) or plain.input_norm.eps != plain.mlp_norm.eps:
            return None
        weights = LayerWeights(plain.input_norm.scale, plain.mlp_norm.scale, plain.input_norm.eps,
                               *(product.matrix for product in products), gelu=mlp.activation != "silu",
                               max_tokens=min(product.max_rows for product in products))
        return cls(plain, attention, weights)

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, attend: Attend
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        paged: PagedLayer = attend.mixer(self.index)
        if isinstance(paged.backend, NativeBackend):
            added = paged.backend.decoder_layer(paged, self.native_weights, delta, residual, angles, self.head_norms)
            if added is not None:
                return added, residual
        return self.plain(delta, residual, angles, attend)
