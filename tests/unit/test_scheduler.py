"""The scheduler's rules one by one: who goes first and how much, who gives way, what a result may change."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import DraftOrders, Finish, Limits, RequestResult, RowEnd, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.params import SamplingParams
from outrider.core.speculation import NO_SPECULATION
from outrider.pooling_params import PoolingParams
from outrider.sched.batch import BatchBuilder
from outrider.sched.request import Request, State
from outrider.sched.scheduler import Scheduler
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, FixedDrafts, SharingPlan
from outrider.speculation.host_drafts import HostDrafts
from outrider.speculation.host_step_drafts import StepDraftsWithHost
from outrider.speculation.step_drafts import StepDrafts
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request
from tests.unit.schedule_driver import Driver, Scenario, Totals

PARAMS = SamplingParams(max_tokens=None)


def scheduler(
    num_pages: int = 50, max_requests: int = 4, budget: int = 8, steps: int = 2, drafts: int = 0
) -> Scheduler:
    limits = Limits(max_requests, budget, 32, drafts, 99, steps_in_flight=steps)
    cache = CacheManager(make_layout((4, 0)), PagePool(num_pages), limits, enable_prefix_caching=False)
    return Scheduler(cache, limits, speculation=StepDrafts(FixedDrafts(drafts)))


def request(index: int, prompt: int, new: int = 4, priority: int = 0) -> Request:
    tokens = [index * 7 + i for i in range(prompt)]
    return Request(index, made_request(tokens, PARAMS, priority=priority), prompt + new)


def result_of(batch: ScheduledBatch, finish: dict[int, Finish] | None = None) -> StepResult:
    """Every request that samples gets token 5; no draft is accepted, and there are always more."""
    finish = finish or {}
    return StepResult(batch.step, [
        RequestResult(i, e, [5] if s else [], k, 0, 0, 9, finish=finish.get(i, Finish.NO))
        for i, e, s, k in zip(batch.request_ids, batch.epochs, batch.samples, batch.num_known, strict=True)
    ])


def scheduled(sched: Scheduler) -> ScheduledBatch:
    batch = sched.schedule()
    assert batch is not None
    sched.check_integrity()
    return batch


def tokens_of(batch: ScheduledBatch) -> dict[int, int]:
    return dict(zip(batch.request_ids, batch.num_known, strict=True))


# Who goes first, and how much


@pytest.mark.parametrize("leaves", ["aborted", "preempted by a step", "preempted by the schedule"])
def test_no_admission_is_sent_for_a_request_that_has_left_its_row(leaves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took a row and got no pages, so that no batch was made; another request has the row when one is."""
    sched = scheduler(max_requests=2, steps=2)
    sched.add(request(0, 4, new=1, priority=-1))
    if leaves != "preempted by the schedule":  # a step in flight ends request 0; else it is not there yet
        first = scheduled(sched)
    late = request(1, 3, new=1)
    with monkeypatch.context() as patch:
        patch.setattr(sched.cache, "reserve", lambda *_: False)
        if leaves == "preempted by the schedule":
            assert sched.schedule() is None and sched.num_running == 0, "with nothing to wait for it gives its row up"
            patch.undo()
            (admission,) = scheduled(sched).admissions
            assert admission.token_ids == [0, 1, 2, 3]
            return
        sched.add(late)
        assert sched.schedule() is None and sched.num_running == 2, "it has a row, and no tokens"
    sched.update(result_of(first, {0: Finish.LENGTH}))
    if leaves == "aborted":
        sched.end(1, Finish.ABORT)
    else:
        sched._preempt(late)
    sched.add(request(2, 3, new=1, priority=-1))
    batch = scheduled(sched)
    expected = {2: [14, 15, 16]} | ({} if leaves == "aborted" else {1: [7, 8, 9]})
    assert dict(zip(batch.request_ids, [a.token_ids for a in batch.admissions], strict=True)) == expected
    assert batch.rows == [admission.row for admission in batch.admissions]


def test_a_prompt_is_cut_by_the_budget_and_samples_with_its_last_chunk() -> None:
    sched = scheduler(budget=8)
    sched.add(request(0, 19))
    batches = [scheduled(sched) for _ in range(3)]  # nothing of a result is needed
    assert [b.num_known for b in batches] == [[8], [8], [3]]
    assert [b.samples for b in batches] == [[False], [False], [True]]
    assert [b.bounds for b in batches] == [[8], [16], [19]]
    assert len(batches[0].admissions) == 1 and not batches[1].admissions


