"""HostDrafts: drafts that a drafter on the host makes for the batch which is being scheduled.

The host knows settled tokens only, so a draft continues those, with room for what steps in flight may accept of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core import HostDraft
from outrider.sched.request import Request


class HostDrafter(Protocol):
    """Guesses on the host, from settled tokens."""

    def propose(self, request_id: int, token_ids: Sequence[int], num_wanted: int) -> list[int]: ...

    def finish(self, request_id: int, token_ids: Sequence[int]) -> None: ...


class HostDrafts:
    def __init__(self, drafter: HostDrafter) -> None:
        self._drafter = drafter
        self._by_row: dict[int, HostDraft] = {}

    def propose(self, request: Request, most: int) -> int:
        """How many of the drafts that the device will have for the request the batch shall check."""
        known = len(request.token_ids)
        in_flight = request.bound.at_most + 1 - known
        guess = self._drafter.propose(request.id, request.token_ids, most + in_flight)
        if len(guess) <= (0 if in_flight == 0 else request.in_flight_samples):
            return 0 if request.num_proposed == 0 else most  # a device drafter may have one
        self._by_row[request.row] = HostDraft(request.row, known, guess)
        return min(most, len(guess))

    def drop(self, row: int) -> None:
        """The row's request is not in the batch, or has no row any more."""
        self._by_row.pop(row, None)

    def take(self) -> list[HostDraft]:
        """The drafts of the batch that is about to be queued."""
        drafts, self._by_row = list(self._by_row.values()), {}
        return drafts

    def finish(self, request: Request) -> None:
        """The request has ended; others may continue like it."""
        self._drafter.finish(request.id, request.token_ids)
