"""Sliding-window attention: keys and values of the last tokens. Pages that have left the window are freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.cache.kinds.full import FullSpec
from outrider.cache.kinds.kind import Capacity, pages_for
from outrider.core import Limits


@dataclass(frozen=True)
class SlidingSpec(FullSpec):
    """The cache of sliding-window attention: keys and values of the last `window` tokens. A query at p sees keys p -
    window + 1 to p."""

    window: int

    @property
    def visible_tokens(self) -> int | None:
        return self.window


@dataclass(frozen=True)
class SlidingKind:
    """Pages of sliding attention: a request keeps only pages that a query at or after the settled length can see."""

    spec: SlidingSpec
    page_tokens: int

    def capacity(self, limits: Limits) -> Capacity:
        width = pages_for(limits.max_len, self.page_tokens)
        # The window of the next settled query plus all unsettled tokens; the first token may be the last of its page.
        held = self.spec.window - 1 + limits.max_unsettled_tokens + limits.max_lookahead
        return Capacity(table_width=width, max_pages=min(width, pages_for(held - 1, self.page_tokens) + 1))

    def pages_to_start(self, tokens: int, limits: Limits) -> int:
        return min(pages_for(tokens, self.page_tokens), self.capacity(limits).max_pages)

    def first_needed(self, settled: int) -> int:
        return max(0, settled - self.spec.window + 1) // self.page_tokens

    def next_drop(self, settled: int) -> int:
        return (self.first_needed(settled) + 1) * self.page_tokens + self.spec.window - 1

    def serves(self, is_cached: Callable[[int], bool], candidate: int) -> int:
        length = candidate
        while length > 0:
            columns = range(length // self.page_tokens - 1, self.first_needed(length) - 1, -1)
            missing = next((column for column in columns if not is_cached(column)), None)
            if missing is None:
                return length
            length = missing * self.page_tokens
        return 0
