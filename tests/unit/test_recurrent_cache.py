"""Checkpoints on the host: where they are taken, who may begin from them, and thousands of random schedules with the
hash mixer, whose recurrent state shows any wrong, missing or repeated token, fold or restore.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from outrider.cache.checkpoints import StateProgress
from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, RecurrentKind, RecurrentSpec, SlidingSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Bound, CheckpointWrite, Finish, Limits, RequestResult, ScheduledBatch, Settled, StepResult
from outrider.core.params import SamplingParams
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import FixedDrafts
from outrider.speculation.step_drafts import StepDrafts
from tests.unit.hash_mixer import make_layout
from tests.unit.made_requests import made_request
from tests.unit.schedule_driver import MAX_LEN, PLAIN, Driver, Scenario
from tests.unit.test_scheduler_random import GROUPS, PAGES, SEEDS, run

PAGE = 4
INTERVAL = 16
TOKENS = [i * 7 % 11 for i in range(64)]
MAMBA = RecurrentSpec(conv_dim=24, conv_width=4, state_shape=(2, 8, 8), gate_sizes=(2,), out_dim=16, itemsize=2)
FULL = FullSpec(2, 16, 2)


def limits_of(budget: int = 32, max_drafts: int = 3, steps: int = 2) -> Limits:
    return Limits(4, budget, 64, max_drafts, 99, steps_in_flight=steps)


def manager(num_pages: int = 60, state_pages: int = 2, **options: object) -> CacheManager:
    layout = make_layout((PAGE, 0), state_pages=state_pages, interval=INTERVAL)
    return CacheManager(layout, PagePool(num_pages), limits_of(), **options)  # type: ignore[arg-type]


def admit(cache: CacheManager, request_id: int, tokens: Sequence[int]) -> int:
    return cache.admit(request_id, request_id + 1, cache.find_start(request_id, tokens))


def chunk(before: int, after: int) -> StateProgress:
    """A prompt's tokens: nothing is in doubt."""
    return StateProgress(before, before, after, after)


def compute(cache: CacheManager, request_id: int, tokens: Sequence[int], length: int, step: int = 0) -> None:
    """One step that computes the first `length` tokens and writes whatever it may."""
    assert cache.reserve(request_id, Bound(length))
    writes = cache.grant_checkpoints(step, {request_id: chunk(0, length)})
    report(cache, step, writes, tokens)
    cache.settle(request_id, Settled(length), tokens)


def report(cache: CacheManager, step: int, writes: Sequence[CheckpointWrite], tokens: Sequence[int]) -> None:
    cache.settle_checkpoints(step, [write.id for write in writes], lambda _: tokens)
    cache.take_changes()
    cache.check_integrity()


def end(cache: CacheManager, request_id: int, tokens: Sequence[int], settled: int, folded: int | None = None, *,
        is_exact: bool = True) -> None:
    cache.retire(request_id, tokens, Settled(settled), settled if folded is None else folded, is_exact=is_exact)
    cache.free(request_id)
    cache.check_integrity()


def hit_of(cache: CacheManager, tokens: Sequence[int]) -> int:
    hit = admit(cache, 99, tokens)
    cache.free(99)
    cache.forget(99)
    cache.take_changes()
    cache.check_integrity()
    return hit


# Where checkpoints are taken


@pytest.mark.parametrize(
    ("prompt", "before", "after", "boundaries"),
    [
        (50, 0, 50, [16, 32, 48]),  # intervals, and the last boundary before the prompt's end
        (48, 0, 48, [16, 32, 44, 48]),  # one token must be left to compute; 48 is the row's latest
        (30, 0, 11, [8]),  # a chunk's last boundary, until the next one
        (30, 11, 30, [16, 28]),
        (3, 0, 3, []),
        (30, 28, 29, []),
    ],
)
def test_a_prompts_checkpoints(prompt: int, before: int, after: int, boundaries: list[int]) -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:prompt])
    writes = cache.grant_checkpoints(0, {0: chunk(before, after)})
    assert [write.boundary for write in writes] == boundaries
    assert all(len(write.pages) == 2 and write.row == 1 for write in writes)
    pages = [page for write in writes for page in write.pages]
    assert len(set(pages)) == len(pages)


