"""CachedLayers: a model's layers with their views of the page pool, served by one mixer for each kind of layer.

The target has one, and so has each drafter. Page tables and lengths are read only from the view of a step.
`register_mixer` lets code outside the package add a kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from outrider.cache.groups import CacheLayout
from outrider.cache.kinds import (
    ChunkedSpec,
    FullSpec,
    IndexedLatentSpec,
    IndexedSpec,
    LatentSpec,
    PagedSpec,
    PooledIndexSpec,
    ScaledIndexSpec,
    SlidingSpec,
)
from outrider.core import Limits
from outrider.core.lazy_exports import import_attribute
from outrider.mixers.batch import BatchView
from outrider.mixers.mixer import EVERY_LENGTH, Mixer
from outrider.mixers.paged.backend import Backend, PagedMixer
from outrider.mixers.pool import DevicePool


class Attend(Protocol):
    """A model's access to its layers' caches during one step."""

    def mixer(self, layer: int) -> Any:
        """Return the layer, bound to the step. Its type depends on the kind of layer: `PagedLayer`,
        `RecurrentLayer`."""


class WantedRows:
    """The token rows whose results the caller needs. Layers still write the cache for all token rows."""

    def __init__(self, token_rows: torch.Tensor, bind: Callable[[], Mapping[int, Any]] = dict) -> None:
        """token_rows: [rows] int64. bind: returns the layers that can attend for these rows alone, by index and bound
        to these rows. It is called once, when a layer is first asked for."""
        self.token_rows = token_rows
        self._bind = bind

    @cached_property
    def layers(self) -> Mapping[int, Any]:
        return self._bind()

    def mixer(self, layer: int) -> Any:
        """Return a layer of `layers`, bound to the wanted rows only. This layer writes nothing to the cache."""
        return self.layers[layer]


class LayerParams(Protocol):
    """A model's description of one layer, such as an `AttentionLayer`."""

    @property
    def index(self) -> int: ...


INDEXED_MIXER = "outrider.mixers.indexed.indexed_mixer:IndexedMixer"
LATENT_MIXER = "outrider.mixers.latent.latent_mixer:LatentMixer"
# By the spec of a layer's first cache claim; named ones are imported for the first model that has such a layer.
_MIXERS: dict[type[PagedSpec], type[Mixer] | str] = {
    FullSpec: PagedMixer,
    SlidingSpec: PagedMixer,
    ChunkedSpec: PagedMixer,
    IndexedSpec: INDEXED_MIXER,
    LatentSpec: LATENT_MIXER,
    IndexedLatentSpec: LATENT_MIXER,
    PooledIndexSpec: LATENT_MIXER,
    ScaledIndexSpec: LATENT_MIXER,
}


def register_mixer(spec: type[PagedSpec], mixer: type[Mixer]) -> None:
    """Register `mixer(layers, pool, backend)` for a kind of layer: those whose first cache claim has this type of spec.
    """
    _MIXERS[spec] = mixer


def mixer_of(spec: type[PagedSpec]) -> type[Mixer] | None:
    """Return the type of mixer that serves layers with this spec; None if there is none."""
    found = _MIXERS.get(spec)
    return import_attribute(found) if isinstance(found, str) else found


def can_capture(layout: CacheLayout, backend: Backend) -> bool:
    """Whether steps can be captured: the backend and every group's mixer must allow it. Recurrent groups have no
    mixer."""
    specs = [group.spec for group in layout.groups]
    return backend.is_capturable and all((mixer_of(type(spec)) or Mixer).is_capturable(spec) for spec in specs)


class CachedLayers:
    def __init__(self, layers: Sequence[LayerParams], pool: DevicePool, backend: Backend, *,
                 exact: bool = False) -> None:
        """exact: whether a token row must have the same bits whether it is computed alone or with other rows."""
        self._device = pool.data.device
        self._pool = pool
        groups = {layer.index: pool.layout.groups_of(layer.index) for layer in layers}
        self.groups = tuple({group.index: group for own in groups.values() for group in own}.values())
        by_kind: dict[type[Mixer], list[LayerParams]] = {}
        for layer in layers:
            spec = type(groups[layer.index][0].spec)
            if (kind := mixer_of(spec)) is None:
                raise ValueError(f"{spec.__name__} has no mixer: register one with register_mixer")
            by_kind.setdefault(kind, []).append(layer)
        self.mixers = [make(own, pool, backend) for make, own in by_kind.items()]
        for mixer in self.mixers if exact else ():
            mixer.set_exact(True)

    def page_parts(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer that are kept once for each page, by name: [pages, *shape]."""
        return self._pool.page_parts(layer)

    def bind(self, view: BatchView, others: Mapping[int, Any] | None = None) -> BoundLayers:
        """Bind the layers to a step over one view of the batch. `others`: layers of the same model that are already
        bound."""
        parts = [others] if others else []
        parts += [mixer.bind(view) for mixer in self.mixers]
        return BoundLayers(parts[0] if len(parts) == 1 else dict(item for part in parts for item in part.items()))

    def bind_rows(self, view: BatchView) -> dict[int, Any]:
        """Bind layers to a view of the last tokens of each request, the only ones whose results the caller reads. The
        cache is written through another view, which binds all tokens of the step. Layers that cannot read entries
        written through that view are left out."""
        return {layer: bound for mixer in self.mixers for layer, bound in mixer.bind_rows(view).items()}

    def bind_after(self, earlier: BoundLayers, token_rows: torch.Tensor, view: BatchView) -> BoundLayers:
        """Bind the layers to a later drafting pass, with one token row for each of the `token_rows` of an earlier pass.
        Mixers may reuse what the earlier pass found."""
        later = self.bind(view)
        for mixer in self.mixers:
            mixer.carry(earlier.layers, later.layers, token_rows)
        return later

    def prepare_capture(self, limits: Limits) -> None:
        for mixer in self.mixers:
            mixer.prepare_capture(self._device, limits)

    @property
    def whole_len(self) -> int:
        """Return the longest context, in tokens, of which every indexer would choose all tokens. Up to this length some
        layers do less work."""
        return min((mixer.whole_len for mixer in self.mixers), default=EVERY_LENGTH)


class BoundLayers:
    """All layers of a model, bound to one step."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = layers

    def mixer(self, layer: int) -> Any:
        return self.layers[layer]
