"""Cluster: several simulated replicas behind a router. All events happen in the order of simulated time."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from outrider.engine.collector import collections_paused
from outrider.simulation.cost_table import CostTable
from outrider.simulation.outcome import Outcome
from outrider.simulation.replica import SimulatedReplica
from outrider.simulation.router import RoutingPolicy
from outrider.simulation.trace import Load, TracedRequest


class Cluster:
    def __init__(self, table: CostTable, num_replicas: int, router: RoutingPolicy, *, seed: int = 0,
                 skips: bool = True) -> None:
        """skips: simulate many decode steps at once where possible, which is faster, see `SimulatedReplica`."""
        self.outcome = Outcome()
        self._replicas = [SimulatedReplica(table, self.outcome, seed=seed, skips=skips) for _ in range(num_replicas)]
        self._loads = [0] * num_replicas
        self._router = router
        self._turns: list[tuple[float, int]] = []  # time and replica; entries that a later one replaced are stale
        self._num_received = 0

    def run(self, load: Load) -> Outcome:
        """Simulate until every request has ended. At equal times, requests arrive before replicas run their scheduling
        turns."""
        with collections_paused():
            arrivals = load.arrivals()
            waiting = next(arrivals, None)
            while True:
                turn = self._next_turn()
                if waiting is not None and waiting.arrival <= turn:
                    self._receive(waiting)
                    waiting = next(arrivals, None)
                elif turn < inf:
                    self._make_turn(load)
                else:
                    break
        for replica in self._replicas:
            replica.close()
        return self.outcome

    def _next_turn(self) -> float:
        while self._turns:
            time, index = self._turns[0]
            if self._replicas[index].next_turn == time:
                return time
            heappop(self._turns)
        return inf

    def _receive(self, ask: TracedRequest) -> None:
        index = self._router.choose(self._loads, ask.beginning)
        self._loads[index] += 1
        replica = self._replicas[index]
        replica.receive(self._num_received, ask, ask.arrival)
        self._num_received += 1
        self._note(index)

    def _make_turn(self, load: Load) -> None:
        time, index = heappop(self._turns)
        ended = self._replicas[index].turn()
        self._loads[index] -= len(ended)
        self._note(index)
        for _ in ended:
            following = load.after(time)
            if following is not None:
                self._receive(following)

    def _note(self, index: int) -> None:
        next_turn = self._replicas[index].next_turn
        if next_turn is not None:
            heappush(self._turns, (next_turn, index))
