"""Makes loaded models ready to run: formats choose their products, and fused layers replace plain ones.

The only place that decides about fused layers. Code outside the package adds its own with `register_fused_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.layers.base import DecoderLayer, LayeredModule, find_modules
from outrider.layers.decoder import FusedLayer
from outrider.layers.linear import Linear
from outrider.layers.native_decoder import NativeDecoderLayer
from outrider.layers.single_row import SingleRowLayer

TryBuild = Callable[[DecoderLayer], DecoderLayer | None]  # a layer that replaces the plain one, or None

_REPLACEMENTS: list[TryBuild] = [NativeDecoderLayer.try_build, SingleRowLayer.try_build]


def register_fused_layer(try_build: TryBuild) -> None:
    """Try this replacement before all others from now on."""
    _REPLACEMENTS.insert(0, try_build)


def prepare(models: Sequence[LayeredModule], allow_copies: bool) -> int:
    """Once all weights are loaded. `allow_copies`: formats may hold a second copy of weights that is faster to read.
    Returns the bytes held beside those that the weights' slots count. A model may be prepared again."""
    num_bytes = sum(linear.format.prepare(allow_copies) for linear in find_modules(models, Linear))
    for model in models:
        model.layers = [fuse(layer) for layer in model.layers]
    return num_bytes


def fuse(layer: DecoderLayer) -> DecoderLayer:
    plain = layer.plain if isinstance(layer, FusedLayer) else layer
    return next((fused for try_build in _REPLACEMENTS if (fused := try_build(plain)) is not None), plain)
