"""Sparse attention: each query reads only chosen blocks of its context. The cache keeps keys and values of every token,
and the index keys by which blocks are chosen.

All of them are stored in the same pages, with one page table. Pages stay until the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.kind import PagedSpec
from outrider.cache.kinds.parts import Part
from outrider.cache.kinds.types import MODEL_CACHE


@dataclass(frozen=True)
class IndexedSpec(PagedSpec):
    """The cache of sparse attention: keys, values and index keys of every token, in the model's dtype."""

    num_kv_heads: int
    head_dim: int
    itemsize: int
    index_dim: int

    @property
    def parts(self) -> tuple[Part, ...]:
        keys_values = MODEL_CACHE.parts(self.num_kv_heads, self.head_dim, self.itemsize)
        return (*keys_values, Part("index_key", (self.index_dim,), self.itemsize))
