"""How soon does the engine choose the right number of drafts? Rounds of equal requests in a fresh engine, simulated.

    python bench/draft_rounds.py --curves mixture,dense --batches 1,16,150 --seeds 2

The scheduler and the chooser are the engine's. The device is simulated: drafts are accepted by chance, and steps take
the time of a cost curve with noise. As on a real device, the costs that start-up measured are wrong by 10 to 30%, a
number of requests without a graph of its own runs on the next larger graph, and a capture makes one step long. For
every curve, acceptance and batch the table has

- first: the best round's time over the first round's;
- regret: the time of all rounds over that of the best fixed number of drafts, less 1; first regret: of the first round;
- worst: the longest later round over that of the best fixed number;
- how many decode steps of the first two rounds had each number of drafts, by seed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, SamplingParams, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.decode_sizes import FEW, size_for
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import DraftCounts, FixedDrafts
from outrider.speculation.step_drafts import StepDrafts

MAX_DRAFTS = 3
PROMPT_LEN, ANSWER_LEN, NUM_ROUNDS = 300, 128, 5
NOISE = 0.05  # deviation of the logarithm of a step's time
CAPTURE_SECONDS = (0.03, 0.06)
LOSS_OF_CAPTURE = 0.02  # seconds that a size has lost on a larger graph before it gets its own
PROMPT_TOKEN_SECONDS = 2e-6
READ_TOKENS = 32  # that a drafter must have read in a row
CURVES = {  # seconds of steps by token rows, and of drafting, on one H200
    # Experts: every further row reads more weights.
    "mixture": StepCosts((1, 8, 64, 150, 300, 450, 600, 1024), (1.9e-3, 2.3e-3, 3e-3, 3.7e-3, 4.6e-3, 5.9e-3, 7.2e-3,
                                                                 11e-3),
                         drafting=(DraftCost(1, 0.25e-3, 0.2e-3), DraftCost(150, 0.4e-3, 0.3e-3)), is_padded=True),
    "sparse": StepCosts((1, 2, 4, 8, 64, 256, 1024), (1e-3, 1.5e-3, 1.9e-3, 2.3e-3, 5e-3, 6.5e-3, 9e-3),
                        drafting=(DraftCost(1, 0.1e-3, 0.1e-3),), is_padded=True),
    "dense": StepCosts((1, 64, 128, 256, 512, 1024), (3.6e-3, 4e-3, 4.5e-3, 6.3e-3, 10.5e-3, 19e-3),
                       drafting=(DraftCost(1, 0.3e-3, 0.25e-3),), is_padded=True),
    "small": StepCosts((1, 64, 128, 256, 512, 1024), (0.62e-3, 0.7e-3, 0.8e-3, 1.05e-3, 1.6e-3, 2.7e-3),
                       drafting=(DraftCost(1, 0.09e-3, 0.07e-3), DraftCost(64, 0.11e-3, 0.08e-3)), is_padded=True),
    "recurrent": StepCosts((1, 64, 220, 440, 880), (2.5e-3, 3.2e-3, 5e-3, 8e-3, 14e-3),
                           drafting=(DraftCost(1, 0.2e-3, 0.2e-3),), is_padded=True),
}
ACCEPTANCE = {1.5: (0.5, 0.0, 0.0), 2.5: (1.0, 0.5, 0.0), 3.5: (1.0, 1.0, 0.5)}  # by tokens a step: chance by place


@dataclass(slots=True)
class Row:
    """The device's progress with a request."""

    known: int  # all known tokens
    num_waiting: int = 0
    num_read: int = 1 << 30  # tokens in a row that the drafter has read


