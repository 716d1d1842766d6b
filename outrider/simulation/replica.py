"""SimulatedReplica: one engine in simulated time. It does the same work in the same order as `Engine.step`, in turns.

A turn takes the result of the oldest step in flight, looks at the requests that have arrived, and schedules until as
many steps are in flight as may be. Turns in which all requests only decode are planned, and simulated together when the
next event happens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from outrider.core import RequestResult, SamplingParams, ScheduledBatch
from outrider.core.checked_request import CheckedRequest
from outrider.engine.make_scheduler import make_scheduler
from outrider.sched.decode_run import DecodeRun
from outrider.sched.request import Request
from outrider.simulation.cost_table import CostTable, visible
from outrider.simulation.device import SimulatedDevice, tokens_of
from outrider.simulation.outcome import GAP_UNIT, Outcome
from outrider.simulation.places import POLL_SECONDS, SimulatedPlaces
from outrider.simulation.trace import TracedRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, seed=0, ignore_eos=True, detokenize=False)


class Arrived(NamedTuple):
    """A request that a replica has received. `seconds`: the time from which the engine can schedule it."""

    seconds: float
    number: int
    ask: TracedRequest


class InFlight(NamedTuple):
    batch: ScheduledBatch
    end: float  # time at which the device has computed it


@dataclass(slots=True)
class Progress:
    """A running request, and when its client last received tokens."""

    ask: TracedRequest
    last: float = -1.0  # time of its last run; negative before the first


@dataclass
class PlannedTurns:
    """Future turns in which all requests only decode. They are simulated together when another event happens, or when
    all of them are over."""

    times: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # of the steps in flight, then of those that the turns submit


class SimulatedReplica:
    def __init__(self, table: CostTable, outcome: Outcome, *, seed: int = 0, skips: bool = True) -> None:
        """skips: simulate many turns that only decode at once. This is faster and does not change the counts."""
        self._table, self._outcome = table, outcome
        self._skips = skips and not table.places  # loads may end at any turn
        self._places = SimulatedPlaces(table.places, table.info.layout.page_bytes)
        self.scheduler = make_scheduler(table.info, enable_prefix_caching=table.enable_prefix_caching,
                                        features=[self._places] if table.places else [])
        self._depth = table.info.limits.steps_in_flight
        self._submits_early = table.submits_early and self._depth == 1
        self._device = SimulatedDevice(table.acceptance, seed)
        self._run = DecodeRun(self.scheduler)
        self._planned = PlannedTurns()
        self._in_flight: deque[InFlight] = deque()
        self._inbox: deque[Arrived] = deque()
        self._live: dict[int, Progress] = {}
        self._device_free = 0.0
        self.busy = 0.0  # seconds that the device has computed
        self.next_turn: float | None = None  # time of the next turn; None while there is nothing to do

    @property
    def load(self) -> int:
        """The number of requests that have arrived and not ended."""
        return len(self._inbox) + len(self._live)

    def receive(self, number: int, ask: TracedRequest, now: float) -> None:
        """Accept a request that arrives at time `now`. Planned turns before this time are simulated first; later ones
        are planned again, with the request."""
        self._make_planned(bisect_left(self._planned.times, now))
        seen = now + self._table.host.start
        self._inbox.append(Arrived(seen, number, ask))
        if self.next_turn is None:
            self.next_turn = seen

    def turn(self) -> list[TracedRequest]:
        """Simulate the turn at `next_turn`, after any planned turns before it. Returns the requests that ended."""
        self._make_planned(len(self._planned.times))
        assert self.next_turn is not None
        now = self.next_turn
        ended = self._take_result(now) if self._in_flight else []
        if self._submits_early:
            self._submit(now)
        while self._inbox and self._inbox[0].seconds <= now:
            self._add(self._inbox.popleft())
        while len(self._in_flight) < self._depth and self._submit(now):
            pass
        self.next_turn = self._time_of_next(now)
        if self._skips:
            self._plan()
        return ended

    def close(self) -> None:
        """Add this replica's counts to the simulation's outcome, at the end of the simulation."""
        outcome, cache = self._outcome, self.scheduler.cache
        outcome.busy.append(self.busy)
        outcome.num_queried_tokens += cache.stats.queried_tokens
        outcome.num_hit_tokens += cache.stats.hit_tokens
        outcome.loaded_pages.update(self._places.media.stats.num_loaded)
        outcome.num_preemptions += self.scheduler.stats.num_preemptions
        outcome.num_steps += self.scheduler.stats.num_steps

    # Inside: one turn

    def _add(self, arrived: Arrived) -> None:
        number, ask = arrived.number, arrived.ask
        prompt = ask.token_ids(number)
        self.scheduler.add(Request(number, CheckedRequest(prompt, GREEDY), len(prompt) + ask.output_len))
        self._live[number] = Progress(ask)
        self._outcome.num_prompt_tokens += len(prompt)

    def _submit(self, now: float) -> bool:
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        seconds = self._table.step(batch) if batch.num_requests or not self._table.places else POLL_SECONDS
        self._device_free = max(now, self._device_free) + seconds
        self.busy += seconds
        self._in_flight.append(InFlight(batch, self._device_free))
        if batch.drafting.num_wanted and (num := sum(map(_is_decoding, batch.num_known, batch.samples))):
            self._outcome.drafts.choose(num, sum(batch.num_drafts))
        return True

    def _time_of_next(self, now: float) -> float | None:
        if self._in_flight:
            batch, end = self._in_flight[0]
            return max(now, end + self._table.host.latency) + self._table.host_seconds(batch.num_requests)
        return max(now, self._inbox[0].seconds) if self._inbox else None

    def _take_result(self, now: float) -> list[TracedRequest]:
        batch, _ = self._in_flight.popleft()
        result = replace(self._device.run(batch), moved=self._places.carry_out(batch, now))
        if any(part.finish for part in result.requests):
            self._outcome.page_use.append(self.scheduler.cache.usage())
        return [ask for _, part in self.scheduler.update(result) if (ask := self._observe(part, now)) is not None]

    def _observe(self, result: RequestResult, now: float) -> TracedRequest | None:
        """Record the tokens of one request in a step's result. Returns the traced request if it has ended, otherwise
        None."""
        outcome = self._outcome
        if not result.run:
            return None
        progress = self._live[result.request_id]
        ask = progress.ask
        self._count_run(progress, now)
        drafts = outcome.drafts
        drafts.num_runs += 1
        drafts.num_tokens += len(result.run)
        drafts.num_drafted += result.num_drafted
        drafts.num_accepted += result.num_accepted
        if not result.finish:
            return None
        outcome.whole.append(now - ask.arrival)
        outcome.num_output_tokens += ask.output_len
        outcome.end = max(outcome.end, now)
        del self._live[result.request_id]
        return ask

    def _count_run(self, progress: Progress, now: float) -> None:
        """Record the tokens that a step gives to a request's client at time `now`."""
        if progress.last < 0:
            self._outcome.first_token.append(now - progress.ask.arrival)
        else:
            self._outcome.gaps[round((now - progress.last) / GAP_UNIT)] += 1
        progress.last = now

    # Inside: many turns

    def _plan(self) -> None:
        """Plan the next turns that only decode. `next_turn` is then the first turn after them."""
        num_turns = self._run.num_turns()
        if not num_turns:
            return
        assert self.next_turn is not None
        table, batch = self._table, self._in_flight[-1].batch
        num_requests, bounds = batch.num_requests, batch.bounds
        decode, host, latency = table.decode(num_requests, 0), table.host_seconds(num_requests), table.host.latency
        reading = [(cost.seconds, cost.window, visible(bounds, cost.window)) for cost in table.reading]
        times, all_seconds, ends = [], [], [step.end for step in self._in_flight]
        time, free = self.next_turn, self._device_free
        arrival = self._inbox[0].seconds if self._inbox else inf
        for index in range(num_turns):
            if time >= arrival:
                break
            seconds = decode
            for each, window, total in reading:
                if window is None:
                    total += (index + 1) * num_requests
                elif total < window * num_requests:
                    total = sum(min(bound + index + 1, window) for bound in bounds)
                seconds += each * total
            times.append(time)
            free = max(time, free) + seconds
            all_seconds.append(seconds)
            ends.append(free)
            time = max(time, ends[index + 1] + latency) + host
        self._planned = PlannedTurns(times, all_seconds, ends)
        self.next_turn = time

    def _make_planned(self, num_turns: int) -> None:
        """Simulate the first `num_turns` planned turns, and drop the rest of the plan."""
        planned, self._planned = self._planned, PlannedTurns()
        if num_turns < len(planned.times):
            self.next_turn = planned.times[num_turns]
        if not num_turns:
            return
        times, rows = planned.times, [request.row for request in self._run.requests]
        self._device.skip(rows, num_turns)
        self._run.advance(num_turns, _tokens_after)
        batches = self._run.batches
        ends = planned.ends[num_turns : num_turns + len(batches)]
        self._in_flight = deque(map(InFlight, batches, ends))
        self._device_free = ends[-1]
        for seconds in planned.step_seconds[:num_turns]:
            self.busy += seconds
        self._count_gaps(times[:num_turns])

    def _count_gaps(self, times: list[float]) -> None:
        gaps, drafts, num_requests = self._outcome.gaps, self._outcome.drafts, self.scheduler.num_running
        for request in self._run.requests:
            progress = self._live[request.id]
            self._count_run(progress, times[0])
            progress.last = times[-1]
        for before, now in zip(times, times[1:], strict=False):
            gaps[round((now - before) / GAP_UNIT)] += num_requests
        drafts.num_runs += num_requests * len(times)
        drafts.num_tokens += num_requests * len(times)


def _is_decoding(num_known: int, samples: bool) -> bool:
    return samples and num_known == 1


def _tokens_after(request: Request, num_tokens: int) -> range:
    known = len(request.token_ids)
    return tokens_of(request.id, known, known + num_tokens)
