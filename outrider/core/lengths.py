"""The two lengths that the host keeps of a request: bounds of its computed tokens, as types that cannot be mistaken for
the exact number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Settled:
    """Number of computed tokens that results have confirmed. A lower bound, because only the device knows the exact
    number."""

    at_least: int = 0


@dataclass(slots=True)
class Bound:
    """Number of computed tokens if every step in flight accepts all its drafts. An upper bound of the exact number."""

    at_most: int = 0
