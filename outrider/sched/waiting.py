"""WaitingRequests: requests without a row, by priority, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from itertools import count

from outrider.sched.request import Request

Rank = tuple[int, int]  # priority, number of arrival: the least comes first


class WaitingRequests:
    """While requests are on trial (`faults.py`), all others are held back: they wait, and none of them is next."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._ranks: dict[int, Rank] = {}  # rank of every request that has not ended, whether it waits or runs
        self._heap: list[tuple[Rank, Request]] = []
        self._held_back: list[tuple[Rank, Request]] = []
        self._on_trial: Container[int] | None = None  # requests; None if all may run

    def __len__(self) -> int:
        return len(self._heap) + len(self._held_back)

    @property
    def has_next(self) -> bool:
        return bool(self._heap)

    @property
    def num_ready(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> Request:
        return self._heap[0][1]

    @property
    def ready(self) -> Iterator[Request]:
        """The waiting requests that may run, in no particular order."""
        return (request for _, request in self._heap)

    def first(self, most: int) -> list[Request]:
        return [request for _, request in heapq.nsmallest(most, self._heap)]

    def rank(self, request: Request) -> Rank:
        """The greater it is, the less the request matters."""
        return self._ranks[request.id]

    def arrive(self, request: Request) -> None:
        self._ranks[request.id] = (request.input.priority, next(self._arrivals))
        self.push(request)

    def push(self, request: Request) -> None:
        """The request, which has arrived before, waits again in its old place."""
        entry = (self._ranks[request.id], request)
        if self._may_run(request):
            heapq.heappush(self._heap, entry)
        else:
            self._held_back.append(entry)

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def hold_back_all_but(self, on_trial: Container[int] | None) -> None:
        """`None`: hold back no request any more."""
        self._on_trial = on_trial
        entries = [*self._heap, *self._held_back]
        self._heap = [entry for entry in entries if self._may_run(entry[1])]
        self._held_back = [entry for entry in entries if not self._may_run(entry[1])]
        heapq.heapify(self._heap)

    def remove(self, request: Request) -> None:
        """The request ends while it waits."""
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        self._held_back = [entry for entry in self._held_back if entry[1] is not request]
        heapq.heapify(self._heap)

    def forget(self, request: Request) -> None:
        """The request has ended, and has no rank any more."""
        del self._ranks[request.id]

    def _may_run(self, request: Request) -> bool:
        return self._on_trial is None or request.id in self._on_trial
