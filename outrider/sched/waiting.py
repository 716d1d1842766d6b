"""WaitingRequests: requests without a row, in a line for each tenant: by priority, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import count

from outrider.sched.faults import EVERYONE
from outrider.sched.request import Request
from outrider.sched.shares import Tenant

Rank = tuple[int, int]  # priority, number of arrival: the least comes first
Line = list[tuple[Rank, Request]]  # a heap


class WaitingRequests:
    """While requests are on trial (`faults.py`), all others are held back: they wait, and none of them is next."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._ranks: dict[int, Rank] = {}  # rank of every request that has not ended, whether it waits or runs
        self._lines: dict[Tenant, Line] = {}  # none of them is empty
        self._held_back: Line = []  # no heap
        self._on_trial: Container[int] = EVERYONE  # requests that may run

    def __len__(self) -> int:
        return self.num_ready + len(self._held_back)

    @property
    def has_next(self) -> bool:
        return bool(self._lines)

    @property
    def num_ready(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def tenants(self) -> Mapping[Tenant, int]:
        """How many requests of each tenant wait and may run."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def has_next_of(self, tenant: Tenant) -> bool:
        return tenant in self._lines

    def next_of(self, tenant: Tenant) -> Request:
        return self._lines[tenant][0][1]

    @property
    def first_arrived(self) -> Request:
        """The earliest request among those that are first in their tenants' lines."""
        return min((line[0][1] for line in self._lines.values()), key=lambda request: request.arrived_at)

    @property
    def ready(self) -> Iterator[Request]:
        """The waiting requests that may run, in no particular order."""
        return (request for line in self._lines.values() for _, request in line)

    def rank(self, request: Request) -> Rank:
        """The place of a request within its tenant's line: the greater the rank, the less important the request."""
        return self._ranks[request.id]

    def arrive(self, request: Request) -> None:
        self._ranks[request.id] = (request.input.priority, next(self._arrivals))
        self.push(request)

    def push(self, request: Request) -> None:
        """Put a request that has arrived before back in its old place."""
        entry = (self._ranks[request.id], request)
        if self._may_run(request):
            heapq.heappush(self._lines.setdefault(request.input.tenant, []), entry)
        else:
            self._held_back.append(entry)

    def pop(self, tenant: Tenant) -> Request:
        line = self._lines[tenant]
        request = heapq.heappop(line)[1]
        if not line:
            del self._lines[tenant]
        return request

    def hold_back_all_but(self, on_trial: Container[int]) -> None:
        """Hold back all requests but these."""
        self._on_trial = on_trial
        self._line_up([*self.ready, *(request for _, request in self._held_back)])

    def remove(self, request: Request) -> None:
        """Remove a request that has ended while it waited."""
        line = self._lines.get(request.input.tenant, [])
        left = [entry for entry in line if entry[1] is not request]
        if len(left) == len(line):
            self._held_back = [entry for entry in self._held_back if entry[1] is not request]
        elif left:
            heapq.heapify(left)
            self._lines[request.input.tenant] = left
        else:
            del self._lines[request.input.tenant]

    def forget(self, request: Request) -> None:
        """Forget the rank of a request that has ended."""
        del self._ranks[request.id]

    def _line_up(self, requests: Iterable[Request]) -> None:
        self._lines, self._held_back = {}, []
        for request in requests:
            self.push(request)

    def _may_run(self, request: Request) -> bool:
        return request.id in self._on_trial
