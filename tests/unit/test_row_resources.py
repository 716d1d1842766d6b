"""Resources that requests need beside rows and pages: none is lost, and a request that waited long goes first."""

from __future__ import annotations

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.params import SamplingParams
from outrider.sched.request import Request, State
from outrider.sched.row_resources import PATIENCE, Room, RowResource
from outrider.sched.scheduler import Scheduler
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request

NEEDS_ALL, NEEDS_NONE = 0, 1  # priorities of requests, by which the tests' resources know them


class Counted(RowResource):
    """So many units, of which every request takes one. It does not know before `take` whether one is free."""

    def __init__(self, num_units: int) -> None:
        self.num_free = num_units

    def room_for(self, asked: CheckedRequest) -> Room:
        return Room.NOT_NEEDED if asked.priority == NEEDS_NONE else Room.FREE

    def take(self, asked: CheckedRequest) -> bool:
        if not self.num_free:
            return False
        self.num_free -= 1
        return True

    def give(self, asked: CheckedRequest) -> None:
        self.num_free += 1

    def forget_all(self) -> None: ...

    def take_orders(self) -> None: ...

    def check_integrity(self) -> None: ...


def scheduler(*resources: RowResource) -> Scheduler:
    limits = Limits(8, 32, 2 * PATIENCE, 0, 99)
    cache = CacheManager(make_layout((4, 0)), PagePool(2000), limits, enable_prefix_caching=False)
    return Scheduler(cache, limits, resources=resources)


def added(sched: Scheduler, index: int, tenant: str, new: int, priority: int = NEEDS_ALL) -> Request:
    asked = made_request([index % 99] * 3, SamplingParams(max_tokens=None), tenant=tenant, priority=priority)
    request = Request(index, asked, 3 + new)
    sched.add(request)
    return request


def step(sched: Scheduler) -> ScheduledBatch:
    """One step, with its result: every request gets one token."""
    batch = sched.schedule()
    assert batch is not None
    ends = {request.id: len(request.token_ids) + 1 == request.end_len for request in sched._running}
    sched.update(StepResult(batch.step, [
        RequestResult(i, e, [5], k, 0, 0, finish=Finish.LENGTH if ends[i] else Finish.NO)
        for i, e, k in zip(batch.request_ids, batch.epochs, batch.num_known, strict=True)]))
    sched.check_integrity()
    return batch


def test_a_request_that_lacks_one_resource_keeps_nothing_of_another() -> None:
    many, one = Counted(2), Counted(1)
    sched = scheduler(many, one)
    first, second = (added(sched, index, "one", new=4) for index in range(2))
    for _ in range(3):
        step(sched)
        assert (many.num_free, one.num_free) == (1, 0), "the second waits, and holds nothing"
    while first.finish is Finish.NO:
        step(sched)
    step(sched)
    assert second.state is State.RUNNING
    while sched.has_work:
        step(sched)
    assert (many.num_free, one.num_free) == (2, 1)


def test_a_request_that_waited_long_holds_up_no_others_once_it_runs() -> None:
    units = Counted(2)
    sched = scheduler(units)
    early = [added(sched, index, "one", new=PATIENCE + 20) for index in range(2)]
    step(sched)
    late = added(sched, 2, "two", new=100)
    for _ in range(PATIENCE + 5):
        step(sched)
    added(sched, 3, "one", new=100)
    step(sched)
    assert units.num_free == 0 and sched.num_running == 2
    while any(request.finish is Finish.NO for request in early):
        step(sched)
    other = added(sched, 4, "one", new=3)
    for _ in range(10):
        step(sched)
    assert late.state is State.RUNNING and sched.num_running == 2, "both units are in use again"
    assert other.state is State.WAITING
