"""Full attention: keys and values of every token, in pages that stay until the request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.cache.kinds.kind import Capacity, PagedSpec, pages_for
from outrider.cache.kinds.parts import Part
from outrider.cache.kinds.types import MODEL_CACHE, CacheType
from outrider.core import Limits


@dataclass(frozen=True)
class FullSpec(PagedSpec):
    """The cache of full attention: keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of one number in the model's dtype
    cache_type: CacheType = field(default=MODEL_CACHE, kw_only=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.cache_type.parts(self.num_kv_heads, self.head_dim, self.itemsize)

    def stored_as(self, cache_type: CacheType) -> FullSpec:
        return replace(self, cache_type=cache_type)


@dataclass(frozen=True)
class FullKind:
    """Pages of full attention: every page stays until the request ends."""

    spec: PagedSpec
    page_tokens: int

    def capacity(self, limits: Limits) -> Capacity:
        width = pages_for(limits.max_len, self.page_tokens)
        return Capacity(table_width=width, max_pages=width)

    def pages_to_start(self, tokens: int, limits: Limits) -> int:
        return pages_for(tokens, self.page_tokens)

    def first_needed(self, settled: int) -> int:
        return 0

    def next_drop(self, settled: int) -> int:
        return sys.maxsize

    def serves(self, is_cached: Callable[[int], bool], candidate: int) -> int:
        for column in range(candidate // self.page_tokens):
            if not is_cached(column):
                return column * self.page_tokens
        return candidate