def test_requests_that_yield_tokens_go_before_prompts() -> None:
    sched = scheduler(budget=8)
    sched.add(request(0, 20))
    first = scheduled(sched)
    sched.add(request(1, 2))
    sched.update(result_of(first))
    assert tokens_of(scheduled(sched)) == {0: 8}  # the long prompt goes on
    assert tokens_of(scheduled(sched)) == {0: 4, 1: 2}
    sched.add(request(2, 9))
    assert tokens_of(scheduled(sched)) == {0: 1, 1: 1, 2: 6}


def test_one_token_for_everyone_goes_before_drafts() -> None:
    sched = scheduler(max_requests=4, budget=6, drafts=3)
    for index in range(3):
        sched.add(request(index, 2, new=9))
    scheduled(sched)
    batch = scheduled(sched)
    assert (tokens_of(batch), batch.num_drafts) == ({0: 1, 1: 1, 2: 1}, [3, 0, 0])


def test_a_prompts_part_of_one_token_is_no_decoding() -> None:
    builder = BatchBuilder(0)
    builder.add_decoding(request(0, 2), 0, 2)
    assert builder.only_decodes
    builder.add_prompt(request(1, 9), 1, False, 1)
    assert not builder.only_decodes


def test_no_drafts_are_checked_beyond_a_requests_end() -> None:
    """The step itself yields a token behind the drafts."""
    sched = scheduler(budget=8, drafts=3)
    sched.add(request(0, 2, new=4), request(1, 2, new=3), request(2, 2, new=2))
    assert max(scheduled(sched).num_drafts) == 0
    batch = scheduled(sched)
    assert (batch.request_ids, batch.num_drafts) == ([0, 1, 2], [2, 1, 0])


def test_drafts_leave_a_token_to_a_prompt_that_came_before() -> None:
    """A long text to embed leaves room for a short prompt, which then decodes while the text is still computed."""
    sched = scheduler(budget=8, drafts=7)
    sched.add(Request(0, CheckedRequest(tuple(range(28)), PoolingParams()), 28), request(1, 2, new=20))
    assert scheduled(sched).request_ids == [0, 1]
    batch = scheduled(sched)
    assert (tokens_of(batch), batch.num_drafts) == ({1: 1, 0: 1}, [6, 0])


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_drafter_sees_prompts_of_requests_that_start_in_this_step(is_padded: bool) -> None:
    costs = StepCosts((1, 64), (1.0, 1.01), (DraftCost(1, 0.01, 0.01),), is_padded=is_padded)
    sched = scheduler(drafts=2)
    sched.speculation = StepDrafts(auto_drafts(2, costs, always_propose=False))
    sched.add(request(0, 5))
    batch = scheduled(sched)
    assert batch.admissions and batch.drafting.num_wanted == 2 and max(batch.num_drafts) == 0


class SharedRows(DraftCounts):
    """Leaves two rows for drafts to the device, one draft each where it cannot share them out."""

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        weights = {request.id: 1 for request in requests}
        return DraftPlan([3] * len(requests), 3, SharingPlan(2, weights, [1], [1] * len(requests)))


def test_the_device_shares_no_rows_out_in_a_step_with_prompts() -> None:
    sched = scheduler(max_requests=3, drafts=3)
    sched.speculation = StepDrafts(SharedRows())
    sched.add(request(0, 2, new=20), request(1, 2, new=20))
    sched.update(result_of(scheduled(sched)))
    batch = scheduled(sched)
    assert batch.drafting.sharing is not None and batch.num_drafts == [3, 3]
    sched.update(result_of(batch))
    sched.add(request(2, 2, new=20))
    batch = scheduled(sched)
    assert batch.admissions and batch.drafting.sharing is None and batch.num_drafts == [1, 1, 0]


