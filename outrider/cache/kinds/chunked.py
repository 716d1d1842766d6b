"""Chunked attention: each token attends within its chunk of the text. The cache keeps keys and values of the next
token's chunk; pages of earlier chunks are freed."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cache.kinds.kind import pages_for
from outrider.cache.kinds.sliding import SlidingKind, SlidingSpec


@dataclass(frozen=True)
class ChunkedSpec(SlidingSpec):
    """The cache of chunked attention: keys and values of one chunk of `window` tokens. A query at p sees keys p - p %
    window to p."""


@dataclass(frozen=True)
class ChunkedKind(SlidingKind):
    """Pages of chunked attention: a request keeps the pages from the chunk of the token after its settled length on. It
    holds no more pages than with a sliding window of the chunk's size. At the start of a chunk it needs no earlier
    pages."""

    spec: ChunkedSpec

    def first_needed(self, settled: int) -> int:
        return settled // self.spec.window * self.spec.window // self.page_tokens

    def next_drop(self, settled: int) -> int:
        next_page = (self.first_needed(settled) + 1) * self.page_tokens
        return pages_for(next_page, self.spec.window) * self.spec.window  # the first edge at or behind it
