"""DecodeRun: makes many steps of a scheduler at once, while every running request decodes and nothing else happens.

Simulations use it to save time. Afterwards the scheduler and the pages are in the same state as if the steps had been
made one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from outrider.cache.kinds import pages_for
from outrider.core import Bound, ScheduledBatch, Settled
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler

SETTLE, RESERVE = 0, 1  # in the order in which a turn of the engine does them


class DecodeRun:
    """Advances a scheduler by several iterations of the engine loop (turns). In each turn the engine takes the oldest
    result and schedules one more step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_possible = not (scheduler.speculation.makes_drafts or scheduler.cache.takes_checkpoints)

    @property
    def requests(self) -> list[Request]:
        """The running requests, in the order of their batches."""
        return self._scheduler._running

    @property
    def batches(self) -> list[ScheduledBatch]:
        """The steps in flight, oldest first."""
        return list(self._scheduler._in_flight.values())

    def num_turns(self) -> int:
        """Return the number of turns from now on that only decode: every running request gets one token, and no request
        ends, starts or lacks a page."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        # The last token of a prompt, alone in its step, looks like a decoded one, and may promise a page.
        running, is_pure = scheduler._running, self._is_possible and not (cache.has_orders or cache.promises)
        if not (is_pure and running) or scheduler._waiting or scheduler._suspects:
            return 0
        num = min([request.num_left for request in running])
        if num <= 0 or not self._only_decodes() or not self._has_pages(num):
            return 0
        return num

    def advance(self, num_turns: int, tokens_after: Callable[[Request, int], range]) -> None:
        """Make `num_turns` turns at once, at most `num_turns()` of them. `tokens_after(request, n)` gives the next n
        tokens of a request."""
        scheduler = self._scheduler
        for request in scheduler._running:
            request.token_ids += tokens_after(request, num_turns)
        self._move_pages(num_turns)
        for request in scheduler._running:
            request.settled.at_least += num_turns
            request.folded = request.settled.at_least
            request.bound.at_most += num_turns
            request.stats.num_steps += num_turns
        scheduler.cache.take_changes()
        scheduler.stats.num_steps += num_turns
        batches = [replace(batch, step=batch.step + num_turns, bounds=[bound + num_turns for bound in batch.bounds])
                   for batch in scheduler._in_flight.values()]
        scheduler._in_flight.clear()
        scheduler._in_flight.update({batch.step: batch for batch in batches})

    def _only_decodes(self) -> bool:
        """Whether every step in flight has one token of each running request, and no more steps may be in flight."""
        batches, running = self._scheduler._in_flight, self._scheduler._running
        if len(batches) < self._scheduler.limits.steps_in_flight:
            return False
        ids, num = [request.id for request in running], len(running)
        return all(batch.request_ids == ids and sum(batch.num_known) == num == sum(batch.samples)
                   and not batch.admissions for batch in batches.values())

    def _has_pages(self, num_turns: int) -> bool:
        cache = self._scheduler.cache
        most = sum(pages_for(num_turns, group.page_tokens) + 1 for group in cache.groups)
        return most * len(self._scheduler._running) <= cache.pool.num_free

    def _move_pages(self, num_turns: int) -> None:
        """Publish, drop and allocate pages, turn by turn, and request by request within a turn."""
        running, cache = self._scheduler._running, self._scheduler.cache
        events = [(turn, kind, index) for index, request in enumerate(running)
                  for kind in (SETTLE, RESERVE) if (turn := self._next_turn(request, kind)) <= num_turns]
        heapify(events)
        while events:
            turn, kind, index = events[0]
            request = running[index]
            if kind == SETTLE:
                settled = Settled(request.settled.at_least + turn)
                request.next_event = cache.settle(request.id, settled, request.token_ids)
            else:
                is_there = cache.reserve(request.id, Bound(request.bound.at_most + turn))
                assert is_there, "a run of steps has no page left"
                request.covered = cache.covered(request.id)
            following = max(turn + 1, self._next_turn(request, kind))
            if following <= num_turns:
                heapreplace(events, (following, kind, index))
            else:
                heappop(events)

    def _next_turn(self, request: Request, kind: int) -> int:
        """The first turn in which the cache must publish, drop or allocate pages of the request."""
        if kind == SETTLE:
            return request.next_event - request.settled.at_least
        return request.covered - self._scheduler.cache.lookahead - request.bound.at_most + 1
