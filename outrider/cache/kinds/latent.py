"""Latent attention (MLA): the cache keeps one compressed vector of every token, shared by all heads. Some models also
keep a key by which an indexer chooses positions.

Both are stored in the same pages, with one page table. Pages stay until the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.cache.kinds.kind import PagedSpec
from outrider.cache.kinds.parts import Part
from outrider.cache.kinds.types import MODEL_CACHE, CacheType, ElementType


@dataclass(frozen=True)
class LatentSpec(PagedSpec):
    """The cache of latent attention: for every token the compressed keys and values, followed by the rotated key."""

    latent_dim: int
    rope_dim: int
    itemsize: int
    cache_type: CacheType = field(default=MODEL_CACHE, kw_only=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.latent_part,)

    def stored_as(self, cache_type: CacheType) -> PagedSpec:
        if isinstance(cache_type, ElementType) and cache_type.takes_latents:
            return replace(self, cache_type=cache_type)
        return super().stored_as(cache_type)

    @property
    def latent_part(self) -> Part:
        shape = (self.latent_dim + self.rope_dim,)
        if isinstance(self.cache_type, ElementType):
            return Part("latent", shape, self.cache_type.itemsize, self.cache_type.dtype)
        return Part("latent", shape, self.itemsize)


@dataclass(frozen=True)
class IndexedLatentSpec(LatentSpec):
    """A latent cache that also keeps the keys by which the layer's indexer chooses positions."""

    index_dim: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.latent_part, Part("index_key", (self.index_dim,), self.itemsize))


@dataclass(frozen=True)
class PooledIndexSpec(IndexedLatentSpec):
    """A latent cache for layers with an indexer that chooses blocks. It keeps the index keys and the gates that weigh
    them."""

    @property
    def parts(self) -> tuple[Part, ...]:
        gates = Part("index_gate", (self.index_dim,), self.itemsize)
        return (self.latent_part, Part("index_key", (self.index_dim,), self.itemsize), gates)


@dataclass(frozen=True)
class ScaledIndexSpec(IndexedLatentSpec):
    """A latent cache that stores index keys in fp8, with one scale for each key."""

    @property
    def parts(self) -> tuple[Part, ...]:
        keys = Part("index_key", (self.index_dim,), 1, "float8_e4m3fn")
        return (self.latent_part, keys, Part("index_scale", (1,), 4, "float32"))
