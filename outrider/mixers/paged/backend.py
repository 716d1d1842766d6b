"""Attention over keys and values in pages: the base class of its backends, and the layer that a model calls.

A backend plans once per step and group and runs once per layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import ChunkedSpec, FullSpec, SlidingSpec
from outrider.core import Limits
from outrider.core.lazy_exports import LateModule, import_attribute
from outrider.mixers.batch import BatchView, ExtraKeys
from outrider.mixers.mixer import Mixer
from outrider.mixers.paged.codecs import CacheCodec, ModelCodec, codec_of
from outrider.mixers.paged.masks import CAUSAL, Mask, RangeReach
from outrider.mixers.pool import DevicePool

if TYPE_CHECKING:
    from outrider.mixers.paged import mask_checks
else:
    mask_checks = LateModule("outrider.mixers.paged.mask_checks")


@dataclass(frozen=True)
class AttentionLayer:
    """A model's description of one attention layer, without the place of its cache."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query at p sees keys p - window + 1 to p
    is_chunked: bool = field(default=False, kw_only=True)  # the window does not slide: keys p - p % window to p
    softcap: float | None = None
    writes: bool = True  # False: reads the cache of another layer and must not write
    mask: Mask = CAUSAL  # beside the window
    reach: RangeReach = field(default=RangeReach.WHOLE, kw_only=True)  # what queries see of ranges of extra keys
    # [heads] float32 (float64 stays): the score of one more key that every query sees, whose value is 0.
    sinks: torch.Tensor | None = field(default=None, compare=False)

    @property
    def has_mask(self) -> bool:
        return self.mask != CAUSAL

    def of_rank(self, num_ranks: int) -> AttentionLayer:
        """A model's description of one attention layer, without the place of its cache."""
        heads = self.num_heads // num_ranks
        return replace(self, num_heads=heads, num_kv_heads=max(1, self.num_kv_heads // num_ranks),
                       sinks=None if self.sinks is None else self.sinks.new_empty(heads))

    def cache_spec(self, itemsize: int) -> FullSpec:
        """Return the layer's cache spec. itemsize: bytes of a number in the model's dtype. The engine may change the
        spec to another KV cache dtype (`LayerCache.stored_as`)."""
        geometry = (self.num_kv_heads, self.head_dim, itemsize)
        if self.window is None:
            return FullSpec(*geometry)
        return (ChunkedSpec if self.is_chunked else SlidingSpec)(*geometry, self.window)


@dataclass(frozen=True)
class KeyValueCache:
    """One layer's tensors in the pool: keys and values [pages, page tokens, kv heads, dim] with any page stride, and
    other tensors that the cache type needs."""

    k: torch.Tensor
    v: torch.Tensor
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [pages, page tokens, ...] by name
    codec: CacheCodec = ModelCodec()

    @classmethod
    def from_pool(cls, pool: DevicePool, layer: int) -> KeyValueCache:
        further = pool.layer(layer)
        k, v = further.pop("k"), further.pop("v")
        codec = codec_of(pool.layout.groups_of(layer)[0].spec.cache_type)
        return cls(k, v, further, codec.for_layer(k.shape[2], k.device, pool.scales_of(layer)))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        return {"k": self.k, "v": self.v, **self.further}


class Rope(Protocol):
    """The rotary embedding of a step's token rows, for kernels that apply it themselves."""

    positions: torch.Tensor  # [tokens]
    table: torch.Tensor  # [positions, cos | sin]

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cos columns and the sin columns of the table."""


class HeadNorms(NamedTuple):
    """Scales of the RMS norms of q and k heads, [dim] each. v heads may be normed too, without a scale."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    norms_v: bool = False
    has_v: bool = True  # False: values are the keys before norm and rope


class Backend(ABC):
    """Runs attention. `run` writes k and v at the view's slots, then attends over the cache. A plan is used only in its
    own step."""

    name: str
    is_capturable: bool = True  # False: its plan reads the device, so steps run uncaptured
    serves_rows: bool = False  # whether it can write all tokens and attend for some: it has `write_fused`
    reads_shared_once: bool = False  # whether it reads pages that several requests hold once for several of them
    takes_masks: bool = False  # whether it serves layers with masks and batches with extra keys
    has_exact_ranges: bool = False  # whether its layers with windows compute extra keys exactly (`range_backend.py`)
    takes_sinks: bool = True  # whether it serves layers with sinks
    needs_whole_parts: bool = False  # whether pages must lie apart by a multiple of every part of a layer's cache
    skips_collected: bool = False  # whether it skips attention in steps whose launches are only collected

    @abstractmethod
    def plan(self, view: BatchView, group: Group) -> Any: ...

    @abstractmethod
    def run(self, layer: AttentionLayer, cache: KeyValueCache, q: torch.Tensor, k: torch.Tensor | None,
            v: torch.Tensor | None, plan: Any) -> torch.Tensor: ...

    def run_fused(self, layer: AttentionLayer, cache: KeyValueCache, qkv: torch.Tensor, rope: Rope,
                  norms: HeadNorms | None, plan: Any) -> torch.Tensor | None:
        """Norm, rotate and write keys and values, then attend, in one call: see `PagedLayer.fused` for arguments and
        result."""
        return None

    def write(self, layer: AttentionLayer, cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, plan: Any) -> None:
        """Write keys and values without attention: see `PagedLayer.write` for the arguments."""
        raise NotImplementedError(f"attention_backend={self.name!r} cannot write keys and values without computing "
                                  "attention, which block drafters need: use attention_backend='auto', or another "
                                  "drafter")

    def write_fused(self, layer: AttentionLayer, cache: KeyValueCache, kv: torch.Tensor, rope: Rope,
                    norms: HeadNorms | None, plan: Any) -> None:
        """Norm, rotate and write keys and values without attention: see `PagedLayer.write_fused` for the arguments."""
        raise NotImplementedError(f"attention_backend={self.name!r} writes keys and values while it computes "
                                  "attention, so it cannot attend without writing: use attention_backend='auto'")

    def probe_prompt(self, layer: AttentionLayer, cache: KeyValueCache, num_tokens: int, context: int,
                     dtype: torch.dtype) -> Callable[[], object] | None:
        """Return a call that can be timed: attention of a chunk of a prompt to itself and the `context` tokens before
        it. All keys are read from the null page, which takes the same time. dtype: the queries' dtype. None if the
        backend has no such call."""
        return None

    def attach(self, num_pages: int, device: torch.device) -> None:
        """Store the size of the pool. Called once by each model whose layers the backend serves, before any plan."""

    def check_cache(self, cache: KeyValueCache) -> None:
        """Raise an error while the engine starts if the backend cannot read a layer's part of the pool."""

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        """Allocate the buffers that captured steps share. Called before any capture: memory that a step allocates
        while it is captured belongs to that capture alone."""


class PagedLayer(NamedTuple):
    """One attention layer bound to one step; the model calls it to attend. Layers that run as one fused call pass its
    fields to their backend."""

    backend: Backend
    layer: AttentionLayer
    cache: KeyValueCache
    plan: Any

    def __call__(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        """Write k and v, and attend. q [tokens, heads, dim], k and v [tokens, kv heads, dim]; k and v are None if the
        layer reads another layer's cache. Returns [tokens, heads * dim]."""
        return self.backend.run(self.layer, self.cache, q, k, v, self.plan)

    def fused(self, qkv: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> torch.Tensor | None:
        """Apply norms and rope, write the cache and attend in one call on qkv [tokens, q | k | v], which may be
        overwritten. Returns None if the backend has no such call for the layer."""
        return self.backend.run_fused(self.layer, self.cache, qkv, rope, norms, self.plan)

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv heads, dim] to the cache without attention. Norms and rope were applied before."""
        self.backend.write(self.layer, self.cache, k, v, self.plan)

    def write_fused(self, kv: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> None:
        """Apply norms and rope to kv [tokens, k | v] and write it to the cache, for backends that can do this without
        attention."""
        self.backend.write_fused(self.layer, self.cache, kv, rope, norms, self.plan)

    def read_fused(self, q: torch.Tensor, rope: Rope, norms: HeadNorms | None) -> torch.Tensor | None:
        """Compute `fused` for q [tokens, q] alone, whose keys and values are already in the cache."""
        return self.backend.run_fused(replace(self.layer, writes=False), self.cache, q, rope, norms, self.plan)


class PagedLayers(Mapping[int, PagedLayer]):
    """The attention layers of a step, by index. Each is made when it is first asked for, because a native call that
    computes all layers asks only for the first one."""

    def __init__(self, layers: Mapping[int, tuple[AttentionLayer, KeyValueCache, Group]],
                 plans: Mapping[int, tuple[Backend, Any]]) -> None:
        """plans: the backend of each group in this step, with its plan."""
        self._layers, self._plans = layers, plans

    def __getitem__(self, index: int) -> PagedLayer:
        layer, cache, group = self._layers[index]
        backend, plan = self._plans[group.index]
        return PagedLayer(backend, layer, cache, plan)

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class PagedMixer(Mixer):
    """A model's attention layers with their keys and values in the pool."""

    def __init__(self, layers: Sequence[AttentionLayer], pool: DevicePool, backend: Backend) -> None:
        for layer in layers:
            if layer.has_mask:
                mask_checks.check_mask(layer.mask, layer.index)
            if layer.has_mask and not backend.takes_masks:
                raise ValueError(f"layer {layer.index} has the mask {type(layer.mask).__name__}, which "
                                 f"attention_backend={backend.name!r} does not serve: use 'flex' or 'torch'")
            if layer.sinks is not None and not backend.takes_sinks:
                raise ValueError(f"layer {layer.index} has attention sinks, which attention_backend={backend.name!r} "
                                 "does not serve: use 'auto' or 'torch'")
        self.backend = backend
        backend.attach(len(pool.data), pool.data.device)
        self._layers = {layer.index: (layer, KeyValueCache.from_pool(pool, layer.index),
                                      pool.layout.groups_of(layer.index)[0]) for layer in layers}
        for _, cache, _ in self._layers.values():
            backend.check_cache(cache)
        self._groups = tuple({group.index: group for _, _, group in self._layers.values()}.values())
        # The groups with layers that see extra keys, and what serves them in steps that have any.
        self._seeing = {group.index for layer, _, group in self._layers.values()
                        if layer.reach is not RangeReach.NOTHING}
        self._pool_shape = len(pool.data), pool.data.device
        self._range_backend: Backend | None = None

    def set_exact(self, exact: bool) -> None:
        """Do nothing: the backend does all arithmetic, and it was already made for exact or ordinary mode."""

    def bind(self, view: BatchView) -> Mapping[int, PagedLayer]:
        """Plan every group once, and bind the layers to the plans."""
        has_ranges = isinstance(view.extra_keys, ExtraKeys) and not self.backend.takes_masks
        plans: dict[int, tuple[Backend, Any]] = {}
        for group in self._groups:
            own = self._for_ranges() if has_ranges and group.index in self._seeing else self.backend
            plans[group.index] = own, own.plan(view, group)
        return PagedLayers(self._layers, plans)

    def _for_ranges(self) -> Backend:
        """Return the backend for steps in which tokens attend to later tokens (extra keys), if the layers' own backend
        has no kernels for them."""
        if self._range_backend is None:
            num_pages, device = self._pool_shape
            caches = [cache for layer, cache, _ in self._layers.values() if layer.reach is not RangeReach.NOTHING]
            make: Callable[..., Backend] = import_attribute("outrider.mixers.paged.range_backend:make_range_backend")
            self._range_backend = make(device, caches, self.backend)
            self._range_backend.attach(num_pages, device)
        return self._range_backend

    def bind_rows(self, view: BatchView) -> Mapping[int, PagedLayer]:
        return self.bind(view) if self.backend.serves_rows else {}

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        self.backend.prepare_capture(device, limits)


def check_writes(layer: AttentionLayer) -> None:
    if not layer.writes:
        raise ValueError(f"layer {layer.index} reads another layer's cache, so it must not write keys and values. This "
                         "is a bug of the model's class: please report it")
