"""TenantShares: how much of the engine each tenant uses, so that no tenant's requests can stop another's.

A tenant is the user on whose account a request runs: a server's API key, or None for all callers of one process.
Tenants share rows and prompt tokens:

    rows      a free row goes to the waiting tenant that has the fewest rows; if no row is free, the tenant with the
              most gives one up, unless the two would only swap places
    prompts   the tenant that has had fewer prompt tokens computed goes first in a step

A request's priority only orders the requests of its own tenant. With one tenant this file changes nothing.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping

Tenant = str | None


class NoTenant(enum.Enum):
    """Stands for the absence of a tenant, because None itself is a tenant."""

    NO_TENANT = enum.auto()


NO_TENANT = NoTenant.NO_TENANT


class TenantShares:
    def __init__(self, max_rows: int, max_lag: int) -> None:
        """max_lag: the most prompt tokens that a tenant can be behind another tenant. Without this limit, a tenant that
        was idle for long would go first until it had caught up with all that others computed in that time."""
        self.rows: Counter[Tenant] = Counter()  # of running requests
        self._max_rows, self._max_lag = max_rows, max_lag
        self._computed: dict[Tenant, int] = {}  # tokens of prompts

    def take_row(self, tenant: Tenant) -> None:
        self.rows[tenant] += 1

    def give_row(self, tenant: Tenant) -> None:
        self.rows[tenant] -= 1
        if not self.rows[tenant]:
            del self.rows[tenant]

    def compute(self, tenant: Tenant, num_tokens: int) -> None:
        self._computed[tenant] = self._computed.get(tenant, 0) + num_tokens

    def in_turn(self, tenants: Collection[Tenant]) -> list[Tenant]:
        """Return tenants with prompts to compute, in the order in which a step serves them."""
        if len(tenants) < 2:
            return list(tenants)
        computed = self._computed
        least = max(computed.get(tenant, 0) for tenant in tenants) - self._max_lag
        for tenant in tenants:
            if computed.get(tenant, 0) < least:
                computed[tenant] = least
        return sorted(tenants, key=lambda tenant: (computed.get(tenant, 0), self.rows[tenant]))

    def num_reserved(self, tenant: Tenant, waiting: Mapping[Tenant, int]) -> int:
        """Return how many free rows a tenant must leave to tenants that have fewer rows. waiting: the waiting requests
        of each tenant."""
        if len(waiting) < 2:
            return 0
        own = self.rows[tenant]
        return sum(min(num, max(0, own - self.rows[other])) for other, num in waiting.items())

    def row_giver(self, waiting: Collection[Tenant]) -> Tenant | NoTenant:
        """Return the tenant that must give up a row to a waiting tenant if all rows are taken."""
        fewest = min(self.rows[tenant] for tenant in waiting)
        giver, most = max(self.rows.items(), key=lambda held: held[1])
        return giver if most >= fewest + 2 else NO_TENANT
