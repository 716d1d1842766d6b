"""Specs and kinds of paged caches: the declarations, the questions a kind answers, and the registry from spec to kind.

A spec is a value: layers with equal specs may share a group. A kind is a spec bound to one group's page size. Planner,
allocator, buffers, graphs and kernels all ask the kind; there is no second formula for any of these numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.core import Limits

MODEL_DTYPE = "model"  # the element type of a part that is stored as the model computes


def pages_for(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class Part:
    """One tensor that a layer keeps of every token. A layer's parts are found by their names."""

    name: str
    shape: tuple[int, ...]  # shape of one token's values
    itemsize: int  # bytes of one element
    dtype: str = MODEL_DTYPE  # MODEL_DTYPE, or the name of a torch dtype, such as "uint8"

    @property
    def token_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class PagedSpec(ABC):
    """A layer's declaration of what it keeps in pages. Subclasses are frozen dataclasses."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The tensors kept of every token, in the order in which they lie in a page."""

    @property
    def visible_tokens(self) -> int | None:
        """Tokens that a query reads at most; None where it reads its whole context."""
        return None

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in one layer."""
        return sum(part.token_bytes for part in self.parts)


@dataclass(frozen=True)
class Capacity:
    """Sizes of one group for one request."""

    table_width: int  # columns of the request's row in the page table: one per page of positions, dropped or not
    max_pages: int  # pages that the request can hold at once


class Kind(Protocol):
    """A spec bound to the page size of its group."""

    def capacity(self, limits: Limits) -> Capacity: ...

    def pages_to_start(self, tokens: int, limits: Limits) -> int:
        """Most pages that a request holds while `tokens` tokens are computed. Admission needs this many."""

    def first_needed(self, settled: int) -> int:
        """The first column that a row with `settled` computed tokens can still read. A commit frees those before it."""

    def next_drop(self, settled: int) -> int:
        """The settled length at which `first_needed` moves on."""

    def serves(self, is_cached: Callable[[int], bool], candidate: int) -> int:
        """The longest prefix of at most `candidate` tokens (a multiple of the page) that cached columns serve."""


_KINDS: dict[type[PagedSpec], Callable[[Any, int], Kind]] = {}


def register_kind(spec: type[PagedSpec], kind: Callable[[Any, int], Kind]) -> None:
    """Let `kind(spec, page_tokens)` answer for layers that declare this type of spec."""
    _KINDS[spec] = kind


def kind_of(spec: PagedSpec, page_tokens: int) -> Kind:
    if type(spec) not in _KINDS:
        raise ValueError(f"{type(spec).__name__} has no cache kind: register one with register_kind")
    return _KINDS[type(spec)](spec, page_tokens)