class Device:
    """Answers batches in simulated time, of a new process."""

    def __init__(self, costs: StepCosts, rates: Sequence[float], max_requests: int, seed: int = 0) -> None:
        """rates: chance of each draft, if those before it were accepted."""
        self.rows: dict[int, Row] = {}
        self._costs, self._rates, self._max_requests = costs, rates, max_requests
        self._chance, self._time_chance = random.Random(seed), random.Random(seed)
        self._lost: dict[tuple[int, int], float] = {}  # seconds, by graph

    def run(self, batch: ScheduledBatch) -> StepResult:
        parts = zip(batch.request_ids, batch.epochs, batch.num_known, batch.num_drafts, batch.samples, strict=True)
        return StepResult(batch.step, [self._advance(batch.drafting.num_wanted, *part) for part in parts])

    def _advance(self, num_wanted: int, request_id: int, epoch: int, num_known: int, num_drafts: int,
                 samples: bool) -> RequestResult:
        row, end = self.rows[request_id], PROMPT_LEN + ANSWER_LEN
        if row.known >= end:
            return RequestResult(request_id, epoch, [], 0, 0, 0)
        alive, accepted = min(num_drafts, row.num_waiting) if samples else 0, 0
        while accepted < alive and row.num_read >= READ_TOKENS and self._chance.random() < self._rates[accepted]:
            accepted += 1
        accepted = min(accepted, end - row.known - 1)
        row.known += (1 + accepted) * samples
        row.num_read = row.num_read + num_known + accepted if num_wanted else 0
        row.num_waiting = num_wanted * samples
        finish = Finish.LENGTH if row.known >= end else Finish.NO
        return RequestResult(request_id, epoch, [1] * ((1 + accepted) * samples), num_known + accepted, alive, accepted,
                             row.num_waiting, finish)

    def seconds(self, batch: ScheduledBatch) -> float:
        requests, most, wanted = batch.num_requests, max(batch.num_drafts), batch.drafting.num_wanted
        noise = math.exp(self._time_chance.gauss(0, NOISE))
        if max(batch.num_known) > 1 or not all(batch.samples):
            seconds = self._costs.step(1) + PROMPT_TOKEN_SECONDS * batch.num_tokens
            return (seconds + self._costs.draft(wanted, requests)) * noise
        own, wide = _own_size(requests, self._max_requests), min(1 << (requests - 1).bit_length(), self._max_requests)
        seconds, capture = self._of_graph(batch, own), 0.0
        if own != wide and self._lost.get((own, most), 0.0) < LOSS_OF_CAPTURE:
            of_wide = self._of_graph(batch, wide)
            self._lost[own, most] = self._lost.get((own, most), 0.0) + of_wide - seconds
            if self._lost[own, most] >= LOSS_OF_CAPTURE:
                capture = self._time_chance.uniform(*CAPTURE_SECONDS)
            seconds = of_wide
        return seconds * noise + capture

    def _of_graph(self, batch: ScheduledBatch, requests: int) -> float:
        """Seconds of the batch on a graph of so many requests."""
        count, most, wanted = batch.num_requests, max(batch.num_drafts), batch.drafting.num_wanted
        if count <= FEW or batch.num_tokens == count * (1 + most):
            rows = requests * (1 + most)
        else:
            rows = size_for(requests, batch.num_tokens + requests - count, most)
        return self._costs.step(rows) + self._costs.draft(wanted, requests)


