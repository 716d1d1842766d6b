"""Module: something with weights, made of parts that have weights. Also the shapes of modules that models combine.

A module declares its parts once; the names of its tensors, their finalization and searches follow from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from outrider.cache.groups import LayerCache
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.formats.slots import WeightSlot
from outrider.layers.rotary import Angles
from outrider.mixers import Attend, AttentionLayer


class Module:
    def parts(self) -> Sequence[tuple[str, Module]]:
        """The modules inside this one, each with the name of its tensors below this one's prefix ("" for none)."""
        return ()

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        """Every tensor that a checkpoint must hold for this module, by its name there."""
        slots: dict[str, WeightSlot] = {}
        for name, part in self.parts():
            slots |= part.weights(f"{prefix}.{name}" if prefix and name else prefix or name)
        return slots

    def finalize(self) -> None:
        """Called once, after loading and before the first forward, to derive what depends on the weights."""
        for _, part in self.parts():
            part.finalize()


class Parameter(Module):
    """One tensor of the checkpoint that a layer uses by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        return {prefix: WeightSlot(self.tensor)}


Kind = TypeVar("Kind")


def find_modules(roots: Iterable[Module], kind: type[Kind]) -> list[Kind]:
    """Every module of a kind among the roots and their parts, each once, in the order of the parts."""
    found: dict[int, Kind] = {}

    def search(module: Module) -> None:
        if isinstance(module, kind):
            found.setdefault(id(module), module)
        for _, part in module.parts():
            search(part)

    for root in roots:
        search(root)
    return list(found.values())


class FeedForward(Module, ABC):
    """The part of a layer that treats every token row alone: an MLP, or a mixture of experts."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]."""


class TokenMixer(Module, ABC):
    """The part of a layer in which token rows of a request meet: attention, or a recurrence."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, angles: Angles, attend: Attend) -> torch.Tensor:
        """x: [tokens, hidden]."""


class DecoderLayer(Module):
    """A layer adds to the residual stream; the next layer's first norm carries the sum out, so that both can be
    fused."""

    rotary: int = 0  # which of the model's ropes it uses

    # (delta, residual, angles, attend, *what the model gives this layer beside them) -> (what this layer's last part
    # adds, or None if that is done; the residual stream before it). What one layer hands on as delta (a
    # `layers.norm.Delta`) only layers of its family must understand, and `RMSNorm.add_norm`.
    __call__: Callable[..., tuple[Any, torch.Tensor]]


class PassingLayer(DecoderLayer):
    """Stands in for a layer that is like another one, and adds nothing."""

    def __init__(self, rotary: int) -> None:
        self.rotary = rotary

    def __call__(self, delta: Any, residual: torch.Tensor, *_: Any) -> tuple[Any, torch.Tensor]:
        return delta, residual


class LayeredModule(Module):
    """A model or a draft head. Its `layers` are called as they stand, so that fused ones can take their place."""

    layers: Sequence[DecoderLayer] = ()
    attention_layers: list[AttentionLayer]
    dtype: torch.dtype

    def cache_layers(self) -> list[LayerCache]:
        return [LayerCache(layer.index, self._cache_spec(layer)) for layer in self.attention_layers]

    def _cache_spec(self, layer: AttentionLayer) -> FullSpec:
        geometry = (layer.num_kv_heads, layer.head_dim, self.dtype.itemsize)
        return FullSpec(*geometry) if layer.window is None else SlidingSpec(*geometry, layer.window)

    def ignores(self, name: str) -> bool:
        """A checkpoint may hold this tensor and nobody needs it."""
        return name.endswith("rotary_emb.inv_freq")

    @contextmanager
    def one_layer_each(self) -> Iterator[None]:
        """Inside, only the first of layers that are alike does anything: enough to compile what all of them launch."""
        layers, kinds = self.layers, set()
        short: list[DecoderLayer] = []
        for layer in layers:
            shapes = tuple((name, slot.shape) for name, slot in layer.weights("").items())
            kind = (type(layer), layer.rotary, shapes)
            short.append(PassingLayer(layer.rotary) if kind in kinds else layer)
            kinds.add(kind)
        self.layers = short
        try:
            yield
        finally:
            self.layers = layers
