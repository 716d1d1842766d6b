"""The decoder layer that most families share.

It has one body for every device and number of token rows; `layers.fuse` builds faster layers for some cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from outrider.layers.attention import SelfAttention
from outrider.layers.base import DecoderLayer, FeedForward, Module, TokenMixer
from outrider.layers.context import StepContext
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Angles
from outrider.mixers import WantedRows


class LayerNames(NamedTuple):
    """The names of a layer's four parts (two norms, token mixer, feed-forward) in checkpoints."""

    input_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


USUAL_NAMES = LayerNames()


class PreNormLayer(DecoderLayer):
    """Norm, token mixer, norm, feed-forward. Mixer and feed-forward each add their result to the residual stream."""

    def __init__(self, input_norm: RMSNorm, mixer: TokenMixer, mlp_norm: RMSNorm, mlp: FeedForward,
                 names: LayerNames = USUAL_NAMES) -> None:
        self.input_norm, self.mixer, self.mlp_norm, self.mlp = input_norm, mixer, mlp_norm, mlp
        self.names = names

    def parts(self) -> Sequence[tuple[str, Module]]:
        return list(zip(self.names, (self.input_norm, self.mixer, self.mlp_norm, self.mlp), strict=True))

    def prepare(self) -> None:
        self.input_norm.round_for(*self.mixer.readers())
        self.mlp_norm.round_for(*self.mlp.readers())

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, residual = self.input_norm.add_norm(delta, residual)
        x, residual = self.mlp_norm.add_norm(self.mixer(x, angles, context), residual)
        return self.mlp(x, context), residual

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Call the layer, but compute the MLP only for `rows`: after a model's last layer only the rows that make
        logits are needed."""
        delta, residual, angles, context = args
        x, residual = self.input_norm.add_norm(delta, residual)
        mixed = self.mixer.for_rows(x, angles, context, rows)
        x, residual = self.mlp_norm.add_norm(mixed, residual[rows.token_rows])
        return self.mlp(x, context.of_rows(rows)), residual


class AttentionMLPLayer(PreNormLayer):
    """A layer with plain attention and a gated MLP. It is the kind of layer that fused layers can replace."""

    mlp: GatedMLP

    def __init__(self, input_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP,
                 names: LayerNames = USUAL_NAMES) -> None:
        super().__init__(input_norm, attention, mlp_norm, mlp, names)
        self.attention = attention


class ScaledLayer(PreNormLayer):
    """A pre-norm layer that multiplies the results of token mixer and feed-forward by `factor` before they are added to
    the residual stream."""

    def __init__(self, *parts: Any, factor: float) -> None:
        super().__init__(*parts)
        self.factor = factor

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, residual = self.input_norm.add_norm(delta, residual)
        x, residual = self.mlp_norm.add_norm(self.mixer(x, angles, context).mul_(self.factor), residual)
        return self.mlp(x, context).mul_(self.factor), residual

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        delta, residual, angles, context = args
        x, residual = self.input_norm.add_norm(delta, residual)
        mixed = self.mixer.for_rows(x, angles, context, rows).mul_(self.factor)
        x, residual = self.mlp_norm.add_norm(mixed, residual[rows.token_rows])
        return self.mlp(x, context.of_rows(rows)).mul_(self.factor), residual


class PostNormLayer(DecoderLayer):
    """Token mixer, norm, feed-forward, norm; the result of each norm is added to the residual stream."""

    def __init__(self, mixer: TokenMixer, mixer_norm: RMSNorm, mlp: FeedForward, mlp_norm: RMSNorm) -> None:
        self.mixer, self.mixer_norm, self.mlp, self.mlp_norm = mixer, mixer_norm, mlp, mlp_norm

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("self_attn", self.mixer), ("post_attention_layernorm", self.mixer_norm), ("mlp", self.mlp),
                ("post_feedforward_layernorm", self.mlp_norm))

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        residual = residual if delta is None else residual.add_(delta)
        residual = residual.add_(self.mixer_norm(self.mixer(residual, angles, context)))
        return self.mlp_norm(self.mlp(residual, context)), residual

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        delta, residual, angles, context = args
        residual = residual if delta is None else residual.add_(delta)
        mixed = self.mixer_norm(self.mixer.for_rows(residual, angles, context, rows))
        residual = residual[rows.token_rows].add_(mixed)
        return self.mlp_norm(self.mlp(residual, context.of_rows(rows))), residual


class ParallelLayer(DecoderLayer):
    """One norm, read by both token mixer and feed-forward; the sum of both is added to the residual stream."""

    def __init__(self, norm: RMSNorm, mixer: TokenMixer, mlp: FeedForward) -> None:
        self.norm, self.mixer, self.mlp = norm, mixer, mlp

    def parts(self) -> Sequence[tuple[str, Module]]:
        return ("input_layernorm", self.norm), ("self_attn", self.mixer), ("mlp", self.mlp)

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, residual = self.norm.add_norm(delta, residual)
        return self.mixer(x, angles, context).add_(self.mlp(x, context)), residual

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        delta, residual, angles, context = args
        x, residual = self.norm.add_norm(delta, residual)
        mixed = self.mixer.for_rows(x, angles, context, rows)
        return mixed.add_(self.mlp(x[rows.token_rows], context.of_rows(rows))), residual[rows.token_rows]
