"""Full attention: keys and values of every token, in pages that stay until the request ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from outrider.cache.kinds.base import Capacity, PagedSpec, Part, pages_for
from outrider.core import Limits


@dataclass(frozen=True)
class FullSpec(PagedSpec):
    """Keys and values of every token."""

    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def parts(self) -> tuple[Part, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return Part("k", shape, self.itemsize), Part("v", shape, self.itemsize)


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
