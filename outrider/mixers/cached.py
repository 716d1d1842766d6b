"""CachedLayers: a model's layers with their parts of the pool, served by one mixer for each kind of layer.

Target and drafters each have one. Pages and lengths come from the view of a step alone. `register_mixer` adds a kind of
layer from outside the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from outrider.cache.groups import CacheLayout
from outrider.cache.kinds import FullSpec, IndexedLatentSpec, LatentSpec, PagedSpec, ScaledIndexSpec, SlidingSpec
from outrider.core import Limits
from outrider.mixers.batch import BatchView
from outrider.mixers.latent.base import LatentMixer
from outrider.mixers.paged.base import Backend, PagedMixer
from outrider.mixers.pool import DevicePool


class Attend(Protocol):
    """A model's access to its layers' caches during one step."""

    def mixer(self, layer: int) -> Any:
        """The layer bound to the step. Its type depends on the kind of layer: `PagedLayer`, `RecurrentLayer`."""


class WantedRows:
    """The token rows that are wanted of a model, where the caches need all of them but nobody reads the results of the
    others."""

    def __init__(self, token_rows: torch.Tensor, bind: Callable[[], Mapping[int, Any]] = dict) -> None:
        """token_rows: [rows] int64. bind: the layers that can attend for these rows alone, bound to them; it is called
        once, when somebody asks for a layer."""
        self.token_rows = token_rows
        self._bind = bind

    @cached_property
    def layers(self) -> Mapping[int, Any]:
        return self._bind()

    def mixer(self, layer: int) -> Any:
        """A layer of `layers`, which makes this the `Attend` of layers that see these rows only and write nothing."""
        return self.layers[layer]


class Mixer(Protocol):
    """Layers of one kind, with their views of the pool and their backend."""

    def bind(self, view: BatchView) -> Mapping[int, Any]:
        """Bind every layer to a step over this view. `Attend.mixer` hands out the values."""

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        """Called before steps are captured: allocates the buffers that captured steps share."""


class LayerParams(Protocol):
    """A model's description of one layer, such as an `AttentionLayer`."""

    @property
    def index(self) -> int: ...


MakeMixer = Callable[[Sequence[Any], DevicePool, Backend], Mixer]
_MIXERS: dict[type[PagedSpec], MakeMixer] = {
    FullSpec: PagedMixer,
    SlidingSpec: PagedMixer,
    LatentSpec: LatentMixer,
    IndexedLatentSpec: LatentMixer,
    ScaledIndexSpec: LatentMixer,
}


def register_mixer(spec: type[PagedSpec], make: MakeMixer) -> None:
    """Let `make(layers, pool, backend)` serve the layers whose first cache claim has this type of spec."""
    _MIXERS[spec] = make


def can_capture(layout: CacheLayout, backend: Backend) -> bool:
    """Whether steps over these groups can be captured: by the backend, and by the mixers. A mixer with a method
    `is_capturable` decides by the spec."""
    asked = [(getattr(_MIXERS.get(type(group.spec)), "is_capturable", None), group.spec) for group in layout.groups]
    return backend.is_capturable and all(is_capturable is None or is_capturable(spec) for is_capturable, spec in asked)


class CachedLayers:
    def __init__(self, layers: Sequence[LayerParams], pool: DevicePool, backend: Backend, *,
                 exact: bool = False) -> None:
        """exact: a token row has the same bits alone and among others. Mixers that can have a method `set_exact`."""
        self._device = pool.data.device
        groups = {layer.index: pool.layout.groups_of(layer.index) for layer in layers}
        self.groups = tuple({group.index: group for own in groups.values() for group in own}.values())
        by_kind: dict[MakeMixer, list[LayerParams]] = {}
        for layer in layers:
            spec = type(groups[layer.index][0].spec)
            if spec not in _MIXERS:
                raise ValueError(f"{spec.__name__} has no mixer: register one with register_mixer")
            by_kind.setdefault(_MIXERS[spec], []).append(layer)
        self.mixers = [make(own, pool, backend) for make, own in by_kind.items()]
        for mixer in self.mixers if exact else ():
            set_exact = getattr(mixer, "set_exact", None)
            if set_exact is None:
                raise ValueError(f"exact=True: {type(mixer).__name__} cannot be exact: it has no method set_exact")
            set_exact(True)

    def bind(self, view: BatchView, others: Mapping[int, Any] | None = None) -> BoundLayers:
        """Bind the layers to a step over one view. `others`: layers of the same model that are bound already."""
        bound = dict(others or {})
        for mixer in self.mixers:
            bound.update(mixer.bind(view))
        return BoundLayers(bound)

    def bind_rows(self, view: BatchView) -> dict[int, Any]:
        """Bind layers to a view of the tokens whose results are wanted, each request's last ones, while another view
        binds all tokens of the step. Mixers whose layers can read what all tokens wrote have a method `bind_rows`."""
        bound: dict[int, Any] = {}
        for mixer in self.mixers:
            bind = getattr(mixer, "bind_rows", None)
            bound.update({} if bind is None else bind(view))
        return bound

    def bind_after(self, earlier: BoundLayers, token_rows: torch.Tensor, view: BatchView) -> BoundLayers:
        """Bind the layers to a further pass with one token row for each of `token_rows` of an earlier pass. Mixers with
        a method `carry` may go on with what that pass found."""
        later = self.bind(view)
        for mixer in self.mixers:
            carry = getattr(mixer, "carry", None)
            if carry is not None:
                carry(earlier.layers, later.layers, token_rows)
        return later

    def prepare_capture(self, limits: Limits) -> None:
        for mixer in self.mixers:
            mixer.prepare_capture(self._device, limits)

    @property
    def whole_len(self) -> int | None:
        """The most tokens of contexts behind which layers do less than behind longer ones; None if there are no such
        layers. Mixers that have some have a property of this name."""
        asked = [getattr(mixer, "whole_len", None) for mixer in self.mixers]
        return min((length for length in asked if length is not None), default=None)


class BoundLayers:
    """All layers of a model, bound to one step."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = layers

    def mixer(self, layer: int) -> Any:
        return self.layers[layer]