def test_a_decode_step_gets_pages_only_if_it_may_reach_a_boundary() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    # 14 tokens settled, of which one waits to be folded; the state will have seen 15 to 18.
    assert [w.boundary for w in cache.grant_checkpoints(1, {0: StateProgress(13, 13, 15, 18)})] == [16]
    assert cache.grant_checkpoints(2, {0: StateProgress(16, 16, 17, 19)}) == []


def test_steps_in_flight_share_the_pages_of_a_boundary() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    first, second = (cache.grant_checkpoints(step, {0: StateProgress(10, 10, 11, 13)}) for step in (1, 2))
    assert first == second and len(first) == 1


def test_every_step_in_flight_gets_all_the_checkpoints_that_it_wants() -> None:
    """Three steps of a prompt of 93 tokens, none of which has reported."""
    limits = Limits(4, 32, 128, 3, 99, steps_in_flight=3)
    cache = CacheManager(make_layout((PAGE, 0), state_pages=1, interval=INTERVAL), PagePool(60), limits)
    prompt = [i * 7 % 11 for i in range(90)]
    admit(cache, 0, prompt)
    assert cache.reserve(0, Bound(93))
    progress = [StateProgress(0, before, before + 31, before + 31) for before in (0, 31, 62)]
    given = [[w.boundary for w in cache.grant_checkpoints(step, {0: own})] for step, own in enumerate(progress)]
    assert given == [[16, 28], [32, 48, 60], [64, 80, 88, 92]]


def test_the_latest_boundary_is_known_to_others_when_the_request_ends() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:18])
    compute(cache, 0, TOKENS, 20)
    assert hit_of(cache, TOKENS[:30]) == 16
    end(cache, 0, TOKENS[:21], 20)
    assert hit_of(cache, TOKENS[:30]) == 20


def test_only_the_latest_boundary_is_held() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:2])
    for step, length in enumerate(range(4, 16, 4)):
        assert cache.reserve(0, Bound(length))
        report(cache, step, cache.grant_checkpoints(step, {0: chunk(length - 4, length)}), TOKENS)
        assert len(cache.checkpoints.held()) == 2
        assert cache.pool.num_free == cache.pool.num_usable - length // PAGE - 2
    cache.settle(0, Settled(12), TOKENS)
    end(cache, 0, TOKENS[:13], 12)
    assert hit_of(cache, TOKENS[:40]) == 12


def test_a_preempted_request_finds_its_latest_state() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:21])
    compute(cache, 0, TOKENS, 24)
    end(cache, 0, TOKENS[:25], 24, is_exact=False)
    assert admit(cache, 0, TOKENS[:25]) == 24


# Only what was reported


def test_a_checkpoint_is_known_only_when_its_step_has_reported_it() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:34])
    assert cache.reserve(0, Bound(33))
    writes = cache.grant_checkpoints(0, {0: chunk(0, 33)})
    cache.settle(0, Settled(33), TOKENS)  # the pages of attention are full; the state's are not known to be
    assert hit_of(cache, TOKENS[:40]) == 0
    report(cache, 0, writes[:1], TOKENS)
    assert hit_of(cache, TOKENS[:40]) == 16


def test_a_boundary_that_was_passed_without_a_report_gives_its_pages_back() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    cache.grant_checkpoints(1, {0: StateProgress(10, 10, 11, 13)})
    report(cache, 1, [], TOKENS)
    assert len(cache.checkpoints.held()) == 2, "the next step may reach it"
    cache.grant_checkpoints(2, {0: StateProgress(13, 13, 14, 14)})
    assert cache.checkpoints.held() == []


def test_a_report_of_what_was_given_up_is_ignored() -> None:
    cache = manager(num_pages=10)
    admit(cache, 0, TOKENS[:9])
    writes = cache.grant_checkpoints(1, {0: chunk(0, 9)})
    assert len(writes) == 1 and cache.pool.num_free == 7
    assert cache.reserve(0, Bound(36)), "a checkpoint gives way to a request that needs pages to run"
    report(cache, 1, writes, TOKENS)
    assert cache.checkpoints.held() == [] and cache.checkpoints.num_written == 0


