"""CompileTurns: decides which tenant may compile a grammar now. Tenants take turns, so a tenant that sends many
grammars delays only its own requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.features.grammars.form_lease import FormsBusy

MOST_AT_ONCE = 8  # of all tenants together
MOST_PER_TENANT = 1
MOST_WAITING = 256  # of a tenant
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.5  # between two looks at whether a caller that waits has gone


class CompileTurns:
    """A queue for compiling grammars, with a line for each tenant. Tenants take turns in it. May be used by several
    threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: dict[str, deque[object]] = {}  # tickets by tenant; the tenant that is first had its turn last
        self._running: dict[str, int] = {}

    @contextmanager
    def turn(self, tenant: str, is_gone: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """A context manager. It waits for the tenant's turn to compile a grammar and holds the turn while the block
        runs. Raises FormsBusy if too many of the tenant's grammars wait, or if the wait takes too long."""
        self._wait(tenant, is_gone)
        try:
            yield
        finally:
            with self._change:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._change.notify_all()

    def _wait(self, tenant: str, is_gone: Callable[[], bool]) -> None:
        ticket, until = object(), time.monotonic() + WAIT_SECONDS
        with self._change:
            own = self._waiting.setdefault(tenant, deque())
            if len(own) >= MOST_WAITING:
                raise FormsBusy(f"{len(own)} grammars of this client wait to be compiled: try again later")
            own.append(ticket)
            try:
                while self._next() is not ticket:
                    if is_gone() or time.monotonic() > until:
                        raise FormsBusy("other grammars of this client are still being compiled: try again later")
                    self._change.wait(LOOK_SECONDS)
                self._running[tenant] = self._running.get(tenant, 0) + 1
            finally:
                own.remove(ticket)
                if not own:
                    self._waiting.pop(tenant)
                elif self._waiting.get(tenant) is own:
                    self._waiting[tenant] = self._waiting.pop(tenant)  # behind the other tenants
                self._change.notify_all()

    def _next(self) -> object | None:
        """The waiting caller that may compile now; None if there is none."""
        if sum(self._running.values()) >= MOST_AT_ONCE:
            return None
        return next((tickets[0] for tenant, tickets in self._waiting.items()
                     if self._running.get(tenant, 0) < MOST_PER_TENANT), None)