@pytest.mark.parametrize(("finish", "observed"), [(Finish.LENGTH, 1), (Finish.NO, 3)])
def test_drafts_that_an_end_cuts_off_are_not_counted_as_wrong(finish: Finish, observed: int) -> None:
    """A draft that was scheduled and not there has cost as much as a wrong one, unless the request ended before it."""
    sched, counts, seen = scheduler(), FixedDrafts(3), []
    counts.observe = lambda settled, **_: seen.extend(num for *_, num in settled)  # type: ignore[method-assign]
    sched.speculation = StepDrafts(counts)
    sched.add(request(0, 3, new=9))
    sched.update(result_of(scheduled(sched)))
    batch = scheduled(sched)
    assert batch.num_drafts == [3]
    sched.update(StepResult(batch.step, [RequestResult(0, 0, [5, 5], 2, 1, 1, 0, finish=finish)]))
    assert seen == [0, observed]


def test_a_prompt_goes_on_beside_drafts() -> None:
    sched = scheduler(max_requests=4, budget=4, drafts=3)
    sched.add(request(0, 1, new=9))
    sched.add(request(1, 20))
    assert tokens_of(scheduled(sched)) == {0: 1, 1: 3}
    batch = scheduled(sched)
    assert (tokens_of(batch), batch.num_drafts) == ({0: 1, 1: 1}, [2, 0])


@pytest.mark.parametrize("new", range(1, 7))
def test_no_more_steps_are_scheduled_than_end_a_request(new: int) -> None:
    """Whether its last page is full then or not."""
    sched = scheduler(steps=9)
    sched.add(request(0, 3, new=new))
    batches = [scheduled(sched) for _ in range(new)]
    assert sched.schedule() is None
    assert batches[-1].bounds == [2 + new]  # the last token is never computed
    for batch in batches:
        sched.update(result_of(batch, {0: Finish.LENGTH} if batch is batches[-1] else {}))
    assert not sched.has_work


def test_rows_and_requests_are_limited() -> None:
    sched = scheduler(max_requests=2, budget=8)
    for index in range(3):
        sched.add(request(index, 2))
    batch = scheduled(sched)
    assert tokens_of(batch) == {0: 2, 1: 2} and sched.num_waiting == 1
    sched.update(result_of(batch, {0: Finish.STOP}))
    batch = scheduled(sched)
    assert tokens_of(batch) == {1: 1, 2: 2}
    assert batch.admissions[0].row == 1, "the row that became free"


def test_what_matters_more_starts_first_then_what_came_first() -> None:
    sched = scheduler(max_requests=4, budget=20)
    for index, priority in enumerate((1, 0, 1, 0)):
        sched.add(request(index, 2, priority=priority))
    assert scheduled(sched).request_ids == [1, 3, 0, 2]


def test_a_batch_must_have_room_for_a_token_of_every_request() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens .3. must be at least max_num_seqs .4."):
        scheduler(max_requests=4, budget=3)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    sched = scheduler(num_pages=5)
    sched.add(request(0, 12, new=4))
    with pytest.raises(ValueError, match="may need 5 pages .17 tokens. and the pool has 4"):
        sched.add(request(1, 13, new=4))
    assert sched.num_waiting == 1


# When pages are short


def short_of_pages() -> tuple[Scheduler, ScheduledBatch]:
    """Two requests that fill the pool, with the step in flight after which both need another page."""
    sched = scheduler(num_pages=5, budget=16)
    sched.add(request(0, 8))
    sched.add(request(1, 7, new=5))
    batch = scheduled(sched)
    assert tokens_of(batch) == {0: 8, 1: 7} and sched.cache.pool.num_free == 0
    return sched, batch


def test_it_waits_for_results_before_it_preempts() -> None:
    sched, first = short_of_pages()
    second = scheduled(sched)
    assert tokens_of(second) == {1: 1}, "request 0 needs a page and waits for one"
    assert sched.schedule() is None and sched.stats.num_preemptions == 0
    sched.update(result_of(first))
    assert sched.schedule() is None and sched.stats.num_preemptions == 0
    sched.update(result_of(second))
    assert tokens_of(scheduled(sched)) == {0: 1}, "the later arrival gives way"
    assert sched.stats.num_preemptions == 1 and sched.num_waiting == 1


def test_pages_that_a_result_frees_make_a_preemption_needless() -> None:
    sched, first = short_of_pages()
    second = scheduled(sched)
    sched.update(result_of(first))
    sched.update(result_of(second, {1: Finish.STOP}))
    assert tokens_of(scheduled(sched)) == {0: 1} and sched.stats.num_preemptions == 0


