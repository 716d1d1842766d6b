"""Drives a scheduler and a hash mixer through a random life: arrivals, aborts, preemptions, results that come late.

One `Scenario` with one seed is one reproducible schedule. The driver checks every invariant after every step and
compares each request with its reference; it does not know why the scheduler decides what it decides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from outrider.cache.groups import CacheLayout
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PageKey, PagePool
from outrider.core import Finish, Limits, ScheduledBatch, StepResult
from outrider.core.costs import MixedStepCosts, ReadCost
from outrider.core.params import SamplingParams
from outrider.sched.full_step import UNBOUNDED_PROMPTS, UnboundedPrompts
from outrider.sched.prompt_time import PromptTime
from outrider.sched.request import Request, State
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, SettledDrafts
from outrider.speculation.host_drafts import HostDrafts
from outrider.speculation.host_step_drafts import StepDraftsWithHost
from outrider.speculation.step_drafts import StepDrafts
from tests.unit.hash_mixer import STOP_ID, VOCAB, HashMixerRunner, guess_after, make_layout, reference, salt_of
from tests.unit.made_requests import made_request

MAX_LEN = 28
PLAIN = SamplingParams(max_tokens=None)
NO_HITS = SamplingParams(max_tokens=None, skip_reading_prefix_cache=True)


@dataclass(frozen=True)
class Scenario:
    seed: int
    groups: tuple[tuple[int, int], ...] = ((4, 0),)  # (tokens per page, window or 0; negative: a chunk)
    depth: int = 1  # results not read yet when the next step is scheduled
    max_drafts: int = 0
    has_lookahead: bool = False  # the drafter has layers and fills slots past the computed tokens
    prefix_caching: bool = True
    max_requests: int = 3
    budget: int = 8
    num_requests: int = 6
    spare_pages: int = 6  # beyond what the largest request may need
    abort_rate: float = 0.0
    preempt_rate: float = 0.0
    fail_rate: float = 0.0  # of requests whose values are not finite as soon as they sample
    num_priorities: int = 1
    num_tenants: int = 1
    host_drafts: bool = False
    is_lazy: bool = False  # the device runs a step only when its result is read
    state_pages: int = 0  # of a checkpoint; 0: no recurrent layer
    interval: int = 8
    num_drafter: int = 0  # of the groups, the last, that hold only layers of a drafter
    prompt_seconds: float = 0.0  # bound of steps with prompts and requests that decode, a second a token; 0: none

    @property
    def lookahead(self) -> int:
        return self.max_drafts if self.has_lookahead else 0

    @property
    def prompt_time(self) -> UnboundedPrompts:
        costs = MixedStepCosts((2, 4, 8), (2.0, 4.0, 8.0), attending=(ReadCost(None, 0.1),))
        return PromptTime(self.prompt_seconds, costs) if self.prompt_seconds else UNBOUNDED_PROMPTS

    @property
    def limits(self) -> Limits:
        return Limits(self.max_requests, max(self.budget, self.max_requests), MAX_LEN, self.max_drafts, VOCAB,
                      steps_in_flight=self.depth + 1)


@dataclass
class Totals:
    """What occurred, over all schedules of a test."""

    counts: Counter[str] = field(default_factory=Counter)
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)

    def needs(self, *names: str) -> None:
        missing = [name for name in names if not self.counts[name]]
        assert not missing, f"never occurred: {missing}"

    def needs_acceptance(self, most: int) -> None:
        every = {(drafts, accepted) for drafts in range(most + 1) for accepted in range(drafts + 1)}
        assert self.acceptance.keys() == every, f"never occurred: {every - self.acceptance.keys()}"


class WatchedPool(PagePool):
    """Counts holders a second time, and remembers which pages it handed out since it was last asked."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._count: Counter[int] = Counter()
        self._fresh: list[int] = []

    def allocate(self, group: int, *, is_overwritten: bool = False) -> int:
        page = super().allocate(group, is_overwritten=is_overwritten)
        assert page != 0 and self._count[page] == 0, f"page {page} handed out twice"
        self._count[page] = 1
        self._fresh.append(page)
        return page

    def hold(self, page: int) -> None:
        super().hold(page)
        self._count[page] += 1

    def free(self, page: int) -> None:
        super().free(page)
        self._count[page] -= 1

    def take_unwritten(self) -> list[int]:
        """Pages nobody has written yet: those without content, and those just handed out."""
        fresh, self._fresh = self._fresh, []
        return [*self.blank_pages(), *fresh]


