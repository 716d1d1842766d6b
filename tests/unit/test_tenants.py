"""Tenants share rows, pages and steps: whatever one of them asks, another's request starts at once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.adapter_loading import with_adapter
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.params import SamplingParams
from outrider.features.adapters.slots import AdapterSlots
from outrider.sched.giving_way import MOST_GIVEN_WAY, Tenure
from outrider.sched.request import Request, State
from outrider.sched.row_resources import PATIENCE
from outrider.sched.scheduler import Scheduler
from outrider.sched.shares import NO_TENANT, TenantShares
from outrider.sched.waiting import WaitingRequests
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request

ENDLESS = SamplingParams(max_tokens=None)
MAX_LEN = 400


def scheduler(max_rows: int = 4, budget: int = 16, num_pages: int = 2000, num_slots: int = 0) -> Scheduler:
    """num_slots: for adapters 1 and 2."""
    limits = Limits(max_rows, budget, MAX_LEN, 0, 99, steps_in_flight=2)
    cache = CacheManager(make_layout((4, 0)), PagePool(num_pages), limits, enable_prefix_caching=False)
    return Scheduler(cache, limits, resources=[AdapterSlots(num_slots, 9, {1: 1, 2: 1})] if num_slots else ())


def asked(index: int, tenant: str | None, prompt: int = 3, new: int = 200, priority: int = 0,
          adapter: int | None = None) -> Request:
    tokens = [(index * 7 + i) % 99 for i in range(prompt)]
    made = made_request(tokens, ENDLESS, priority=priority, tenant=tenant)
    return Request(index, with_adapter(made, adapter), prompt + new)


def end_of(request: Request) -> Finish:
    return Finish.LENGTH if len(request.token_ids) + 1 == request.end_len else Finish.NO


def step(sched: Scheduler) -> ScheduledBatch:
    """One step, with its result. Every request that samples gets one token."""
    batch = sched.schedule()
    assert batch is not None
    sched.update(StepResult(batch.step, [
        RequestResult(i, e, [5] if s else [], k, 0, 0, finish=end_of(sched._requests[i]) if s else Finish.NO)
        for i, e, s, k in
        zip(batch.request_ids, batch.epochs, batch.samples, batch.num_known, strict=True)]))
    sched.check_integrity()
    return batch


def rows_of(sched: Scheduler) -> Counter[str | None]:
    return Counter(request.input.tenant for request in sched._running)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("priority", [-1000, 0, 1000])
def test_a_request_starts_though_another_tenant_holds_all_rows(priority: int, in_flight: bool) -> None:
    sched = scheduler()
    sched.add(*(asked(index, "one", priority=priority) for index in range(80)))
    for _ in range(3):
        step(sched)
    if in_flight:
        sched.schedule()
    sched.add(asked(100, "two"))
    batch = sched.schedule()
    assert batch is not None and 100 in batch.request_ids
    assert rows_of(sched) == {"one": 3, "two": 1}


def test_tenants_that_want_all_rows_get_equally_many() -> None:
    sched = scheduler(max_rows=6)
    sched.add(*(asked(index, "one", priority=-5) for index in range(20)))
    step(sched)
    for offset, tenant in ((100, "two"), (200, "three")):
        sched.add(*(asked(offset + index, tenant) for index in range(20)))
        for _ in range(6):
            step(sched)
    assert rows_of(sched) == {"one": 2, "two": 2, "three": 2}
    num_preemptions = sched.stats.num_preemptions
    for _ in range(50):
        step(sched)
    assert sched.stats.num_preemptions == num_preemptions, "rows go back and forth"


def test_rows_that_one_tenant_does_not_want_go_to_another() -> None:
    sched = scheduler(max_rows=6)
    sched.add(*(asked(index, "one") for index in range(20)))
    sched.add(asked(100, "two"))
    step(sched)
    assert rows_of(sched) == {"one": 5, "two": 1}


def test_a_row_that_is_given_up_is_that_of_the_least_important_request() -> None:
    sched = scheduler()
    sched.add(*(asked(index, "one", priority=priority) for index, priority in enumerate((3, 7, 1, 7))))
    step(sched)
    sched.add(asked(100, "two", priority=2**20))
    step(sched)
    assert {request.id for request in sched._running} == {0, 1, 2, 100}


def test_a_short_prompt_is_computed_beside_long_ones_of_another_tenant() -> None:
    sched = scheduler(budget=16)
    sched.add(*(asked(index, "one", prompt=300, priority=-1000) for index in range(4)))
    for _ in range(2):
        step(sched)
    sched.add(asked(100, "two", prompt=10))
    batch = step(sched)
    assert batch.samples[batch.request_ids.index(100)], "the short prompt waits for the long ones"
    computed = Counter[str | None]()
    sched.add(asked(101, "two", prompt=300))
    for _ in range(24):
        batch = step(sched)
        for index, num in zip(batch.request_ids, batch.num_known, strict=True):
            computed["two" if index >= 100 else "one"] += num
    assert abs(computed["one"] - computed["two"]) <= 2 * 16 + 24, "prompts have no equal part of the steps"


def test_a_tenant_is_not_owed_the_steps_in_which_it_had_no_prompts() -> None:
    shares = TenantShares(4, 100)
    shares.compute("one", 1_000_000)
    assert shares.in_turn({"one", "two"}) == ["two", "one"]
    shares.compute("two", 101)
    assert shares.in_turn({"one", "two"}) == ["one", "two"]


def test_pages_that_another_tenant_holds_are_given_up() -> None:
    sched = scheduler(max_rows=8, num_pages=61)
    sched.add(*(asked(index, "one", prompt=14, new=100, priority=-9) for index in range(8)))
    for _ in range(26):
        step(sched)
    sched.add(asked(100, "two", prompt=40, new=4))
    for _ in range(12):
        step(sched)
        if sched._requests.get(100) is None or sched._requests[100].state is State.RUNNING:
            break
    else:
        raise AssertionError("the request waits for pages of another tenant")


def test_one_request_that_holds_all_pages_keeps_them() -> None:
    """Two requests that do not fit beside each other would otherwise take the pages from each other for ever."""
    sched = scheduler(max_rows=4, num_pages=41)
    sched.add(asked(0, "one", prompt=120, new=30))
    for _ in range(9):
        step(sched)
    sched.add(asked(100, "two", prompt=60, new=4))
    for _ in range(20):
        step(sched)
    assert sched.stats.num_preemptions == 0


@pytest.mark.parametrize(("prompt", "new"), [(390, 5), (260, 40), (20, 280), (5, 390)])
@pytest.mark.parametrize("small", [30, 200])
def test_a_request_that_needs_most_of_the_pool_ends_beside_another_tenant(prompt: int, new: int, small: int) -> None:
    """It has more pages than the other tenant in the end, and would be given up for its requests for ever."""
    sched = scheduler(max_rows=8, num_pages=101)  # 400 tokens
    index = 0
    sched.add(asked(10**6, "two", prompt=prompt, new=new))
    for _ in range(1500):
        while sched.num_waiting < 12:
            sched.add(asked(index := index + 1, "one", prompt=10, new=small))
        step(sched)
        if 10**6 not in sched._requests:
            break
    else:
        raise AssertionError("a request is given up again and again")
    ended = index
    for _ in range(300):  # and it leaves nothing behind
        while sched.num_waiting < 12:
            sched.add(asked(index := index + 1, "one", prompt=10, new=small))
        step(sched)
    assert index > ended


def test_pages_that_others_give_up_for_a_request_are_kept_for_it() -> None:
    """From the step in which it lacks them, to the end of the next step in which it lacks none."""
    tenure, waiting = Tenure(), WaitingRequests()
    holder, other = asked(0, "one"), asked(1, "two")
    for _ in range(MOST_GIVEN_WAY):
        assert tenure.holder is None
        tenure.give_way(holder)
    holder.state = State.RUNNING
    tenure.begin_step()
    assert tenure.holder is holder and not tenure.keeps_out(other, waiting), "it lacks nothing yet"
    tenure.lack()
    assert tenure.keeps_out(other, waiting) and not tenure.keeps_out(holder, waiting)
    tenure.begin_step()
    assert tenure.keeps_out(other, waiting), "another request gives up its pages now"
    tenure.begin_step()
    assert not tenure.keeps_out(other, waiting)


def test_large_requests_of_many_tenants_end_one_after_another() -> None:
    sched = scheduler(max_rows=6, num_pages=101)
    names = ["one", "two", "three", None]
    sched.add(*(asked(index, names[index % 4], prompt=40 + 30 * (index % 9), new=80) for index in range(24)))
    for _ in range(8000):
        if not sched.has_work:
            break
        step(sched)
    assert not sched.has_work
    assert sched._tenure.holder is None and not sched._tenure._times


@pytest.mark.parametrize("lasts", [5, 60])
def test_an_adapter_waits_for_those_of_another_tenant_for_a_while_only(lasts: int) -> None:
    sched = scheduler(max_rows=8, num_slots=1)
    index = 0
    sched.add(asked(index, "one", new=lasts, adapter=1))
    for _ in range(3):
        step(sched)
    sched.add(asked(10**6, "two", new=3, adapter=2))
    for _ in range(PATIENCE + 3 * lasts):
        while len(sched._requests) < 5:
            sched.add(asked(index := index + 1, "one", new=lasts, adapter=1))
        step(sched)
        if 10**6 not in sched._requests:
            return
    raise AssertionError("the adapter never gets room")


def test_shares_of_random_tenants() -> None:
    """Rows alone, thousands of times: none is free while somebody waits, and no tenant has two more than one that
    waits."""
    source = random.Random(7)
    for _ in range(3000):
        shares, max_rows = TenantShares(8, 100), source.randint(1, 8)
        waiting: Counter[str | None] = Counter()
        for _ in range(30):
            waiting[source.choice([None, "a", "b", "c"])] += source.choice([0, 1, 1, 9])
            for tenant in list(shares.rows):
                if source.random() < 0.3:
                    shares.give_row(tenant)
            for _ in range(max_rows):
                _take_rows(shares, waiting, max_rows, source)
                waiting = +waiting
                if waiting and shares.rows.total() == max_rows:
                    giver = shares.row_giver(waiting)
                    if giver is NO_TENANT:
                        break
                    assert giver is None or isinstance(giver, str)
                    shares.give_row(giver)
                    waiting[giver] += 1
            fewest = min((shares.rows[tenant] for tenant in waiting), default=max_rows)
            assert not waiting or shares.rows.total() == max_rows, "a row is free and a request waits"
            assert max(shares.rows.values(), default=0) <= fewest + 1 or not waiting


def _take_rows(shares: TenantShares, waiting: Counter[str | None], max_rows: int, source: random.Random) -> None:
    order = list(waiting)
    source.shuffle(order)
    for tenant in order:
        while waiting[tenant] and max_rows - shares.rows.total() > shares.num_reserved(tenant, +waiting):
            shares.take_row(tenant)
            waiting[tenant] -= 1
