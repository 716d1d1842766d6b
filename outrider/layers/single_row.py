"""SingleRowLayer: a decoder layer that adds one token row to the residual stream inside its last products.

On a GPU one token row is a matter of reading the weights once, and small kernels cost by their number.
"""

from __future__ import annotations

import torch

from outrider.layers.attention import SelfAttention
from outrider.layers.base import DecoderLayer
from outrider.layers.decoder import FusedLayer, PreNormLayer
from outrider.layers.mlp import GatedMLP
from outrider.layers.rotary import Angles
from outrider.mixers.cached import Attend


class SingleRowLayer(FusedLayer):
    def __init__(self, plain: PreNormLayer, attention: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__(plain)
        self.input_norm, self.attention, self.mlp_norm, self.mlp = plain.input_norm, attention, plain.mlp_norm, mlp

    @classmethod
    def try_build(cls, plain: DecoderLayer) -> SingleRowLayer | None:
        """None if a half cannot add its last product to the residual stream in one kernel."""
        if not isinstance(plain, PreNormLayer) or (parts := plain.attention_and_mlp()) is None:
            return None
        attention, mlp = parts
        can_add = attention.out.format.adds_single_row and mlp.down.format.adds_single_row
        return cls(plain, attention, mlp) if can_add else None

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, attend: Attend
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if delta is not None or residual.shape[0] != 1:
            return self.plain(delta, residual, angles, attend)
        self.attention.add_to(residual, self.input_norm(residual), angles, attend)
        self.mlp.add_to(residual, self.mlp_norm(residual))
        return None, residual