class RandomDrafts(DraftCounts):
    """Chooses draft counts without a reason."""

    def __init__(self, rng: Random, most: int) -> None:
        self._rng, self._most = rng, most

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        wanted = [self._rng.randint(0, self._most) for _ in requests]
        return DraftPlan(wanted, self._most if self._rng.random() < 0.8 else 0)

    def observe(self, settled: Sequence[SettledDrafts], *, is_shared: bool = False) -> None:
        assert all(0 <= result.num_accepted <= result.num_drafted for _, result, _ in settled)
        assert len({request.id for request, _, _ in settled}) == len(settled), "a request is in a step once"

    def forget(self, request: Request) -> None:
        assert request.state is State.FINISHED


class HostGuesses:
    """Guesses on the host what follows the settled tokens: the right tokens, with errors."""

    def __init__(self, rng: Random, seeds: dict[int, int]) -> None:
        self._rng, self._seeds = rng, seeds
        self.num_guesses = 0

    def propose(self, request_id: int, token_ids: Sequence[int], prompt_len: int, most: int,
                tenant: str) -> list[int]:
        guess = guess_after(self._seeds[request_id], token_ids, self._rng.randint(0, most), 0.9, self._rng)
        self.num_guesses += len(guess)
        return guess

    def finish(self, request_id: int, token_ids: Sequence[int], tenant: str) -> None:
        del self._seeds[request_id]


@dataclass(slots=True)
class InFlight:
    batch: ScheduledBatch
    unwritten: list[int]
    result: StepResult | None = None