def test_what_steps_in_flight_wrote_for_a_request_that_ended_is_kept() -> None:
    """As after a stop string: the host ends the request, and its last steps' reports come later."""
    cache = manager()
    admit(cache, 0, TOKENS[:9])
    assert cache.reserve(0, Bound(16))
    cache.settle(0, Settled(12), TOKENS)
    writes = cache.grant_checkpoints(1, {0: StateProgress(11, 11, 12, 14)})
    beyond = cache.grant_checkpoints(2, {0: StateProgress(11, 11, 13, 18)})
    assert [w.boundary for w in beyond] == [12, 16]
    end(cache, 0, TOKENS[:13], 12, 11, is_exact=False)
    assert len(cache.checkpoints.held()) == 2, "of tokens that the host never saw nothing can be known"
    report(cache, 1, writes, TOKENS)
    assert cache.checkpoints.held() == [] and hit_of(cache, TOKENS[:40]) == 12


def test_without_prefix_caching_no_checkpoint_is_taken() -> None:
    cache = manager(enable_prefix_caching=False)
    admit(cache, 0, TOKENS[:40])
    assert not cache.takes_checkpoints
    end(cache, 0, TOKENS[:41], 40)
    assert cache.checkpoints.held() == [] and not cache.checkpoints.has_folds


# Hits


def test_a_hit_is_the_longest_boundary_that_pages_and_a_checkpoint_serve() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:50])
    compute(cache, 0, TOKENS, 49)
    assert hit_of(cache, TOKENS[:50]) == 48
    assert hit_of(cache, TOKENS[:48]) == 32, "a token must be left to compute"
    assert hit_of(cache, [*TOKENS[:40], 1]) == 32, "pages serve 40, and no state does"
    assert hit_of(cache, [*TOKENS[:14], 1, 1, 1, 1, 1]) == 0


def test_a_hit_names_the_pages_of_its_state_and_holds_them_until_the_batch_is_made() -> None:
    cache = manager()
    admit(cache, 0, TOKENS[:50])
    writes = cache.grant_checkpoints(0, {0: chunk(0, 49)})
    assert cache.reserve(0, Bound(49))
    report(cache, 0, writes, TOKENS)
    cache.settle(0, Settled(49), TOKENS)
    assert admit(cache, 1, TOKENS[:40]) == 32
    assert cache.restored(1) == next(w.pages for w in writes if w.boundary == 32)
    held = cache.states.held()
    assert set(cache.restored(1)) <= set(held)
    cache.take_changes()
    assert not cache.states.held(), "from the next batch on the pages may go"
    assert not set(held) & set(cache.checkpoints.held())


def test_a_state_with_a_page_gone_serves_nobody_and_never_mixes_with_another() -> None:
    cache = manager(num_pages=14)
    admit(cache, 0, TOKENS[:17])
    compute(cache, 0, TOKENS, 17)  # 5 pages, and 2 for the state at 16
    end(cache, 0, TOKENS[:18], 17)
    assert hit_of(cache, TOKENS[:20]) == 16
    other = [5] * 32
    admit(cache, 1, other)
    assert cache.reserve(1, Bound(32)), "which takes the pages that hold nothing and the oldest other"
    assert cache.pool.num_evicted == 1 and hit_of(cache, TOKENS[:20]) == 0
    cache.free(1)
    admit(cache, 0, TOKENS[:17])
    compute(cache, 0, TOKENS, 17, step=1)
    assert admit(cache, 2, TOKENS[:20]) == 16
    restored = cache.restored(2)
    first_id, pages = next(iter(cache.states._pages_of.values()))
    assert restored == pages and first_id > 1


def test_a_hit_that_leaves_no_pages_to_go_on_is_not_taken() -> None:
    """The state's own pages are among those needed: held for the restore, they would leave the request stuck."""
    cache = manager(num_pages=9, state_pages=4)
    admit(cache, 0, TOKENS[:9])
    compute(cache, 0, TOKENS, 9)
    end(cache, 0, TOKENS[:10], 9)
    assert cache.can_start(cache.find_start(1, TOKENS[:24]))
    assert admit(cache, 1, TOKENS[:24]) == 0
    assert cache.reserve(1, Bound(25))


# Through the scheduler


def scheduler(max_drafts: int = 3, steps: int = 1, num_pages: int = 60) -> Scheduler:
    limits = Limits(4, 32, 64, max_drafts, 99, steps_in_flight=steps)
    layout = make_layout((PAGE, 0), state_pages=2, interval=INTERVAL)
    return Scheduler(CacheManager(layout, PagePool(num_pages), limits), limits,
                     speculation=StepDrafts(FixedDrafts(max_drafts)))


def request(index: int, prompt: Sequence[int], new: int = 20) -> Request:
    params = SamplingParams(max_tokens=None)
    return Request(index, made_request(prompt, params), len(prompt) + new)


