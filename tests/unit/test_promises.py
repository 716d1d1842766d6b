"""Requests share what others are computing: who begins where, who waits, and what becomes of sharers when a writer
ends, fails or is tried alone. Random schedules of the same rules are in test_scheduler_random and test_recurrent_cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import strategies as st

from outrider.cache import manager
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.cache.promises import Promises
from outrider.core import Finish, Limits, ScheduledBatch, StepResult
from outrider.core.params import SamplingParams
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import FixedDrafts
from outrider.speculation.step_drafts import StepDrafts
from tests.unit.hash_mixer import HashMixerRunner, make_layout
from tests.unit.made_requests import made_request
from tests.unit.schedule_driver import Scenario
from tests.unit.test_recurrent_cache import GROUPS, SEEDS
from tests.unit.test_scheduler_random import run

PARAMS = SamplingParams(max_tokens=None)
COMMON = list(range(1, 7)) * 10  # 60 tokens
MAX_LEN = 200


class Rig:
    """A scheduler over pages of 4 tokens and a hash mixer, which checks every value that a step reads."""

    def __init__(self, *, state_pages: int = 0, lookahead: int = 0, budget: int = 400, num_pages: int = 400,
                 depth: int = 1, interval: int = 64, window: int = 0) -> None:
        self.limits = Limits(16, budget, MAX_LEN, lookahead, 7, steps_in_flight=depth + 1)
        layout = make_layout((4, 0), *([(4, window)] if window else []), state_pages=state_pages, interval=interval)
        self.cache = CacheManager(layout, PagePool(num_pages), self.limits, lookahead=lookahead)
        self.scheduler = Scheduler(self.cache, self.limits, speculation=StepDrafts(FixedDrafts(lookahead)))
        self.device = HashMixerRunner(layout.groups, num_pages, self.limits, Random(1), lookahead=lookahead,
                                      has_state=state_pages > 0)
        self.computed: Counter[int] = Counter()  # known tokens that each request computed
        self.hits: dict[int, int] = {}
        self.depth, self._results = depth, list[StepResult]()

    def add(self, *prompts: Sequence[int], first: int = 0) -> list[Request]:
        requests = [Request(first + i, made_request(prompt, PARAMS), len(prompt) + 3)
                    for i, prompt in enumerate(prompts)]
        self.scheduler.add(*requests)
        return requests

    def step(self) -> ScheduledBatch | None:
        """Schedule a step and run it; its result is read when `depth` others have been scheduled."""
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch is not None:
            self.computed.update(dict(zip(batch.request_ids, batch.num_known, strict=True)))
            rows = dict(zip(batch.rows, batch.request_ids, strict=True))
            self.hits.update({rows[a.row]: a.computed for a in batch.admissions if a.row in rows})
            self._results.append(self.device.step(batch, []))
        if len(self._results) > self.depth or batch is None and self._results:
            self.read()
        return batch

    def read(self) -> None:
        self.scheduler.update(self._results.pop(0))
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.cache.pool.num_free == self.cache.pool.num_usable and not self.cache.promises


def prompts(count: int, common: Sequence[int] = COMMON, own: int = 6) -> list[list[int]]:
    return [[*common, i % 7, *([(i // 7) % 7] * (own - 1))] for i in range(count)]


@pytest.mark.parametrize("window", [0, 9])
def test_prompts_that_arrive_together_compute_their_beginning_once(window: int) -> None:
    rig = Rig(window=window)
    rig.add(*prompts(8))
    batch = rig.step()
    assert batch is not None and batch.num_known == [66] + [6] * 7, "they run in one step"
    assert list(rig.hits.values()) == [0] + [60] * 7
    rig.run()


def test_samples_of_one_prompt_compute_it_once() -> None:
    rig = Rig()
    rig.add(*[COMMON] * 8)
    rig.step()
    assert list(rig.hits.values()) == [0] + [56] * 7, "one token is left to compute, and pages have four"
    rig.run()


def test_behind_a_drafter_with_slots_of_its_own_sharers_begin_in_the_next_step() -> None:
    rig = Rig(lookahead=2)
    rig.add(*prompts(3), [6, 5, 4, 3, 2, 1])
    batch = rig.step()
    assert batch is not None and batch.request_ids == [0, 3], "who waits holds up nobody"
    rig.step()
    assert rig.hits == {0: 0, 3: 0, 1: 60, 2: 60}
    rig.run()


def test_a_prompt_in_chunks_is_shared_as_far_as_it_is_scheduled() -> None:
    rig = Rig(budget=24)
    rig.add(*prompts(3))
    rig.run()
    assert rig.computed[0] >= 66 and rig.hits == {0: 0, 1: 60, 2: 60}


def test_a_sharers_pages_stay_when_their_writer_ends_and_are_published() -> None:
    rig = Rig(depth=1)
    rig.add(*prompts(2))
    rig.step()
    rig.scheduler.end(0, Finish.ABORT)
    rig.run()
    rig.add(prompts(9)[8], first=9)
    rig.step()
    assert rig.hits[9] == 60
    rig.run()


@pytest.mark.parametrize("options", [{}, {"lookahead": 2}, {"state_pages": 2}], ids=["plain", "drafter", "state"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_sharers_of_a_writer_whose_values_are_not_finite_start_again(options: dict[str, int], is_aborted: bool) -> None:
    rig = Rig(depth=2, **options)
    rig.device.failing = {0}
    requests = rig.add(*[COMMON] * 4)
    rig.step()
    rig.step()
    if is_aborted:  # the failure is known only to the step in flight
        rig.scheduler.end(0, Finish.ABORT)
    rig.run()
    assert rig.scheduler.stats.num_restarts >= (0 if "state_pages" in options or "lookahead" in options else 3)
    assert requests[0].finish is (Finish.ABORT if is_aborted else Finish.ERROR)
    assert [len(r.token_ids) - r.prompt_len for r in requests[1:]] == [3, 3, 3]
    assert all(r.finish is Finish.LENGTH for r in requests[1:])


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_built_on_a_broken_promise_breaks_with_it(is_written: bool) -> None:
    """Request 1 begins from a page of 0, and 2 from a page of 1 alone: behind a window it needs no other. 3 promises
    something of its own."""
    pool, keys = PagePool(10), [(0, bytes([index])) for index in range(4)]
    promises = Promises(pool)
    pages = [pool.allocate(0) for _ in keys]
    promises.add_page(0, 0, keys[0], pages[0])
    promises.share_page(1, keys[0])
    promises.add_page(0, 1, keys[1], pages[1])
    promises.add_page(1, 1, keys[2], pages[2])
    promises.share_page(2, keys[2])
    promises.add_page(1, 3, keys[3], pages[3])
    assert promises.settle(0, [] if is_written else [0], []) == (set() if is_written else {1, 2})
    assert [pool.find(key) is not None for key in keys] == [is_written, is_written, False, False]
    assert promises.settle(1, [], []) == set() and not promises
    assert [pool.find(key) is not None for key in keys] == [is_written, is_written, is_written, True]


def test_a_page_that_a_sharer_of_a_failed_writer_computed_is_never_found() -> None:
    """Each prompt goes on where the one before ends, and the first writer's values are not finite. The hash mixer
    checks every value that a later request reads."""
    rig = Rig(depth=2)
    rig.device.failing = {0}
    longer = [COMMON[:24], COMMON[:40], COMMON[:56]]
    requests = rig.add(*longer)
    rig.step()
    assert rig.hits == {0: 0, 1: 24, 2: 40}
    rig.run()
    assert [r.finish for r in requests] == [Finish.ERROR, Finish.LENGTH, Finish.LENGTH]
    assert rig.scheduler.stats.num_restarts == 2
    rig.add(COMMON, first=3)
    rig.run()
    assert rig.hits[3] == 56


def test_a_sharer_that_has_left_is_not_started_again() -> None:
    """One is aborted and one preempted while the step that fails is in flight."""
    rig = Rig(depth=2)
    rig.device.failing = {0}
    requests = rig.add(*[COMMON] * 4)
    rig.step()
    rig.scheduler.end(1, Finish.ABORT)
    rig.scheduler._preempt(requests[2])
    rig.read()
    assert rig.scheduler.stats.num_restarts == 1, "that of request 3"
    rig.run()
    assert [r.finish for r in requests] == [Finish.ERROR, Finish.ABORT, Finish.LENGTH, Finish.LENGTH]


def test_a_request_that_had_to_start_again_shares_no_promise_any_more() -> None:
    """Else each of many failing writers would cost every sharer another start."""
    rig = Rig(depth=2)
    rig.device.failing = {0, 1, 2}
    requests = rig.add(*[COMMON] * 5)
    rig.run()
    assert [r.finish for r in requests] == [Finish.ERROR] * 3 + [Finish.LENGTH] * 2
    assert rig.scheduler.stats.num_restarts == 4


def test_nothing_is_shared_while_suspects_are_tried_alone() -> None:
    rig = Rig()
    rig.add(*[COMMON] * 4)
    for _ in range(2):  # the second failure in a row puts halves on trial
        rig.scheduler.schedule()
        rig.scheduler.recover("broken")
        assert not rig.cache.promises
    batch = rig.scheduler.schedule()
    assert batch is not None and not rig.cache.promises
    assert {a.computed for a in batch.admissions} == {0}


# Recurrent states


def test_requests_wait_for_a_promised_state_and_begin_in_the_next_step() -> None:
    rig = Rig(state_pages=2)
    rig.add(*[COMMON] * 4)
    batch = rig.step()
    assert batch is not None and batch.request_ids == [0]
    rig.step()
    assert rig.hits == {0: 0, 1: 56, 2: 56, 3: 56}
    rig.run()


def test_prompts_that_branch_together_compute_their_beginning_once() -> None:
    rig = Rig(state_pages=2)
    rig.add(*prompts(4))
    rig.run()
    assert rig.hits == {0: 0, 1: 60, 2: 60, 3: 60}


def test_prompts_that_branch_one_after_the_other_compute_their_beginning_twice() -> None:
    rig = Rig(state_pages=2)
    for index, prompt in enumerate(prompts(4)):
        rig.add(prompt, first=index)
        rig.run()
    assert rig.hits == {0: 0, 1: 0, 2: 60, 3: 60}


def test_requests_wait_for_one_that_is_asked_to_keep_a_state() -> None:
    rig = Rig(state_pages=2, budget=24)
    first, *others = prompts(4, own=20)
    rig.add(first)
    rig.run()
    rig.add(*others, [6, 5, 4, 3, 2, 1], first=1)
    rig.run()
    assert rig.hits == {0: 0, 1: 0, 2: 60, 3: 60, 4: 0}


def test_two_branches_of_one_writer_are_computed_at_most_twice() -> None:
    rig = Rig(state_pages=2)
    tails = [[*COMMON[:length], 6, i] for length in (40, 24) for i in range(3)]
    rig.add([*COMMON, 3, 3], *tails)
    rig.run()
    computed = {length: sum(length > hit for request, hit in rig.hits.items() if request in sharers)
                for length, sharers in ((40, range(4)), (24, range(7)))}
    assert max(computed.values()) <= 2, rig.hits


def test_a_writer_that_ends_leaves_its_branch_to_those_who_wait() -> None:
    rig = Rig(state_pages=2, budget=24)
    rig.add(*prompts(3))
    rig.step()
    rig.scheduler.end(0, Finish.ABORT)
    rig.run()
    assert rig.hits[1] <= 24 and rig.hits[2] == 60


def test_any_schedule_of_states_that_are_shared() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(0, 2), max_drafts=st.integers(0, 3), has_lookahead=st.booleans(),
        max_requests=st.just(4), budget=st.integers(4, 40), num_requests=st.just(8),
        spare_pages=st.sampled_from([6, 60]), abort_rate=st.sampled_from([0, 0.1]),
        preempt_rate=st.sampled_from([0, 0.1]), is_lazy=st.booleans(), fail_rate=st.sampled_from([0, 0.3]),
        state_pages=st.integers(1, 3), interval=st.sampled_from([8, 16]),
    )
    totals = run(scenarios, 250)
    totals.needs("starts again", "shared states", "restored states", "checkpoints in known tokens")
    assert totals.counts["shared states"] > 20


def test_the_host_knows_whether_enough_requests_hold_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "LEAST_SHARED", 32)
    rig = Rig()
    rig.add(*prompts(manager.FEWEST_SHARERS), prompts(40)[39][:24])
    batch = rig.step()
    assert batch is not None and not batch.cache.shares_pages, "the first of them shares nobody's pages"
    rig.add(*prompts(12)[11:], first=20)
    assert (batch := rig.step()) is not None and batch.cache.shares_pages
    rig.run()
    assert not rig.cache.shares_pages