def test_what_matters_least_gives_way_even_if_it_asks() -> None:
    sched = scheduler(num_pages=5, budget=16)
    sched.add(request(0, 8, priority=1))
    sched.update(result_of(scheduled(sched)))
    sched.add(request(1, 7, new=5, priority=0))
    batch = scheduled(sched)
    assert tokens_of(batch) == {0: 1}, "no room for another beside it yet"
    sched.update(result_of(batch, {0: Finish.STOP}))
    assert tokens_of(scheduled(sched)) == {1: 7}


class AlwaysFours:
    """A drafter on the host that guesses the same token for ever."""

    def propose(self, request_id: int, token_ids: Sequence[int], prompt_len: int, most: int,
                tenant: str) -> list[int]:
        return [4] * most

    def finish(self, request_id: int, token_ids: Sequence[int], tenant: str) -> None: ...


def test_the_drafts_of_a_request_that_gives_way_reach_no_row() -> None:
    """It has no row any more, and in the next batch the row may be another request's."""
    sched = scheduler(num_pages=5, drafts=3, steps=1)
    sched.speculation = StepDraftsWithHost(FixedDrafts(3), HostDrafts(AlwaysFours(), 100))
    sched.add(request(0, 2, new=10), request(1, 3, new=10))
    for _ in range(6):
        batch = scheduled(sched)
        assert {draft.row for draft in batch.drafting.from_host} <= set(batch.rows)
        sched.update(result_of(batch))
    assert sched.stats.num_preemptions > 0


def test_drafts_of_the_host_that_a_batch_has_no_room_for_are_not_sent() -> None:
    sched = scheduler(max_requests=2, budget=4, drafts=3, steps=1)
    sched.speculation = StepDraftsWithHost(FixedDrafts(3), HostDrafts(AlwaysFours(), 100))
    sched.add(request(0, 2, new=10), request(1, 2, new=10))
    sched.update(result_of(scheduled(sched)))
    batch = scheduled(sched)
    assert batch.num_drafts == [2, 0]
    assert [draft.row for draft in batch.drafting.from_host] == batch.rows[:1]


@pytest.mark.parametrize(("finish", "served"), [
    (Finish.STOP, 3), (Finish.LENGTH, 3), (Finish.ERROR, 0), (Finish.ABORT, 0)])
def test_only_texts_that_were_served_are_learned_from(finish: Finish, served: int) -> None:
    """The row's end tells how many tokens of its text count."""
    sched = scheduler(drafts=3)
    sched.add(request(0, 3), request(1, 2))
    batch = scheduled(sched)
    if finish is Finish.ABORT:
        sched.update(result_of(batch))
        sched.end(0, finish)
    else:
        sched.update(result_of(batch, {0: finish}))
    assert scheduled(sched).drafting.ends == [RowEnd(batch.rows[0], served)]


def test_without_speculation_a_batch_has_no_drafts() -> None:
    sched = scheduler()
    sched.speculation = NO_SPECULATION
    sched.add(request(0, 3), request(1, 2))
    for _ in range(2):
        batch = scheduled(sched)
        assert set(batch.num_drafts) == {0} and batch.drafting == DraftOrders()
        sched.update(result_of(batch))


def test_a_preempted_request_goes_on_from_its_settled_tokens() -> None:
    sched, first = short_of_pages()
    second = scheduled(sched)
    sched.update(result_of(first))
    sched.update(result_of(second))
    late = scheduled(sched)
    sched.update(result_of(late, {0: Finish.STOP}))
    batch = scheduled(sched)
    (admission,) = batch.admissions
    assert admission.token_ids[-2:] == [5, 5] and len(admission.token_ids) == 9 and admission.prompt_len == 7
    assert tokens_of(batch) == {1: 9} and batch.samples == [True] and batch.epochs == [1]


# What a result may change


def test_a_result_of_a_former_epoch_is_dropped() -> None:
    sched = scheduler()
    victim = request(0, 3)
    sched.add(victim)
    stale = scheduled(sched)
    sched._preempt(victim)
    fresh = scheduled(sched)
    assert fresh.epochs == [1] and len(fresh.admissions) == 1
    assert sched.update(result_of(stale)) == [] and victim.token_ids[victim.prompt_len :] == []
    assert victim.settled.at_least == 0 and victim.bound.at_most == 3
    assert len(sched.update(result_of(fresh))) == 1 and victim.token_ids[victim.prompt_len :] == [5]
    assert sched.stats.num_dropped_results == 1


