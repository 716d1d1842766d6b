"""Chooses the running request to preempt when rows or pages are short: one of the tenant that holds the most.

Tenants share pages equally as long as each request fits into its tenant's share. A larger request would be preempted
again and again for tenants that hold less, and never end. So a request that was preempted a few times gets tenure:
other requests are preempted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.sched.request import Request, State
from outrider.sched.shares import Tenant
from outrider.sched.waiting import Rank, WaitingRequests


def held_tokens(running: Iterable[Request]) -> Counter[Tenant]:
    """Return, for each tenant, the number of tokens that the pages of its running requests have room for."""
    held: Counter[Tenant] = Counter()
    for request in running:
        held[request.input.tenant] += request.covered
    return held


def least_important(requests: Sequence[Request], running: Iterable[Request],
                    rank: Callable[[Request], Rank]) -> Request:
    """Return the request to preempt, out of `requests`. It is the last by priority and arrival of the tenant that holds
    the most tokens."""
    tenants = {request.input.tenant for request in requests}
    if len(tenants) > 1:
        held = held_tokens(running)
        giver = max(tenants, key=lambda tenant: held[tenant])
        requests = [request for request in requests if request.input.tenant == giver]
    return max(requests, key=rank)


MOST_GIVEN_WAY = 3  # times that a request gives way beside other tenants, until it has tenure


class Tenure:
    """Protects one request at a time, the holder: it is never preempted, and others are preempted for it until it
    ends."""

    def __init__(self) -> None:
        self.is_short = False  # the holder lacked pages in the last step
        self._is_kept_free = False  # what others give up is the holder's: none of them starts
        self._times: Counter[int] = Counter()  # that requests gave way
        self._due: list[Request] = []  # the first of them is the holder

    @property
    def holder(self) -> Request | None:
        return self._due[0] if self._due else None

    def give_way(self, request: Request) -> None:
        self._times[request.id] += 1
        if self._times[request.id] == MOST_GIVEN_WAY:
            self._due.append(request)

    def lack(self) -> None:
        """Note that the holder needs pages that it cannot get in this step. From now on free pages are reserved for
        it."""
        self.is_short = self._is_kept_free = True

    def begin_step(self) -> None:
        """Called before each step. Stops keeping pages free for a holder that yields tokens and lacked no page in the
        last step. This holder rarely needs a new page, so other requests may use the free pages."""
        holder = self.holder
        if holder is None or (holder.yields_tokens and not self.is_short):
            self._is_kept_free = False
        self.is_short = False

    def keeps_out(self, request: Request, waiting: WaitingRequests) -> bool:
        """Whether a request may not start now, because pages are kept for the holder. While the holder waits behind
        other requests of its tenant, every request may start."""
        holder = self.holder
        if holder is None or request is holder or not self._is_kept_free:
            return False
        tenant = holder.input.tenant
        return holder.state is State.RUNNING or waiting.has_next_of(tenant) and holder is waiting.next_of(tenant)

    def forget(self, request: Request) -> None:
        """End the tenure of a request that has ended."""
        if request is self.holder:
            self.is_short = self._is_kept_free = False
        if self._times.pop(request.id, 0) >= MOST_GIVEN_WAY:
            self._due.remove(request)
