"""The host's costs of a step: microseconds of schedule() and update(), by running requests and context length.

Decode steps with two in flight, on a runner that answers without computing; building its answer is not timed. Times
are CPU time of the thread, the mean of the quietest of several windows of steps (each longer than a page), with
windows of all contexts in turn, so that neighbours on the machine disturb them little. It never imports torch.
Bars: 256 requests below the time of a plain loop of 36000 turns (1 ms on a fast core), so that a slower core is
measured by its own speed; linear in requests, flat in context.

    python bench/scheduler.py
    python bench/scheduler.py --drafts 4 --chosen --requests 16 64  # draft counts are chosen in every step
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, SlidingSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.draft_confidence import LEVEL_BITS
from outrider.core.params import SamplingParams
from outrider.core.speculation import NO_SPECULATION, Speculation
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import FixedDrafts
from outrider.speculation.step_drafts import StepDrafts

REQUESTS = (16, 64, 256, 1024)
CONTEXTS = (1024, 8192, 65536)
COLUMNS = ("schedule", "update", "step", "/request")
WINDOW_STEPS = 48
IN_FLIGHT = 2
PAGE_TOKENS = 16
MOST_CHOSEN = 4  # drafts that wait, where counts are chosen
RATES = (0.45, 0.6, 0.7, 0.8)  # at which requests' drafts are accepted then, in turn
BAR_REQUESTS, BAR_TURNS = 256, 36_000
LAYERS = [LayerCache(0, FullSpec(8, 128, 2)), LayerCache(1, SlidingSpec(8, 128, 2, 1024))]


@dataclass(frozen=True)
class Timing:
    """Means over a window's steps, in microseconds."""

    requests: int
    context: int
    schedule_us: float
    update_us: float

    @property
    def step_us(self) -> float:
        return self.schedule_us + self.update_us


def answer(batch: ScheduledBatch, source: random.Random | None) -> StepResult:
    """Every request gets a run of one token; its drafts, if any, are all wrong. With a source some are right, and their
    drafter says how sure it is of the next ones."""
    if source is None:
        return StepResult(batch.step, [
            RequestResult(request_id, epoch, [7], 1, drafts, 0, drafts)
            for request_id, epoch, drafts in zip(batch.request_ids, batch.epochs, batch.num_drafts, strict=True)
        ])
    num_drafts = list(batch.num_drafts)
    if batch.drafting.sharing is not None:  # as if the device gave all equally many
        least, more = divmod(batch.drafting.sharing.total, batch.num_requests)
        num_drafts = [least + (index < more) for index in range(batch.num_requests)]
    results = []
    for request_id, epoch, known, drafts in zip(batch.request_ids, batch.epochs, batch.num_known, num_drafts,
                                                strict=True):
        accepted = 0
        while accepted < drafts and source.random() < RATES[request_id % len(RATES)]:
            accepted += 1
        results.append(RequestResult(request_id, epoch, [7] * (1 + accepted), known + accepted, drafts, accepted,
                                     MOST_CHOSEN, levels=source.getrandbits(LEVEL_BITS * MOST_CHOSEN)))
    return StepResult(batch.step, results)


def speculation(drafts: int, is_chosen: bool) -> Speculation:
    """Numbers of drafts are chosen by the costs of a small model on a fast GPU."""
    if not is_chosen:
        return StepDrafts(FixedDrafts(drafts)) if drafts else NO_SPECULATION
    sizes = tuple(range(32, 8192, 32))
    costs = StepCosts(sizes, tuple(1.2e-3 + 1e-6 * size for size in sizes),
                      drafting=(DraftCost(1, 1e-4, 8e-5), DraftCost(1024, 2e-4, 1.5e-4)), is_padded=True)
    return StepDrafts(auto_drafts(drafts, costs, always_propose=False))


