"""Which running request gives way to others when rows or pages are short: one of the tenant that holds the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.sched.request import Request
from outrider.sched.shares import Tenant
from outrider.sched.waiting import Rank


def held_tokens(running: Iterable[Request]) -> Counter[Tenant]:
    """Tokens that the pages of each tenant's requests have room for."""
    held: Counter[Tenant] = Counter()
    for request in running:
        held[request.input.tenant] += request.covered
    return held


def least_important(requests: Sequence[Request], running: Iterable[Request],
                    rank: Callable[[Request], Rank]) -> Request:
    """Of the running requests that may give way: of the tenant that holds the most, the last by priority and
    arrival."""
    tenants = {request.input.tenant for request in requests}
    if len(tenants) > 1:
        held = held_tokens(running)
        giver = max(tenants, key=lambda tenant: held[tenant])
        requests = [request for request in requests if request.input.tenant == giver]
    return max(requests, key=rank)
