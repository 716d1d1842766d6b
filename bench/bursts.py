"""Bursts of requests by simulation: first tokens, gaps and tokens per second of the scheduler on a modelled H200.

    python bench/bursts.py [--loads burst16 poisson0.9] [--max-step-ms 12] [--rows 512]

The scheduler is the real one. Its device is a model of llama8b on an H200, with two steps in flight as in the engine,
and its server takes requests in one after the other. `peer` is the rule of an engine without `max_step_ms`: requests
that decode come first, and prompts fill the step. The figures are simulated, so a rule must still be measured on a card
(bench/http_bursts.py). It never imports torch.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import MixedStepCosts, ReadCost
from outrider.core.params import SamplingParams
from outrider.sched.full_step import UnboundedPrompts
from outrider.sched.prompt_time import PromptTime
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler

# Milliseconds of steps with prompts by their tokens, as a server of llama8b measures them when it starts. Without
# attention; 448 tokens take longer than 512 and are left out, as there. Larger ones are in proportion.
STEP_MS = {64: 4.8, 128: 5.4, 192: 6.2, 256: 6.8, 320: 8.0, 384: 9.0, 512: 10.6, 640: 12.9, 768: 15.2, 896: 17.6,
           1024: 19.9, 1280: 25.0}
LARGER = (1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
DECODE_MS = {1: 4.1, 16: 4.3, 64: 4.7, 128: 5.7, 256: 8.1, 512: 13.0, 1024: 23.0}  # decode steps, without contexts
READ_SECONDS = 32e-9  # one token of context: 128 KiB at 4.1 TB/s
PAIR_SECONDS = 1.6e-9  # a prompt's token and a key that it sees, over all layers
SLOWER = 1.25  # a step of many tokens takes longer than at start-up: the card lowers its clock
FEW_TOKENS = 128  # steps up to this size do not
BUDGET, NUM_PAGES, PAGE_TOKENS = 8192, 46_000, 16
HOST_SECONDS, HOST_ROW_SECONDS = 0.2e-3, 3e-6  # of scheduling and updating a step, and for each of its requests
LAYOUT = plan_groups([LayerCache(0, FullSpec(8, 128, 2))], PAGE_TOKENS)


def start_up_costs() -> MixedStepCosts:
    sizes = {**STEP_MS, **{size: STEP_MS[1280] / 1280 * size for size in LARGER}}
    return MixedStepCosts(tuple(sizes), tuple(ms * 1e-3 for ms in sizes.values()), (ReadCost(None, PAIR_SECONDS),),
                          reading=(ReadCost(None, READ_SECONDS),))


COSTS = start_up_costs()
DECODING = MixedStepCosts(tuple(DECODE_MS), tuple(ms * 1e-3 for ms in DECODE_MS.values()))


def device_seconds(batch: ScheduledBatch) -> float:
    """How long the card computes the batch."""
    tokens = [known + drafts for known, drafts in zip(batch.num_known, batch.num_drafts, strict=True)]
    reading = COSTS.read([bound for bound, num in zip(batch.bounds, tokens, strict=True) if num < 8])
    if max(tokens) < 8:
        return DECODING.step(sum(tokens)) + reading
    attending = sum(COSTS.attend(num, bound - num) for bound, num in zip(batch.bounds, tokens, strict=True) if num >= 8)
    slower = SLOWER if sum(tokens) > FEW_TOKENS else 1.0
    return slower * COSTS.step(sum(tokens)) + reading + attending


@dataclass(frozen=True)
class Front:
    """The time of a server and its client before a request reaches the engine, and after a token has left it."""

    client_seconds: float = 0.5e-3  # to make a request: one after the other
    request_seconds: float = 0.7e-3  # to read and check one: one after the other
    first_seconds: float = 2.0e-3  # that every request takes besides
    token_seconds: float = 0.5e-3


@dataclass(frozen=True)
class Engine:
    """One way to serve: a rule for prompts, rows, and the server around them."""

    name: str
    prompt_time: Callable[[], UnboundedPrompts]
    max_rows: int
    front: Front = Front()


@dataclass(order=True)
class Arrival:
    seconds: float
    index: int
    num_in: int = field(compare=False)
    num_out: int = field(compare=False)


@dataclass(frozen=True)
class Load:
    name: str
    arrivals: Callable[[], list[Arrival]]
    rounds: int = 1  # of a closed loop: requests of each stream
    counted_from: float = 0.0  # seconds: tokens before this are no part of the figures


def burst(streams: int, rounds: int = 1, num_in: int = 512, num_out: int = 256) -> Load:
    """Streams that begin at once."""
    name = f"burst{streams}" if rounds == 1 else f"loop{streams}"
    return Load(name, lambda: [Arrival(0.0, i, num_in, num_out) for i in range(streams)], rounds)


def onto(established: int, streams: int) -> Load:
    """A burst that meets requests which have decoded for some seconds."""
    begin = 2.0 + established * 0.02

    def arrivals() -> list[Arrival]:
        before = [Arrival(0.0, i, 512, 1200) for i in range(established)]
        return before + [Arrival(begin, established + i, 512, 256) for i in range(streams)]

    return Load(f"{streams}onto{established}", arrivals, counted_from=begin)


def among(streams: int) -> Load:
    """A prompt of 8000 tokens every second among requests that decode, as in bench/gap.py."""
    def arrivals() -> list[Arrival]:
        before = [Arrival(0.0, i, 512, 900) for i in range(streams)]
        return before + [Arrival(1.0 + i, streams + i, 8000, 1) for i in range(3)]

    return Load(f"among{streams}", arrivals, counted_from=1.0)


def poisson(share: float, seconds: float = 12.0, lengths: tuple[tuple[int, float], ...] = ((512, 1.0),),
            capacity: float = 40.0) -> Load:
    """Arrivals at a share of what the card can serve. lengths: of prompts, and their weights. capacity: requests of 512
    tokens in a second."""
    def arrivals() -> list[Arrival]:
        source, now, found = random.Random(0), 0.0, list[Arrival]()
        sizes, weights = zip(*lengths, strict=True)
        mean = sum(n * w for n, w in lengths) / sum(weights)
        rate = share * capacity * (512 + 600) / (mean + 600)  # an output token takes some 2.3 times a prompt's
        while (now := now + source.expovariate(rate)) < seconds:
            found.append(Arrival(now, len(found), source.choices(sizes, weights)[0], 256))
        return found

    return Load(f"poisson{share}" if len(lengths) == 1 else f"mixed{share}", arrivals)


@dataclass
class Figures:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    def row(self) -> tuple[float, ...]:
        """tok/s; first token p50, p99; gap p50, p99, largest: all in milliseconds."""
        first, gaps = sorted(self.first), sorted(self.gaps)
        at = [(first, 0.5), (first, 0.99), (gaps, 0.5), (gaps, 0.99), (gaps, 1.0)]
        return (self.num_tokens / self.seconds,
                *(1e3 * values[min(len(values) - 1, int(q * len(values)))] for values, q in at))


class Simulation:
    """One load on one engine, by a clock of its own."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.engine, self.front = engine, engine.front
        limits = Limits(engine.max_rows, max(BUDGET, engine.max_rows), 40_000, 0, 1000)
        cache = CacheManager(LAYOUT, PagePool(NUM_PAGES), limits, enable_prefix_caching=False)
        self.scheduler = Scheduler(cache, limits, prompt_time=engine.prompt_time())
        self.clients = load.arrivals()
        self.counted_from = load.counted_from
        self.num_out: dict[int, int] = {}  # tokens that requests have so far
        self.left = {own.index: load.rounds - 1 for own in self.clients}
        self.entering: list[tuple[float, int, Arrival, float]] = []  # when it reaches the engine; when it was sent
        self.num_sent, self.client_free, self.server_free = 0, 0.0, 0.0
        self.sent: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.asked: dict[int, Arrival] = {}
        self.figures = Figures()
        for own in self.clients:
            self._send(own, own.seconds)

    def _send(self, own: Arrival, now: float) -> None:
        front = self.front
        self.client_free = max(now, self.client_free) + front.client_seconds
        sent = self.client_free
        self.server_free = max(self.server_free, sent) + front.request_seconds
        heapq.heappush(self.entering, (self.server_free + front.first_seconds, self.num_sent, own, sent))
        self.num_sent += 1

    def _enter(self, now: float) -> None:
        while self.entering and self.entering[0][0] <= now:
            _, request_id, own, sent = heapq.heappop(self.entering)
            asked = CheckedRequest((request_id % 997,) * own.num_in, SamplingParams(max_tokens=None, seed=0))
            self.sent[request_id], self.asked[request_id] = sent, own
            self.scheduler.add(Request(request_id, asked, own.num_in + own.num_out))

    def run(self) -> Figures:
        now = device_free = 0.0
        in_flight: deque[tuple[ScheduledBatch, float]] = deque()
        while self.entering or in_flight or self.scheduler.has_work:
            self._enter(now)
            batch = self.scheduler.schedule() if len(in_flight) < 2 else None
            if batch is not None:
                now += HOST_SECONDS + HOST_ROW_SECONDS * batch.num_requests
                device_free = max(now, device_free) + device_seconds(batch)
                in_flight.append((batch, device_free))
            if in_flight and (batch is None or len(in_flight) == 2):
                batch, ended = in_flight.popleft()
                now = max(now, ended)
                self._settle(batch, now)
            elif batch is None:
                now = max(now, self.entering[0][0])
        self.figures.seconds = now - self.counted_from
        return self.figures

    def _settle(self, batch: ScheduledBatch, now: float) -> None:
        for request, part in self.scheduler.update(StepResult(batch.step, list(self._answers(batch)))):
            if not part.run:
                continue
            request_id, seen = request.id, now + self.front.token_seconds
            own = self.asked[request_id]
            self.num_out[request_id] = self.num_out.get(request_id, 0) + 1
            if seen >= self.counted_from:
                self.figures.num_tokens += 1
                if request_id in self.last:
                    self.figures.gaps.append(seen - self.last[request_id])
                else:
                    self.figures.first.append(seen - self.sent[request_id])
            self.last[request_id] = seen
            if part.finish and self.left[own.index]:
                self.left[own.index] -= 1
                self._send(own, seen)

    def _answers(self, batch: ScheduledBatch) -> Iterator[RequestResult]:
        """Drafts, if any, are all wrong; a request ends at its length."""
        columns = zip(batch.request_ids, batch.epochs, batch.samples, batch.num_known, batch.num_drafts, strict=True)
        for request_id, epoch, samples, known, drafts in columns:
            is_last = samples and self.num_out.get(request_id, 0) + 1 >= self.asked[request_id].num_out
            yield RequestResult(request_id, epoch, [5] if samples else [], known, drafts, 0,
                                finish=Finish.LENGTH if is_last else Finish.NO)


