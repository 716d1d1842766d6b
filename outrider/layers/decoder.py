"""The decoder layer that most families share.

It has one body for every device and number of token rows; faster layers for some of them are built by `layers.fuse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.layers.attention import SelfAttention
from outrider.layers.base import DecoderLayer, FeedForward, Module, TokenMixer
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles
from outrider.mixers.cached import Attend


class LayerNames(NamedTuple):
    """Names of the four parts below the layer's prefix."""

    input_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


USUAL_NAMES = LayerNames()


class PreNormLayer(DecoderLayer):
    """Norm, token mixer, norm, feed-forward; each half adds to the residual stream."""

    def __init__(self, input_norm: RMSNorm, mixer: TokenMixer, mlp_norm: RMSNorm, mlp: FeedForward,
                 names: LayerNames = USUAL_NAMES) -> None:
        self.input_norm, self.mixer, self.mlp_norm, self.mlp = input_norm, mixer, mlp_norm, mlp
        self.names = names

    def parts(self) -> Sequence[tuple[str, Module]]:
        return list(zip(self.names, (self.input_norm, self.mixer, self.mlp_norm, self.mlp), strict=True))

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, attend: Attend
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, residual = self.input_norm.add_norm(delta, residual)
        x, residual = self.mlp_norm.add_norm(self.mixer(x, angles, attend), residual)
        return self.mlp(x), residual

    def attention_and_mlp(self) -> tuple[SelfAttention, GatedMLP] | None:
        """The mixer and the feed-forward if they are plain attention and a gated MLP, which fused layers know."""
        mixer, mlp = self.mixer, self.mlp
        # A mixer that only inherits from SelfAttention does something else between its products.
        return (mixer, mlp) if type(mixer) is SelfAttention and isinstance(mlp, GatedMLP) else None
