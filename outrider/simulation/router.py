"""Routers: which replica a request goes to, by the replicas' loads and the beginning of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

SLACK = 1.25  # a replica that knows the beginning may have this many times the mean load
SPARE = 4  # and so many requests more


class RoutingPolicy(Protocol):
    def choose(self, loads: Sequence[int], beginning: object) -> int:
        """The index of a replica. loads: requests that each replica has. beginning: equal for prompts that begin
        equally; None for a prompt whose beginning no other has."""


class RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[int], beginning: object) -> int:
        self._last = (self._last + 1) % len(loads)
        return self._last


class LeastLoad:
    """The replica with the fewest requests; among equal ones they take turns."""

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


class PrefixAffinity:
    """The replica that had the beginning last, unless it has far more requests than the others have in the mean: then
    the replica with the fewest, which has the beginning from then on."""

    def __init__(self) -> None:
        self._least = LeastLoad()
        self._home: dict[object, int] = {}

    def choose(self, loads: Sequence[int], beginning: object) -> int:
        home = None if beginning is None else self._home.get(beginning)
        if home is not None and loads[home] <= SLACK * sum(loads) / len(loads) + SPARE:
            return home
        chosen = self._least.choose(loads, beginning)
        if beginning is not None:
            self._home[beginning] = chosen
        return chosen


ROUTERS: dict[str, Callable[[], RoutingPolicy]] = {"round-robin": RoundRobin, "least-load": LeastLoad,
                                            "prefix": PrefixAffinity}
