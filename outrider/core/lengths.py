"""The two lengths the host keeps of a request, as types that cannot be used as exact values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Settled:
    """Computed tokens confirmed by a result. A lower bound of the truth, which lives on the device."""

    at_least: int = 0


@dataclass(slots=True)
class Bound:
    """Computed tokens if every step in flight accepts all it was given. An upper bound of the truth."""

    at_most: int = 0