def play(batch: ScheduledBatch, state: dict[int, tuple[int, int]], accepted: int = 0, finish: Finish = Finish.NO,
         proposed: int = 3) -> StepResult:
    """As a device would: `state` is (computed, pending) by row. Everyone gets token 5 after the accepted drafts."""
    written = [w.id for w in batch.cache.folds if state[w.row][0] - state[w.row][1] < w.boundary <= state[w.row][0]]
    for admission in batch.admissions:
        state[admission.row] = (admission.computed, 0)
    parts = []
    for i, row in enumerate(batch.rows):
        computed, pending = state[row]
        known = batch.num_known[i]
        own = [w for w in batch.cache.checkpoints if w.row == row]
        written += [w.id for w in own if computed - pending < w.boundary <= computed + known]
        taken = min(accepted, batch.num_drafts[i])
        state[row] = (computed + known + taken, taken)
        run_of = [5] * (1 + taken) if batch.samples[i] else []
        parts.append(RequestResult(batch.request_ids[i], batch.epochs[i], run_of, known + taken, batch.num_drafts[i],
                                   taken, proposed, finish))
    return StepResult(batch.step, parts, checkpoints=written)


def drive(sched: Scheduler, state: dict[int, tuple[int, int]], accepted: int = 0,
          finish: Finish = Finish.NO) -> ScheduledBatch:
    batch = sched.schedule()
    assert batch is not None
    sched.update(play(batch, state, accepted, finish))
    sched.check_integrity()
    return batch


def test_a_row_that_ends_with_drafts_pending_is_folded_in_the_next_step() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)  # 13 computed
    drive(sched, state, accepted=3, finish=Finish.STOP)  # 17 computed, of which 14 are in the state
    assert sched.num_running == 0 and sched.has_work
    batch = drive(sched, state)
    assert batch.num_requests == 0 and [fold.boundary for fold in batch.cache.folds] == [16]
    assert not sched.has_work and sched.cache.usage() == 0
    sched.add(request(1, [*TOKENS[:13], 5, 5, 5, 5, 5, 5, 5]))
    assert drive(sched, state).admissions[0].computed == 16, "the next turn of the chat"


def test_a_fold_reads_its_row_before_the_next_owner_gets_it() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)
    drive(sched, state, accepted=3, finish=Finish.STOP)
    sched.add(request(1, [9, 9, 9]))
    batch = drive(sched, state)
    assert batch.cache.folds[0].row == batch.admissions[0].row, "in one batch: folds come first"


@pytest.mark.parametrize(("prompt", "accepted", "folds"), [(13, 1, []), (13, 2, [16]), (12, 2, []), (12, 3, [16]),
                                                           (14, 3, [16]), (15, 3, []), (16, 3, [20]), (16, 2, [])])
def test_a_fold_is_for_a_boundary_among_the_pending_drafts(prompt: int, accepted: int, folds: list[int]) -> None:
    """The prompt's tokens and the first one after it are in the state; accepted drafts come behind."""
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:prompt]))
    drive(sched, state)
    drive(sched, state, accepted, Finish.LENGTH)
    batch = sched.schedule()
    assert [fold.boundary for fold in (batch.cache.folds if batch else [])] == folds


def test_who_would_begin_from_a_fold_waits_for_it() -> None:
    sched, state = scheduler(steps=2), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)
    drive(sched, state, accepted=3, finish=Finish.STOP)
    sched.add(request(1, [*TOKENS[:13], 5, 5, 5, 5, 5]))
    fold = sched.schedule()
    assert fold is not None and fold.cache.folds and fold.num_requests == 0
    assert sched.schedule() is None, "until the fold is reported"
    sched.update(play(fold, state))
    assert drive(sched, state).admissions[0].computed == 16


def test_a_failed_step_leaves_nothing_to_begin_from() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)
    drive(sched, state, accepted=3)
    assert sched.schedule() is not None
    sched.recover("lost")
    assert sched.num_waiting == 1 and not sched._in_flight and sched.cache.usage() == 0
    sched.check_integrity()
    sched.end(0, Finish.ABORT)
    sched.add(request(1, [*TOKENS[:13], 5, 5, 5, 5, 5]))
    assert drive(sched, state).admissions[0].computed == 12, "the prompt's, which had been reported"


