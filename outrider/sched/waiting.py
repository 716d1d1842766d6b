"""WaitingRequests: the requests without a row, in one queue for each tenant, ordered by priority, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import count

from outrider.sched.faults import EVERYONE
from outrider.sched.request import Request
from outrider.sched.shares import Tenant

Rank = tuple[int, int]  # priority, number of arrival: the least comes first
Entry = tuple[Rank, Request]


class Line:
    """The waiting requests of one tenant. A removed request stays in the heap until it comes first or half of the heap
    is removed. Searching the heap for each removed request would keep every tenant waiting when thousands are removed
    at once."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []  # its first entry was not removed
        self._ids: set[int] = set()  # of those that were not removed

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if request.id in self._ids)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._ids

    @property
    def first(self) -> Request:
        return self._heap[0][1]

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        self._ids.add(entry[1].id)

    def pop(self) -> Request:
        request = heapq.heappop(self._heap)[1]
        self._ids.remove(request.id)
        self._drop_removed()
        return request

    def remove(self, request: Request) -> None:
        self._ids.remove(request.id)
        self._drop_removed()

    def _drop_removed(self) -> None:
        if 2 * len(self._ids) < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].id in self._ids]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1].id not in self._ids:
            heapq.heappop(self._heap)


class WaitingRequests:
    """The queue of requests that wait to run, by tenant. While some requests are on trial (`faults.py`), all other
    requests are held back and none of them is chosen to run next."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._ranks: dict[int, Rank] = {}  # rank of every request that has not ended, whether it waits or runs
        self._lines: dict[Tenant, Line] = {}  # none of them is empty
        self._held_back: dict[int, Request] = {}  # by id
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
        """Return how many requests of each tenant wait and may run."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def has_next_of(self, tenant: Tenant) -> bool:
        return tenant in self._lines

    def next_of(self, tenant: Tenant) -> Request:
        return self._lines[tenant].first

    @property
    def first_arrived(self) -> Request:
        """Return the request that arrived first among the first requests of all tenants' queues."""
        return min((line.first for line in self._lines.values()), key=lambda request: request.arrived_at)

    @property
    def ready(self) -> Iterator[Request]:
        """Return the waiting requests that may run, in no particular order."""
        return (request for line in self._lines.values() for request in line)

    def rank(self, request: Request) -> Rank:
        """Return the rank of a request within its tenant's queue. The greater the rank, the less important the
        request."""
        return self._ranks[request.id]

    def arrive(self, request: Request) -> None:
        self._ranks[request.id] = (request.input.priority, next(self._arrivals))
        self.push(request)

    def push(self, request: Request) -> None:
        """Put a request back into its queue, at the rank that it got when it arrived."""
        if not self._may_run(request):
            self._held_back[request.id] = request
            return
        if request.input.tenant not in self._lines:
            self._lines[request.input.tenant] = Line()
        self._lines[request.input.tenant].push((self._ranks[request.id], request))

    def pop(self, tenant: Tenant) -> Request:
        request = self._lines[tenant].pop()
        self._drop_if_empty(tenant)
        return request

    def hold_back_all_but(self, on_trial: Container[int]) -> None:
        """Hold back all waiting requests except those on trial."""
        self._on_trial = on_trial
        self._line_up([*self.ready, *self._held_back.values()])

    def remove(self, request: Request) -> None:
        """Remove a request that has ended while it waited."""
        line = self._lines.get(request.input.tenant)
        if line is None or request not in line:
            self._held_back.pop(request.id, None)
            return
        line.remove(request)
        self._drop_if_empty(request.input.tenant)

    def forget(self, request: Request) -> None:
        """Forget the rank of a request that has ended."""
        del self._ranks[request.id]

    def _line_up(self, requests: Iterable[Request]) -> None:
        self._lines, self._held_back = {}, {}
        for request in requests:
            self.push(request)

    def _drop_if_empty(self, tenant: Tenant) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]

    def _may_run(self, request: Request) -> bool:
        return request.id in self._on_trial
