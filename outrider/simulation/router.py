"""RoutingPolicy: decides which replica of a simulation gets a request. Also contains the policies that consider loads
alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RoutingPolicy(Protocol):
    def choose(self, loads: Sequence[int], beginning: object) -> int:
        """Return the index of the replica that gets a request. loads: the number of requests of each replica.
        beginning: a key that prompts with the same prefix share; None for a prompt without a shared prefix."""


class RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[int], beginning: object) -> int:
        self._last = (self._last + 1) % len(loads)
        return self._last


class LeastLoad:
    """Chooses the replica with the fewest requests. Replicas with equally many requests take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, loads: Sequence[int], beginning: object) -> int:
        least, start = min(loads), self._turns.choose(loads, None)
        if loads[start] == least:
            return start
        try:
            return loads.index(least, start)
        except ValueError:
            return loads.index(least)
