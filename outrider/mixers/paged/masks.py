"""Masks: which keys a query sees, in addition to the causal rule and a layer's window.

A mask edits the causal mask by elementwise torch operations on positions. It is compiled and captured once, so it must
not read values that change: `mask_checks.py` refuses masks that are not frozen dataclasses of plain values. A batch may
let queries see a range of keys regardless of the mask (`ExtraKeys`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class QueryMarks(NamedTuple):
    """A query's own position, and the range of keys [span_starts, span_ends) that it always sees; both are 0 if there
    is none. The three tensors have the same shape, which can be broadcast with the positions of keys."""

    positions: torch.Tensor
    span_starts: torch.Tensor
    span_ends: torch.Tensor


class RangeReach(enum.Enum):
    """Decides which keys of a query's extra range a layer lets the query see."""

    WHOLE = "the whole range"
    WINDOW = "the keys of the range that are not before the layer's window"
    NOTHING = "none, beside those that the causal rule allows"


class Mask(Protocol):
    def __call__(self, causal: torch.Tensor, query: QueryMarks, key_positions: torch.Tensor) -> torch.Tensor:
        """Whether the query sees the key. causal: whether the causal rule and the layer's window let it."""


@dataclass(frozen=True)
class CausalMask:
    """The plain causal mask: a query sees itself and the keys before it."""

    def __call__(self, causal: torch.Tensor, query: QueryMarks, key_positions: torch.Tensor) -> torch.Tensor:
        return causal


CAUSAL = CausalMask()


def first_seen(positions: torch.Tensor, window: int, is_chunked: bool) -> torch.Tensor:
    """Return the position of the first key inside the window, for queries at these positions. A window slides, or
    begins at the edge of the query's chunk."""
    return positions - positions % window if is_chunked else positions - window + 1


def visible_keys(mask: Mask, window: int | None, is_chunked: bool, query: QueryMarks, key_positions: torch.Tensor,
                 reach: RangeReach = RangeReach.WHOLE) -> torch.Tensor:
    """Whether each query sees each key, given that the key exists. All arguments can be broadcast together."""
    causal = key_positions <= query.positions
    is_near = None if window is None else key_positions >= first_seen(query.positions, window, is_chunked)
    if is_near is not None:
        causal = causal & is_near
    seen = mask(causal, query, key_positions)
    if reach is RangeReach.NOTHING:
        return seen
    # Without a range the end is 0, and no key lies before it.
    in_span = (key_positions >= query.span_starts) & (key_positions < query.span_ends)
    if reach is RangeReach.WINDOW and is_near is not None:
        in_span = in_span & is_near
    return seen | in_span
