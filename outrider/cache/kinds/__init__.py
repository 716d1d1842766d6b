"""Kinds of cache, one file each, such as full or sliding-window attention. Layers declare the spec of a kind. The kind
says how many pages a request may hold, which prefixes can be reused, and which pages can be freed when tokens settle.
`register_kind` adds a kind from outside."""

from outrider.cache.kinds.chunked import ChunkedKind, ChunkedSpec
from outrider.cache.kinds.full import FullKind, FullSpec
from outrider.cache.kinds.indexed import IndexedSpec
from outrider.cache.kinds.kind import Capacity, Kind, PagedSpec, kind_of, pages_for, register_kind
from outrider.cache.kinds.latent import IndexedLatentSpec, LatentSpec, PooledIndexSpec, ScaledIndexSpec
from outrider.cache.kinds.marker import MarkerSpec
from outrider.cache.kinds.parts import MODEL_DTYPE, Part
from outrider.cache.kinds.recurrent import CHECKPOINT_INTERVAL, RecurrentKind, RecurrentSpec, RowCapacity
from outrider.cache.kinds.sliding import SlidingKind, SlidingSpec
from outrider.cache.kinds.types import MODEL_CACHE, CacheType, ElementType

__all__ = [
    "CHECKPOINT_INTERVAL",
    "MODEL_CACHE",
    "MODEL_DTYPE",
    "CacheType",
    "Capacity",
    "ChunkedKind",
    "ChunkedSpec",
    "ElementType",
    "FullKind",
    "FullSpec",
    "IndexedLatentSpec",
    "IndexedSpec",
    "Kind",
    "LatentSpec",
    "MarkerSpec",
    "PagedSpec",
    "Part",
    "PooledIndexSpec",
    "RecurrentKind",
    "RecurrentSpec",
    "RowCapacity",
    "ScaledIndexSpec",
    "SlidingKind",
    "SlidingSpec",
    "kind_of",
    "pages_for",
    "register_kind",
]

register_kind(FullSpec, FullKind)
register_kind(SlidingSpec, SlidingKind)
register_kind(ChunkedSpec, ChunkedKind)
register_kind(IndexedSpec, FullKind)
register_kind(LatentSpec, FullKind)
register_kind(IndexedLatentSpec, FullKind)
register_kind(PooledIndexSpec, FullKind)
register_kind(ScaledIndexSpec, FullKind)
register_kind(MarkerSpec, FullKind)