def running(layout: CacheLayout, num_requests: int, context: int, num_steps: int, drafts: int,
            is_chosen: bool) -> Scheduler:
    """A scheduler whose requests have all computed their prompts. They share one, so that the pool stays small, and
    differ in length, so that page boundaries are spread over the steps."""
    room = num_steps * (1 + drafts) + 2 * PAGE_TOKENS
    limits = Limits(num_requests, num_requests * (1 + drafts) + context, context + room, drafts, 1000,
                    steps_in_flight=IN_FLIGHT)
    per_request = 2 * (room // PAGE_TOKENS + 2)
    num_pages = 2 * context // PAGE_TOKENS + num_requests * per_request + 2
    scheduler = Scheduler(CacheManager(layout, PagePool(num_pages), limits), limits,
                          speculation=speculation(drafts, is_chosen))
    prompt = [i % 1000 for i in range(context)]
    params = SamplingParams(max_tokens=None, seed=0)
    for index in range(num_requests):
        length = context - index % PAGE_TOKENS
        scheduler.add(Request(index, CheckedRequest(tuple(prompt[:length]), params), context + room))
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(StepResult(batch.step, [
            RequestResult(r, e, [7], n, d, 0)
            for r, e, n, d in zip(batch.request_ids, batch.epochs, batch.num_known, batch.num_drafts, strict=True)
        ]))
    assert scheduler.num_running == num_requests
    return scheduler


def measure(num_requests: int, contexts: Sequence[int], num_windows: int, drafts: int,
            is_chosen: bool = False) -> list[Timing]:
    layout, num_steps = plan_groups(LAYERS, PAGE_TOKENS), num_windows * WINDOW_STEPS + num_requests
    schedulers = {context: running(layout, num_requests, context, num_steps, drafts, is_chosen)
                  for context in contexts}
    source = random.Random(0) if is_chosen else None
    answers: dict[int, deque[StepResult]] = {context: deque() for context in contexts}
    best: dict[int, Timing] = {}
    for _ in range(num_windows):
        for context, scheduler in schedulers.items():
            timing = _window(scheduler, answers[context], context, source)
            best[context] = min(best.get(context, timing), timing, key=lambda t: t.step_us)
    for scheduler in schedulers.values():
        assert scheduler.stats.max_steps_in_flight == IN_FLIGHT and not scheduler.stats.num_preemptions
    return list(best.values())


def _window(scheduler: Scheduler, answers: deque[StepResult], context: int, source: random.Random | None) -> Timing:
    schedule_s = update_s = 0.0
    for _ in range(WINDOW_STEPS):
        start = time.thread_time()
        batch = scheduler.schedule()
        schedule_s += time.thread_time() - start
        assert batch is not None and batch.num_requests == scheduler.num_running, "not every request is in the step"
        answers.append(answer(batch, source))
        if len(answers) == IN_FLIGHT:
            result = answers.popleft()
            start = time.thread_time()
            scheduler.update(result)
            update_s += time.thread_time() - start
    to_us = 1e6 / WINDOW_STEPS
    return Timing(scheduler.num_running, context, schedule_s * to_us, update_s * to_us)


def loop_us(turns: int) -> float:
    """Time of a plain Python loop on this core."""

    def once() -> float:
        start, total = time.thread_time(), 0
        for turn in range(turns):
            total += turn & 7
        return time.thread_time() - start

    return min(once() for _ in range(9)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8, help=f"windows of {WINDOW_STEPS} steps; the quietest counts")
    parser.add_argument("--drafts", type=int, default=0, help="drafts per request and step")
    parser.add_argument("--chosen", action="store_true", help="--drafts is the most: how many is chosen in every step")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    args = parser.parse_args()
    timings: list[Timing] = []
    print("".join(f"{name:>10}" for name in ("requests", "context", *COLUMNS)) + "   (us)")
    for num_requests in args.requests:
        for t in measure(num_requests, args.contexts, args.windows, args.drafts, args.chosen):
            timings.append(t)
            figures = (t.schedule_us, t.update_us, t.step_us, t.step_us / num_requests)
            print(f"{t.requests:10}{t.context:10}" + "".join(f"{figure:10.1f}" for figure in figures), flush=True)
    bar_us = loop_us(BAR_TURNS)
    at_bar = [t.step_us for t in timings if t.requests == BAR_REQUESTS]
    print(json.dumps({
        "bench": "scheduler", "drafts": args.drafts, "in_flight": IN_FLIGHT,
        "us_per_step": {f"{t.requests}x{t.context}": round(t.step_us, 1) for t in timings},
        "worst_us_at_256": round(max(at_bar), 1) if at_bar else None,
        "bar_us": round(bar_us, 1),
        "passed": max(at_bar) < bar_us if at_bar else None,
    }))


if __name__ == "__main__":
    main()
