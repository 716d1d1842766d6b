"""The routers of `outrider simulate`: round robin, least load, or the policy of `outrider serve --replicas`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from outrider.replicas.policy import PrefixRouter
from outrider.simulation.router import LeastLoad, RoundRobin, RoutingPolicy


class ServedPolicy:
    """The routing policy of the server, for simulated replicas, which are identified by numbers."""

    def __init__(self) -> None:
        self._router = PrefixRouter()
        self._names: list[str] = []  # their order is that of the replicas' numbers

    def choose(self, loads: Sequence[int], beginning: object) -> int:
        if len(self._names) != len(loads):
            self._names = [f"{index:06}" for index in range(len(loads))]
        blocks = [] if beginning is None else [hash(beginning)]
        name = self._router.choose(blocks, _NamedLoads(loads, self._names))
        self._router.remember(blocks, name)
        return int(name)


class _NamedLoads(Mapping[str, int]):
    def __init__(self, loads: Sequence[int], names: list[str]) -> None:
        self._loads, self._names = loads, names

    def __getitem__(self, name: str) -> int:
        return self._loads[int(name)]

    def __contains__(self, name: object) -> bool:
        return True  # no replica of a simulation goes away

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


ROUTERS: dict[str, Callable[[], RoutingPolicy]] = {"round-robin": RoundRobin, "least-load": LeastLoad,
                                                   "prefix": ServedPolicy}