def test_a_fold_whose_step_failed_is_forgotten() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)
    drive(sched, state, accepted=3, finish=Finish.STOP)
    assert sched.schedule() is not None
    sched.recover("lost")
    assert sched.cache.usage() == 0 and not sched.has_work


def test_a_failed_step_spoils_what_later_ones_write_of_ended_requests() -> None:
    """The host ends a request with two steps in flight; the first of them dies, and the second begins from nobody knows
    what."""
    sched, state = scheduler(max_drafts=0, steps=2), {}
    sched.add(request(0, TOKENS[:17]))
    drive(sched, state)
    for _ in range(2):
        drive(sched, state)
    assert sched.schedule() is not None  # computes token 19
    second = sched.schedule()
    assert second is not None and [write.boundary for write in second.cache.checkpoints] == [20]
    sched._requests[0].token_ids.append(5)  # as if it were known
    sched.end(0, Finish.ABORT)
    assert sched.cache.usage() > 0, "what the second step may write is waited for"
    sched.recover("lost")
    assert sched.cache.usage() == 0 and not sched.has_work, "the second step counts as little as the first"
    sched.check_integrity()
    sched.add(request(1, [*TOKENS[:17], 5, 5, 5, 5, 5]))
    assert drive(sched, state).admissions[0].computed == 16


def test_an_error_leaves_no_fold() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    drive(sched, state)
    drive(sched, state, accepted=3, finish=Finish.ERROR)
    assert sched.schedule() is None and sched.cache.usage() == 0


def test_the_host_says_how_many_drafts_may_wait() -> None:
    sched, state = scheduler(), {}
    sched.add(request(0, TOKENS[:13]))
    assert drive(sched, state).cache.num_pending == [0]
    assert drive(sched, state).cache.num_pending == [0]
    assert drive(sched, state).cache.num_pending == [3]


# Sizes


def layout_of(*layers: LayerCache) -> CacheLayout:
    return plan_groups(list(layers))


def test_recurrent_layers_own_no_group_and_do_not_set_the_page() -> None:
    plain = layout_of(LayerCache(1, FULL), LayerCache(3, SlidingSpec(2, 16, 2, 64)))
    mixed = layout_of(LayerCache(0, MAMBA), LayerCache(1, FULL), LayerCache(2, MAMBA),
                      LayerCache(3, SlidingSpec(2, 16, 2, 64)))
    assert mixed.groups == plain.groups and mixed.page_bytes == plain.page_bytes and mixed.padding == plain.padding
    assert mixed.places.keys() == {1, 3} and not plain.recurrent.layers
    assert [layer for layer, _ in mixed.recurrent.layers] == [0, 2]


def test_layers_that_only_recur_have_pages_that_keep_nothing() -> None:
    """Prefixes are counted in them, and checkpoints are lists of them."""
    layout = layout_of(LayerCache(0, MAMBA), LayerCache(1, MAMBA))
    (group,) = layout.groups
    assert group.layers == () and group.spec.token_bytes == 0 and group.is_target and not layout.places
    assert layout.page_bytes == 1024 and layout.recurrent.page_tokens == group.page_tokens == 16
    assert layout.padding == 0 and not layout.has_full_attention
    large = RecurrentSpec(24, 4, (64, 64, 64), (2,), 8, 2)
    assert RecurrentKind(((0, large),), 16, layout_of(LayerCache(0, large)).page_bytes).capacity(
        limits_of(max_drafts=0)).checkpoint_pages <= 512


def test_a_drafters_pages_lie_beside_those_that_keep_nothing() -> None:
    layout = plan_groups([LayerCache(0, MAMBA)], drafter=[LayerCache(1, FULL)])
    assert [(group.layers, group.is_target) for group in layout.groups] == [((1,), False), ((), True)]
    assert layout.page_bytes == plan_groups([LayerCache(1, FULL)]).page_bytes


def test_a_model_without_any_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="declares no cache"):
        layout_of()


