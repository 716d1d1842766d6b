"""BodyTurns: limits how fast the large bodies of one tenant are received.

The event loop copies the bytes that arrive. If eight clients of one tenant sent 10 MB each at full speed, every event
of other tenants would wait while the loop copies a piece of all eight. Instead the bodies of one tenant take turns, and
in each turn a bounded number of bytes is received.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURN_BYTES = 1 << 18
TURN_SECONDS = 0.002  # between two turns of one tenant: 1 Gbit/s


class BodyTurns:
    """Queues, one for each tenant, in which the receivers of bodies wait for their turns. One object serves one event
    loop."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by tenants who had a turn just now

    async def wait(self, tenant: str) -> None:
        """Wait for the tenant's next turn. Requests of the tenant that are already waiting come first."""
        if tenant not in self._lines:
            self._lines[tenant] = deque()
            self._call_next(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines[tenant].append(turn)
        await turn

    def _call_next(self, tenant: str) -> None:
        asyncio.get_running_loop().call_later(TURN_SECONDS, self._give_turn, tenant)

    def _give_turn(self, tenant: str) -> None:
        line = self._lines[tenant]
        while line:
            turn = line.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._call_next(tenant)
                return
        del self._lines[tenant]