STREAMS = (16, 32, 64, 128, 256, 512)
LOADS = {load.name: load for load in (
    *(burst(n) for n in STREAMS), *(burst(n, 3) for n in STREAMS), onto(8, 32), onto(32, 64), onto(128, 128),
    among(1), among(16), among(32),
    *(poisson(share) for share in (0.25, 0.5, 0.7, 0.9, 0.95, 1.1)),
    *(poisson(share, lengths=((200, 0.95), (8000, 0.05))) for share in (0.5, 0.8, 0.95)),
)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS), metavar="LOAD")
    parser.add_argument("--max-step-ms", type=float, default=12.0)
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    slow = Front(client_seconds=0.5e-3, request_seconds=1.5e-3, first_seconds=4e-3, token_seconds=1e-3)
    engines = [Engine("peer", UnboundedPrompts, 1024, slow),
               Engine("outrider", lambda: PromptTime(args.max_step_ms * 1e-3, COSTS), args.rows)]
    names = ("load", "engine", "tok/s", "first p50", "p99", "gap p50", "p99", "largest")
    print("".join(f"{name:>13}" for name in names))
    for load in args.loads:
        for engine in engines:
            row = Simulation(engine, LOADS[load]).run().row()
            print(f"{load:>13}{engine.name:>13}" + "".join(f"{value:13.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