def test_a_result_for_an_aborted_request_is_dropped() -> None:
    sched = scheduler()
    gone = request(0, 3)
    sched.add(gone)
    batch = scheduled(sched)
    sched.end(0, Finish.ABORT)
    assert gone.finish is Finish.ABORT and gone.state is State.FINISHED
    assert sched.cache.pool.num_free == sched.cache.pool.num_usable
    assert sched.take_ended_early() == [gone] and sched.take_ended_early() == []
    assert sched.has_work, "a result is still to come"
    assert sched.update(result_of(batch)) == [] and not sched.has_work


def test_a_request_that_had_left_a_step_is_no_suspect_when_the_step_fails() -> None:
    sched = scheduler()
    requests = [request(index, 3) for index in range(2)]
    sched.add(requests[0])
    scheduled(sched)
    sched._preempt(requests[0])
    sched.recover("broken")
    sched.add(requests[1])
    for num_held_back in (0, 1):  # the first failure that blames the two, and the second
        assert len(scheduled(sched).request_ids) == 2
        sched.recover("broken")
        assert sched.num_held_back == num_held_back


def test_ending_one_that_waits_or_is_unknown() -> None:
    sched = scheduler()
    for index in range(3):
        sched.add(request(index, 3))
    sched.end(1, Finish.ERROR, "no reason")
    sched.end(77, Finish.ABORT)
    (ended,) = sched.take_ended_early()
    assert (ended.id, ended.error) == (1, "no reason")
    assert scheduled(sched).request_ids == [0, 2]


def test_a_row_may_be_taken_again_while_its_former_owner_is_in_flight() -> None:
    sched = scheduler(max_requests=1)
    for index in range(2):
        sched.add(request(index, 3))
    former = scheduled(sched)
    sched.end(0, Finish.ABORT)
    batch = scheduled(sched)
    assert former.rows == batch.rows == [1] and len(batch.admissions) == 1
    assert sched.update(result_of(former)) == []
    assert [request.id for request, _ in sched.update(result_of(batch))] == [1]


def test_bounds_are_exact_without_drafts_and_never_the_longest_length() -> None:
    sched = scheduler(steps=3)
    sched.add(request(0, 5, new=6))
    assert [scheduled(sched).bounds for _ in range(3)] == [[5], [6], [7]]


def test_a_batch_is_plain_data_that_later_steps_leave_alone() -> None:
    driver = Driver(Scenario(3, ((4, 0), (2, 5)), depth=2, max_drafts=2, num_requests=7))
    batches: list[tuple[ScheduledBatch, bytes]] = []
    schedule = driver.scheduler.schedule

    def recorded() -> ScheduledBatch | None:
        batch = schedule()
        if batch is not None:
            batches.append((batch, pickle.dumps(batch)))
        return batch

    driver.scheduler.schedule = recorded  # type: ignore[method-assign]
    driver.run()
    assert len(batches) > 10
    assert all(pickle.loads(before) == batch for batch, before in batches)


# The same on the hash mixer: a few schedules per rule, quick enough for every mutant


def few(count: int = 30, **fields: object) -> Totals:
    totals = Totals()
    for seed in range(count):
        Driver(Scenario(seed, **fields)).run().add_to(totals)  # type: ignore[arg-type]
    return totals


def test_pages_stay_until_no_step_in_flight_can_read_them() -> None:
    totals = few(groups=((2, 3), (4, 0)), depth=2, max_drafts=3, has_lookahead=True, budget=20)
    totals.needs_acceptance(3)
    totals.needs("overlapped steps", "evictions")


def test_a_preemption_among_results_in_flight_changes_no_token() -> None:
    totals = few(groups=((4, 0),), depth=1, preempt_rate=0.2)
    totals.needs("preemptions in flight", "dropped results")


def test_bounds_hold_with_and_without_drafts() -> None:
    few(depth=2).needs("overlapped steps")
    few(depth=2, max_drafts=4, budget=20).needs("overlapped steps", "dead tokens")