def _own_size(requests: int, most: int) -> int:
    """The graph size of so many requests (`runner/graphs/sizes.py`)."""
    if requests <= 8:
        return min(1 << (requests - 1).bit_length(), most)
    step = 8 if requests <= 128 else 16
    return min(-(-requests // step) * step, most)


def measured(costs: StepCosts, seed: int) -> StepCosts:
    """Costs as start-up might measure them, with null rows: all too short by up to 40%, each point wrong by up to 10%
    more, larger steps never faster."""
    chance = random.Random(seed)
    seconds, least, common = [], 0.0, chance.uniform(0.6, 1.05)
    for value in costs.seconds:
        least = max(least, value * common * chance.uniform(0.9, 1.1))
        seconds.append(least)
    drafting = tuple(replace_draft(own, chance.uniform(0.75, 1.25)) for own in costs.drafting)
    return replace(costs, seconds=tuple(seconds), drafting=drafting)


def replace_draft(cost: DraftCost, factor: float) -> DraftCost:
    return DraftCost(cost.requests, cost.first * factor, cost.each * factor)


class Round(NamedTuple):
    seconds: float
    depths: Counter[int]  # decode steps by the most drafts of a request

    @property
    def shown(self) -> str:
        return " ".join(f"{depth}:{count}" for depth, count in sorted(self.depths.items()))


@dataclass
class FreshEngine:
    """A scheduler with a chooser of draft counts, around a simulated device that has run nothing yet."""

    counts: DraftCounts
    device: Device
    batch: int
    clock: float = 0.0
    num_requests: int = 0
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(self.batch, 8192, 1024, MAX_DRAFTS, 32000, steps_in_flight=2)
        layout = plan_groups([LayerCache(0, FullSpec(1, 8, 2))], checkpoint_interval=64)
        cache = CacheManager(layout, PagePool(self.batch * 64 + 64), limits, lookahead=MAX_DRAFTS,
                             enable_prefix_caching=False)
        self.scheduler = Scheduler(cache, limits, speculation=StepDrafts(self.counts))

    def round(self) -> Round:
        """Serve one batch of requests that arrive together."""
        for _ in range(self.batch):
            self._add()
        began, depths, in_flight = self.clock, Counter[int](), deque[tuple[StepResult, float]]()
        last: float | None = None
        while self.scheduler.has_work:
            while len(in_flight) < 2 and (batch := self.scheduler.schedule()) is not None:
                in_flight.append((self.device.run(batch), self.device.seconds(batch)))
                if max(batch.num_known) == 1:
                    depths[max(batch.num_drafts)] += 1
            if in_flight:
                result, seconds = in_flight.popleft()
                self.clock += seconds
                self.scheduler.update(result, None if last is None else self.clock - last)
                last = self.clock
        self.rounds.append(Round(self.clock - began, depths))
        return self.rounds[-1]

    def _add(self) -> None:
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        self.device.rows[request_id] = Row(PROMPT_LEN)
        prompt = CheckedRequest((1,) * PROMPT_LEN, SamplingParams(temperature=0.0, seed=0, ignore_eos=True))
        self.scheduler.add(Request(request_id, prompt, PROMPT_LEN + ANSWER_LEN))


class Verdict(NamedTuple):
    first: float  # best round's time over the first round's
    first_regret: float
    regret: float
    worst: float  # the longest later round over the mean round of the best fixed number of drafts
    best_fixed: int
    rounds: list[Round]


def judge(curve: str, tokens: float, batch: int, seed: int) -> Verdict:
    """Compare the engine's chooser with all fixed numbers of drafts."""
    def run(counts: DraftCounts, num_rounds: int) -> list[Round]:
        engine = FreshEngine(counts, Device(CURVES[curve], ACCEPTANCE[tokens], batch, seed), batch)
        return [engine.round() for _ in range(num_rounds)]

    fixed = [[one.seconds for one in run(FixedDrafts(count), 2)] for count in range(MAX_DRAFTS + 1)]
    totals = [first + (NUM_ROUNDS - 1) * later for first, later in fixed]
    best = min(range(MAX_DRAFTS + 1), key=totals.__getitem__)
    rounds = run(auto_drafts(MAX_DRAFTS, measured(CURVES[curve], seed), always_propose=False), NUM_ROUNDS)
    times, (first, later) = [one.seconds for one in rounds], fixed[best]
    return Verdict(min(times) / times[0], times[0] / first - 1, sum(times) / totals[best] - 1, max(times[1:]) / later,
                   best, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", default=",".join(CURVES))
    parser.add_argument("--tokens", default=",".join(map(str, ACCEPTANCE)), help="accepted tokens of a step")
    parser.add_argument("--batches", default="1,4,16,64,150,256")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("curve tokens batch | first | first regret | regret | worst later round | best fixed | drafts of first steps")
    for curve in args.curves.split(","):
        for tokens in map(float, args.tokens.split(",")):
            for batch in map(int, args.batches.split(",")):
                found = [judge(curve, tokens, batch, seed) for seed in range(args.seeds)]
                means = [sum(values) / args.seeds for values in zip(*[one[:3] for one in found], strict=True)]
                print(f"{curve} {tokens} {batch} | {means[0]:.3f} | {means[1]:+.3f} | {means[2]:+.3f} | "
                      f"{max(one.worst for one in found):.3f} | {[one.best_fixed for one in found]} | "
                      + "; ".join(f"{one.rounds[0].shown} / {one.rounds[1].shown}" for one in found), flush=True)


if __name__ == "__main__":
    main()
