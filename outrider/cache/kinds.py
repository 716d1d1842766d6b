"""What differs between kinds of cache: how many pages a request may hold, which it may drop, what serves a prefix.

One class per kind, bound to one group's geometry, or to the pages that hold its checkpoints. Planner, allocator,
buffers, graphs and kernels all ask it; there is no second formula for any of these numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from outrider.cache.spec import FullSpec, PagedSpec, RecurrentSpec, SlidingSpec
from outrider.core import Limits

CHECKPOINT_INTERVAL = 1024  # tokens


def pages_for(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class Capacity:
    """Sizes of one group for one request."""

    table_width: int  # columns of its row in the page table: one per page of positions, dropped or not
    max_pages: int  # pages it can hold at once


class Kind(Protocol):
    def capacity(self, limits: Limits) -> Capacity: ...

    def pages_to_start(self, tokens: int, limits: Limits) -> int:
        """Pages held at most while `tokens` tokens are computed: what admission asks for."""
        ...

    def first_needed(self, settled: int) -> int:
        """The first column that a row with `settled` computed tokens can still read."""
        ...

    def next_drop(self, settled: int) -> int:
        """The settled length at which `first_needed` moves on."""
        ...

    def serves(self, is_cached: Callable[[int], bool], candidate: int) -> int:
        """The longest prefix of at most `candidate` tokens (a multiple of the page) that cached columns serve."""
        ...


@dataclass(frozen=True)
class FullKind:
    """Every token's page stays until the request ends."""

    spec: FullSpec
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


@dataclass(frozen=True)
class SlidingKind:
    """Only pages that a query at or after the settled length can see."""

    spec: SlidingSpec
    page_tokens: int

    def capacity(self, limits: Limits) -> Capacity:
        width = pages_for(limits.max_len, self.page_tokens)
        # The window of the next settled query plus everything unsettled; the first may be a page's last token.
        held = self.spec.window - 1 + limits.max_unsettled_tokens + limits.max_drafts
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


@dataclass(frozen=True)
class RowCapacity:
    """Sizes of a model's recurrent layers for one request."""

    row_bytes: int  # its state, tail and window in all of them
    window_bytes: int  # of these, what the drafts take: the only part that grows with their number
    checkpoint_pages: int  # pages of one checkpoint
    max_checkpoints: int  # that it can hold at once


@dataclass(frozen=True)
class RecurrentKind:
    """All recurrent layers of a model, or none. A running state is never a page: it lies in the request's row. A
    checkpoint is a list of pages, with the layers' states and tails one after the other."""

    layers: tuple[tuple[int, RecurrentSpec], ...] = ()
    page_tokens: int = 1  # checkpoints are taken at multiples of this, where the pages of all the target's groups end
    page_bytes: int = 1
    interval: int = CHECKPOINT_INTERVAL

    @property
    def checkpoint_bytes(self) -> int:
        return sum(spec.state_bytes + spec.tail_bytes for _, spec in self.layers)

    def capacity(self, limits: Limits) -> RowCapacity:
        window = limits.max_drafts * sum(spec.input_bytes for _, spec in self.layers)
        # A step may pass several intervals, a prompt's end and a last boundary; one more was written before.
        per_step = limits.max_batched_tokens // self.interval + 2
        return RowCapacity(
            row_bytes=self.checkpoint_bytes + window,
            window_bytes=window,
            checkpoint_pages=pages_for(self.checkpoint_bytes, self.page_bytes),
            max_checkpoints=limits.steps_in_flight * per_step + 1 if self.layers else 0,
        )

    def starts(self) -> dict[int, int]:
        """Where each layer's part begins in a checkpoint's bytes."""
        sizes = [spec.state_bytes + spec.tail_bytes for _, spec in self.layers]
        return {layer: start for (layer, _), start in zip(self.layers, accumulate(sizes, initial=0), strict=False)}

    def is_kept(self, boundary: int, prompt_len: int) -> bool:
        """Taken for good, and not only until the next one: at intervals, and last before the prompt's end."""
        return boundary % self.interval == 0 or boundary == self.last_boundary(prompt_len)

    def last_boundary(self, tokens: int) -> int:
        """The last one from which at least one of the tokens is left to compute."""
        return max(0, tokens - 1) // self.page_tokens * self.page_tokens

    def serves(self, has_checkpoint: Callable[[int], bool], candidate: int) -> int:
        """The longest prefix of at most `candidate` tokens whose state is known; without layers all of it."""
        if not self.layers:
            return candidate
        for boundary in range(candidate // self.page_tokens * self.page_tokens, 0, -self.page_tokens):
            if has_checkpoint(boundary):
                return boundary
        return 0


def kind_of(spec: PagedSpec, page_tokens: int) -> Kind:
    match spec:
        case SlidingSpec():
            return SlidingKind(spec, page_tokens)
        case FullSpec():
            return FullKind(spec, page_tokens)


def capacity(spec: PagedSpec, page_tokens: int, limits: Limits) -> Capacity:
    return kind_of(spec, page_tokens).capacity(limits)
