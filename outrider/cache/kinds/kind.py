"""PagedSpec, a layer's declaration of its paged cache; Kind, its page arithmetic; and the registry from spec to kind.

Layers with equal specs may share a group. A kind is a spec with the page size of one group. Planner, allocator,
buffers, graphs and kernels all use the kind's methods, so that each formula exists only once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cache.kinds.parts import Part
from outrider.cache.kinds.types import MODEL_CACHE, CacheType
from outrider.core import Limits


def pages_for(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


class PagedSpec(ABC):
    """A layer's declaration of the tensors that it keeps in pages. Subclasses are frozen dataclasses."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return the tensors that are kept for every token, in the order in which they are stored in a page."""

    @property
    def cache_type(self) -> CacheType:
        """Return how the layer's keys and values are stored."""
        return MODEL_CACHE

    def stored_as(self, cache_type: CacheType) -> PagedSpec:
        """Return the spec of the same layer with keys and values stored as `cache_type`. A spec that has no keys and
        values, or stores them in another form, raises ValueError for every type but the model's dtype."""
        if cache_type == MODEL_CACHE:
            return self
        raise ValueError(f"kv_cache_dtype={cache_type.name!r} is for layers that keep keys and values, and some layers "
                         f"of this model keep something else ({type(self).__name__}): use kv_cache_dtype='auto'")

    @property
    def visible_tokens(self) -> int | None:
        """Return how many tokens a query reads at most; None if it reads its whole context."""
        return None

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one token takes in one layer."""
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class Capacity:
    """The most pages that one request may hold in a group, and the width of its page table."""

    table_width: int  # columns of the request's row in the page table: one per page of positions, dropped or not
    max_pages: int  # pages that the request can hold at once


class Kind(Protocol):
    """The page arithmetic of a spec, for the page size of its group."""

    def capacity(self, limits: Limits) -> Capacity: ...

    def pages_to_start(self, tokens: int, limits: Limits) -> int:
        """Return the most pages that a request holds while `tokens` tokens are computed. Admission needs this many."""

    def first_needed(self, settled: int) -> int:
        """Return the first page-table column that a row with `settled` computed tokens can still read. The pages before
        it are freed."""

    def next_drop(self, settled: int) -> int:
        """Return the next settled length at which `first_needed` grows, so that a page can be freed."""

    def serves(self, is_cached: Callable[[int], bool], candidate: int) -> int:
        """Return the length of the longest prefix of at most `candidate` tokens (a multiple of the page size) for which
        all needed pages are cached. `is_cached(column)`: whether the page of this column is."""


_KINDS: dict[type[PagedSpec], Callable[[Any, int], Kind]] = {}


def register_kind(spec: type[PagedSpec], kind: Callable[[Any, int], Kind]) -> None:
    """Use `kind(spec, page_tokens)` for layers that declare this type of spec."""
    _KINDS[spec] = kind


def kind_of(spec: PagedSpec, page_tokens: int) -> Kind:
    if type(spec) not in _KINDS:
        raise ValueError(f"{type(spec).__name__} has no cache kind: register one with register_kind")
    return _KINDS[type(spec)](spec, page_tokens)