def test_a_row_grows_with_the_drafts_by_their_inputs_alone() -> None:
    kind = RecurrentKind(((0, MAMBA), (2, MAMBA)), 16, 4096)
    rows = [kind.capacity(limits_of(max_drafts=k)) for k in range(8)]
    state = 2 * (2 * 8 * 8 * 4 + 3 * 24 * 2)
    assert kind.checkpoint_bytes == state
    for k, row in enumerate(rows):
        assert row.row_bytes == state + row.window_bytes and row.window_bytes == k * 2 * (24 + 2) * 2
        assert row.checkpoint_pages == -(-state // 4096) and row.max_checkpoints == rows[0].max_checkpoints


def test_states_are_wide_whatever_the_model_is() -> None:
    sizes = {itemsize: RecurrentSpec(1, 2, (3,), (), 1, itemsize).state_bytes for itemsize in (2, 4, 8)}
    assert sizes == {2: 12, 4: 12, 8: 24}


# Random schedules

STATE = {"state_pages": st.integers(1, 3), "interval": st.sampled_from([4, 8, 16])}
ANY = st.builds(
    Scenario, SEEDS, GROUPS, depth=st.integers(0, 2), max_drafts=st.integers(0, 4), has_lookahead=st.booleans(),
    prefix_caching=st.sampled_from([True, True, True, False]), max_requests=st.integers(1, 4),
    budget=st.integers(1, 16), num_requests=st.integers(1, 7), spare_pages=st.sampled_from([0, 3, 10, 30]),
    abort_rate=st.sampled_from([0, 0.05]), preempt_rate=st.sampled_from([0, 0.05]), num_priorities=st.integers(1, 3),
    host_drafts=st.booleans(), is_lazy=st.booleans(), **STATE,
)
HAPPENED = ("restored states", "checkpoints while folding", "checkpoints in known tokens", "hits")


def test_f4_any_schedule() -> None:
    totals = run(ANY, 1000)
    totals.needs(
        *HAPPENED, "folds of ended rows", "preemptions", "evictions", "dropped results", "dead tokens", "cleared pages",
        "chunked prompts", "overlapped steps", "aborts in flight", "aborts while waiting", "host drafts used",
    )


@pytest.mark.parametrize("max_drafts", [1, 2, 3, 4])
def test_f4_every_number_of_accepted_drafts(max_drafts: int) -> None:
    scenarios = st.builds(
        Scenario, SEEDS, st.tuples(st.tuples(PAGES, st.just(0))), depth=st.integers(0, 2),
        max_drafts=st.just(max_drafts), budget=st.just(24), num_requests=st.just(7), spare_pages=st.just(60),
        preempt_rate=st.just(0.02), is_lazy=st.booleans(), **STATE,
    )
    totals = run(scenarios, 125)
    totals.needs_acceptance(max_drafts)
    totals.needs(*HAPPENED, "dead tokens", "overlapped steps", "preemptions in flight", "folds of ended rows")


def test_f4_a_pool_that_is_always_short() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(0, 2), max_drafts=st.integers(0, 4), max_requests=st.just(4),
        budget=st.integers(4, 20), spare_pages=st.integers(0, 4), num_priorities=st.integers(1, 3), **STATE,
    )
    totals = run(scenarios, 300)
    totals.needs("preemptions", "evictions", "hits", "cleared pages", "restored states")
    assert totals.counts["preemptions"] > 50


def test_f4_results_that_come_after_their_request_is_gone() -> None:
    scenarios = st.builds(
        Scenario, SEEDS, GROUPS, depth=st.integers(1, 2), max_drafts=st.integers(0, 4), budget=st.integers(3, 16),
        spare_pages=st.integers(0, 40), abort_rate=st.just(0.1), preempt_rate=st.just(0.2), is_lazy=st.booleans(),
        **STATE,
    )
    totals = run(scenarios, 300)
    totals.needs(*HAPPENED, "preemptions in flight", "aborts in flight", "steps of ended requests")
    assert totals.counts["dropped results"] > 1000


@pytest.mark.long
def test_f4_many_more_of_any_schedule() -> None:
    run(ANY, 20_000).needs_acceptance(4)


def test_another_turn_begins_where_the_last_one_ended() -> None:
    """Alone, with room: a turn's hit is the last boundary of the turn before, whatever was accepted at its end."""
    hits = []
    for seed in range(40):
        driver = Driver(Scenario(seed, depth=0, max_drafts=3, num_requests=1, spare_pages=60, state_pages=2)).run()
        first = driver.requests[0]
        text = first.token_ids
        if len(text) + 2 > MAX_LEN:
            continue
        asked = made_request([*text, 1], PLAIN, cache_salt=first.input.cache_salt)
        driver.scheduler.add(Request(1, asked, len(text) + 2))
        batch = driver.scheduler.schedule()
        assert batch is not None
        hits.append(batch.admissions[0].computed == (len(text) - 1) // 4 * 4)
    assert len(hits) > 15 and all(hits)
