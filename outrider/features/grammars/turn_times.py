"""TurnTimes: the processor time that the grammars of each client take in the steps, and which rows take too much.

A grammar that reads a text in many ways takes time that grows with the cube of the text: a tenth of a second for each
token after 300. Every request of the step waits for that, and the grammar library bounds the work for masks alone. So
the rows of one client may take a bounded time of each turn. If they take more, for long enough, the slow ones end. Rows
of the program itself (client None) may take any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import NamedTuple

TURN_SECONDS = 0.04  # that the rows of one client may take of every turn
MOST_DEBT = 0.15  # seconds beyond that, over all turns, before rows end
LEAST_SLOW = 0.002  # seconds of a turn: a row that takes less never ends
TOO_SLOW = "there are so many ways to read the text by it that a token takes too long"


class RowTime(NamedTuple):
    client: str | None
    seconds: float  # of this turn


class TurnTimes:
    def __init__(self) -> None:
        self._debts: dict[str, float] = {}  # seconds by client; none of them is 0

    def find_slow(self, times: Mapping[int, RowTime]) -> list[int]:
        """Take the times of a turn by row, and return the rows that must end. Clients without a row are forgotten."""
        by_client: dict[str, list[float]] = {}
        for client, seconds in times.values():
            if client is not None:
                by_client.setdefault(client, []).append(seconds)
        debts = {client: self._debts.get(client, 0.0) + sum(own) - TURN_SECONDS for client, own in by_client.items()}
        over = {client for client, debt in debts.items() if debt > MOST_DEBT}
        self._debts = {client: debt for client, debt in debts.items() if debt > 0 and client not in over}
        least = {client: max(LEAST_SLOW, mean(by_client[client]) / 2) for client in over}
        return [row for row, (client, seconds) in times.items() if client in least and seconds > least[client]]