class Driver:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits = scenario, scenario.limits
        self.rng = Random(scenario.seed)
        self.expected: dict[int, tuple[list[int], Finish]] = {}
        self.requests: list[Request] = []
        for index in range(scenario.num_requests):
            self._make_request(index)
        layout = make_layout(*scenario.groups, state_pages=scenario.state_pages, interval=scenario.interval,
                             num_drafter=scenario.num_drafter)
        lengths = [min(r.end_len + scenario.lookahead, MAX_LEN) for r in self.requests]
        largest = max(sum(g.kind.pages_to_start(n, self.limits) for g in layout.groups) for n in lengths)
        num_pages = 1 + largest + scenario.spare_pages
        self.pool, self.cache = self._make_cache(layout, num_pages)
        seeds = {r.id: r.input.seed for r in self.requests}
        self.guesses = HostGuesses(self.rng, seeds) if scenario.host_drafts else None
        counts = RandomDrafts(self.rng, scenario.max_drafts)
        speculation = StepDrafts(counts) if self.guesses is None else StepDraftsWithHost(
            counts, HostDrafts(self.guesses, VOCAB, max_drafts=scenario.max_drafts))
        self.scheduler = Scheduler(self.cache, self.limits, speculation=speculation, prompt_time=scenario.prompt_time)
        self.device = self._make_device(layout, num_pages)
        self.counts: Counter[str] = Counter()
        self.device.failing = {r.id for r in self.requests if self.rng.random() < scenario.fail_rate}
        self._watch_sharing()
        self._arrivals = deque(self.requests)
        self._steps: deque[InFlight] = deque()
        self._ended_by_host: set[int] = set()

    def _make_cache(self, layout: CacheLayout, num_pages: int) -> tuple[WatchedPool, CacheManager]:
        pool = WatchedPool(num_pages)
        return pool, CacheManager(layout, pool, self.limits, enable_prefix_caching=self.scenario.prefix_caching,
                                  lookahead=self.scenario.lookahead)

    def _make_device(self, layout: CacheLayout, num_pages: int) -> HashMixerRunner:
        return HashMixerRunner(layout.groups, num_pages, self.limits, self.rng, lookahead=self.scenario.lookahead,
                               has_state=self.scenario.state_pages > 0)

    @property
    def most_turns(self) -> int:
        """Turns in which every request must have ended."""
        return 50 + 4 * sum(r.end_len for r in self.requests)

    def run(self) -> Driver:
        """Until every request has ended, which takes a bounded number of steps."""
        most = self.most_turns
        turns = 0
        while self._arrivals or self.scheduler.has_work:
            self._disturb()
            self.step()
            self.check()
            turns += 1
            assert turns <= most, "a request is starved"
        self._check_end()
        return self

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is not None:
            step = InFlight(batch, self.pool.take_unwritten())
            self._steps.append(step)
            self.counts["steps"] += 1
            assert {draft.row for draft in batch.drafting.from_host} <= set(batch.rows), "a draft for nobody's row"
            folded = {r.row: r.folded for r in self.requests if r.state is State.RUNNING}
            writes = batch.cache.checkpoints
            assert all(write.boundary > folded[write.row] for write in writes), "a state that has passed"
            self.counts["chunked prompts"] += batch.samples.count(False)
            if not self.scenario.is_lazy:
                step.result = self.device.step(batch, step.unwritten)
        too_many = len(self._steps) - self.scenario.depth
        reads = max(too_many, int(batch is None), int(self.rng.random() < 0.1))
        for _ in range(min(reads, len(self._steps))):
            self._read_result()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        self.counts["overlapped steps"] += len(scheduler._in_flight) > 1
        for request in self.requests:
            if request.state is not State.RUNNING:
                continue
            if not scheduler._in_flight:
                assert request.settled.at_least == request.bound.at_most, "nothing in flight, and a bound beyond"
            if not self.scenario.is_lazy:
                truth = self.device.rows[request.row].computed
                assert request.settled.at_least <= truth <= request.bound.at_most, "the truth is out of its bounds"

    def add_to(self, totals: Totals) -> None:
        totals.acceptance += self.device.seen.acceptance
        totals.counts += self.counts
        totals.counts += Counter({
            "schedules": 1,
            "preemptions": self.scheduler.stats.num_preemptions,
            "dropped results": self.scheduler.stats.num_dropped_results,
            "hits": self.cache.stats.hit_tokens,
            "evictions": self.pool.num_evicted,
            "dead tokens": self.device.seen.num_dead_tokens,
            "host drafts used": self.device.seen.num_host_drafts,
            "cleared pages": self.device.seen.num_cleared_pages,
            "steps of ended requests": self.device.seen.num_steps_of_ended,
            "restored states": self.device.seen.num_restored,
            "folds of ended rows": self.device.seen.num_folds,
            "hits without all of the drafter's pages": self.device.seen.num_without_drafter,
            "hits within a drafter's page": self.device.seen.num_within_pages,
            "checkpoints while folding": self.device.seen.written["folding"],
            "checkpoints in known tokens": self.device.seen.written["known"],
            "starts again": self.scheduler.stats.num_restarts,
        })

    # Inside

    def _watch_sharing(self) -> None:
        """Count what requests begin from while it is only promised."""
        promises = self.cache.promises
        share_page, share_state = promises.share_page, promises.share_state

        def page(request_id: int, key: PageKey) -> None:
            writer = promises._of_page.get(key)
            if writer is not None:
                self.counts["shared pages"] += 1
                self.counts["pages shared within a step"] += writer.step == self.scheduler.stats.num_steps
                self.counts["pages shared after their writer ended"] += writer.writer not in self.cache._requests
            share_page(request_id, key)

        def state(request_id: int, digest: bytes) -> None:
            self.counts["shared states"] += 1
            share_state(request_id, digest)

        promises.share_page, promises.share_state = page, state  # type: ignore[method-assign]

    def _make_request(self, index: int) -> None:
        rng, scenario = self.rng, self.scenario
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 16))]
        if self.requests and rng.random() < 0.6:
            # Another turn of an earlier one: it shares tokens, generated ones too.
            earlier = rng.choice(self.requests)
            text = [*earlier.token_ids, *self.expected[earlier.id][0]]
            prompt = (text[: rng.randint(1, len(text))] + prompt[: rng.randint(0, 3)])[: MAX_LEN - 1]
        end_len = min(MAX_LEN, len(prompt) + rng.randint(1, 12))
        seed = rng.randrange(4)
        params = NO_HITS if rng.random() < 0.1 else PLAIN
        eos_ids = (STOP_ID,) if rng.random() < 0.5 else ()
        asked = made_request(prompt, params, seed=seed, priority=rng.randrange(scenario.num_priorities),
                             cache_salt=salt_of(seed), tenant=self._tenant_of(index))
        request = Request(index, asked, end_len, eos_ids)
        self.requests.append(request)
        self.expected[index] = reference(prompt, seed, end_len, request.eos_ids)

    def _tenant_of(self, index: int) -> str | None:
        """The first tenant has none of a name. No number is drawn: with one tenant a schedule is what it was."""
        return f"tenant {index % self.scenario.num_tenants}" if index % self.scenario.num_tenants else None

    def _disturb(self) -> None:
        scenario, rng, scheduler = self.scenario, self.rng, self.scheduler
        while self._arrivals and (rng.random() < 0.5 or not scheduler.has_work):
            scheduler.add(self._arrivals.popleft())
        if rng.random() < scenario.abort_rate:
            self._end_by_host(rng.choice(self.requests), Finish.ABORT)
        running = [r for r in self.requests if r.state is State.RUNNING]
        if running and rng.random() < scenario.preempt_rate:
            victim = rng.choice(running)
            self.counts["preemptions in flight"] += victim.unsettled > 0
            # The scheduler itself waits for results first; a preemption among them must be as harmless.
            scheduler._preempt(victim)

    def _end_by_host(self, request: Request, finish: Finish) -> None:
        if request.state is State.FINISHED or request in self._arrivals:
            return
        self.counts["aborts in flight"] += request.state is State.RUNNING and request.unsettled > 0
        self.counts["aborts while waiting"] += request.state is State.WAITING
        self._ended_by_host.add(request.id)
        self.scheduler.end(request.id, finish)
        assert self.scheduler.take_ended_early() == [request]

    def _read_result(self) -> None:
        step = self._steps.popleft()
        result = step.result or self.device.step(step.batch, step.unwritten)
        dropped = self.scheduler.stats.num_dropped_results
        updates = self.scheduler.update(result)
        assert len(updates) + self.scheduler.stats.num_dropped_results - dropped == len(result.requests)
        for request, _ in updates:
            if request.state is State.RUNNING and (self.scenario.is_lazy or not self._steps):
                computed = self.device.rows[request.row].computed
                assert request.settled.at_least == computed, "the settled length is not the truth"
            if request.state is State.RUNNING and self.rng.random() < self.scenario.abort_rate:
                self._end_by_host(request, Finish.STOP)  # as a stop string does

    def _check_end(self) -> None:
        assert self.pool.num_free == self.pool.num_usable, "pages are lost"
        assert not self._steps and self.scheduler.num_running == self.scheduler.num_waiting == 0
        for request in self.requests:
            output, (expected, finish) = request.token_ids[request.prompt_len :], self.expected[request.id]
            assert request.state is State.FINISHED
            if request.id in self._ended_by_host:
                expected = expected[: len(output)]
            elif request.id in self.device.failing:
                assert request.finish is Finish.ERROR
                expected = []
            else:
                assert request.finish is finish
            assert output == expected, f"request {request.id} yields {output}, not {expected}"
