"""Scheduler: makes one ragged batch of tokens for each step from running and waiting requests, and applies the results.

There are no prefill and decode phases. A request has known tokens, of which some are computed; a step computes more of
them, and checks drafts after the last one. A batch is scheduled before the result of the last step has come, so code
here must not use tokens or exact lengths of a step in flight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from outrider.cache.manager import CacheManager, Start
from outrider.core import (
    Admission,
    Bound,
    CacheOrders,
    Finish,
    Limits,
    RequestResult,
    ScheduledBatch,
    StepForm,
    StepResult,
)
from outrider.core.speculation import NO_SPECULATION, Speculation
from outrider.sched.batch import BatchBuilder
from outrider.sched.faults import Suspects
from outrider.sched.full_step import UNBOUNDED_PROMPTS, FullStep, PromptLine, UnboundedPrompts
from outrider.sched.giving_way import Tenure, held_tokens, least_important
from outrider.sched.request import Request, State
from outrider.sched.row_resources import MAX_WITHOUT_ROOM, Overdue, Room, RowResource, RowResources
from outrider.sched.shares import NO_TENANT, Tenant, TenantShares
from outrider.sched.step_size import StepSize
from outrider.sched.updates import SchedulerStats, Update, apply_results
from outrider.sched.waiting import WaitingRequests


class Scheduler:
    def __init__(self, cache: CacheManager, limits: Limits, *, speculation: Speculation = NO_SPECULATION,
                 prompt_time: UnboundedPrompts = UNBOUNDED_PROMPTS, generation: int = 0,
                 resources: Sequence[RowResource] = ()) -> None:
        """prompt_time: bounds the time that prompts take in steps with requests that decode."""
        if limits.max_batched_tokens < limits.max_requests:
            raise ValueError(f"max_num_batched_tokens ({limits.max_batched_tokens}) must be at least max_num_seqs "
                             f"({limits.max_requests})")
        self.cache = cache
        self.limits = limits
        self._resources = RowResources(resources)
        self.stats = SchedulerStats()
        self.speculation = speculation
        self._prompt_time = prompt_time
        self._waiting = WaitingRequests()
        self._shares = TenantShares(limits.max_requests, limits.max_batched_tokens)
        self._tenure = Tenure()
        self._overdue = Overdue()
        self._running: list[Request] = []
        self._num_masked = 0  # running requests whose tokens a feature masks
        self._requests: dict[int, Request] = {}
        self._suspects = Suspects()
        self._size = StepSize(limits)
        self._generation = generation
        self._free_rows = list(range(limits.max_requests, 0, -1))
        self._in_flight: OrderedDict[int, ScheduledBatch] = OrderedDict()
        self._admissions: list[Admission] = []
        self._ended_early: list[Request] = []  # ended by the host since the last update

    # What the engine asks

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held_back(self) -> int:
        """The number of waiting requests that may not run yet even if there is room, because other requests are on
        trial after a fault."""
        return len(self._waiting) - self._waiting.num_ready

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._in_flight) or self.cache.has_orders

    def add(self, *requests: Request) -> None:
        """Queue the requests atomically: all are checked before the first is queued, so if one is refused, none is
        added."""
        for request in requests:
            self.cache.check_fits(request.end_len)
        for request in requests:
            self._requests[request.id] = request
            request.arrived_at = self.stats.num_steps - len(self._in_flight)
            self._waiting.arrive(request)

    def end(self, request_id: int, finish: Finish, error: str | None = None) -> None:
        """End a request because of an abort, a stop string or an error. Tokens that steps in flight still compute for
        it are dropped."""
        if request_id in self._requests:
            request = self._requests[request_id]
            request.error = error
            self._end(request, finish)

    # One step

    def schedule(self) -> ScheduledBatch | None:
        """Make the batch of the next step. Returns None if there is nothing to compute before a result has come."""
        if self._suspects:
            self._try_suspects()
        if self._waiting.has_next or self._tenure.is_short:
            self._make_way()
        self._tenure.begin_step()
        batch = BatchBuilder(self.stats.num_steps, self._generation)
        has_prompts = self._waiting.has_next and bool(self._free_rows)
        plan = self.speculation.plan(list(self._running), is_exact=not self._in_flight, has_prompts=has_prompts)
        num_preemptions = self.stats.num_preemptions
        # Requests that yield tokens come first, so that a long prompt never holds them up.
        prefills, budget, short = self._schedule_decoding(batch, plan)
        step = self._begin_prompts(batch, budget, prefills)
        started: list[Request] = []
        without_pages: list[Tenant] = []  # tenants whose next requests wait for pages
        for tenant in self._tenants_in_line(prefills):
            for request in prefills:
                if request.input.tenant == tenant and request.state is State.RUNNING and step.room_for(request) > 0:
                    short |= self._schedule_known(request, step, batch) == 0
            if not short and self.stats.num_preemptions == num_preemptions:
                started += self._admit(tenant, step, batch, without_pages)
        return self._finish_batch(batch, started)

    def update(self, result: StepResult, seconds: float | None = None) -> list[Update]:
        """Apply a step's result. Returns the results of requests that were not ended or preempted since the step was
        scheduled. seconds: time since the end of the step before; None if there were no requests in between."""
        batch = self._in_flight.pop(result.step)
        self._size.pass_step()
        requests = self._requests
        self.cache.settle_moves(result)
        failed = [part.request_id for part in result.requests if part.finish is Finish.ERROR]
        for request_id in self.cache.settle_promises(result.step, failed, result.checkpoints):
            self._start_again(requests[request_id])  # its epoch rises, so its results from this step on are dropped
        # Checkpoints before requests: they cover tokens that were known when the step ran, and a request may end below.
        self.cache.settle_checkpoints(result.step, result.checkpoints, lambda owner: requests[owner].token_ids, failed)
        updates, due, num_dropped = apply_results(requests, batch, result)
        self.stats.num_dropped_results += num_dropped
        self.speculation.observe(batch, result, updates, seconds)
        for request, part in due:
            self._settle(request, part)
        return updates

    def recover(self, error: str, *, lacked_memory: bool = False) -> None:
        """Recover after the oldest step in flight has failed and no step runs any more. The content of all rows and of
        all pages that these steps wrote is unknown. So every running request is preempted and computed again from the
        tokens that results have confirmed, in a new generation of steps. A request that causes failures is ended once
        it is found. lacked_memory: the step failed because the device had too little memory, so smaller steps are
        scheduled."""
        batches = list(self._in_flight.values())
        self._in_flight.clear()
        self._generation += 1
        self._admissions = []
        failed = zip(batches[0].request_ids, batches[0].epochs, batches[0].bounds, strict=True)
        points = {request_id: bound for request_id, epoch, bound in failed
                  if request_id in self._requests and self._requests[request_id].epoch == epoch}
        self.preempt_all()
        self._resources.forget_all()
        self.cache.forget_unsettled([batch.cache.pages for batch in batches])
        num_tokens = sum(batches[0].num_known) + sum(batches[0].num_drafts)
        if not (lacked_memory and self._size.shrink(batches[0].num_requests, num_tokens)):
            for request_id in self._suspects.fail(points):
                self.end(request_id, Finish.ERROR, error)
        self._try_suspects(is_new=True)

    def preempt_all(self) -> None:
        """Preempt all running requests: they are computed again from their settled tokens. Called when no step is in
        flight."""
        for request in list(self._running):
            self._give_up_row(request)

    def take_ended_early(self) -> list[Request]:
        """Return the requests that the host ended since the last call, and forget them."""
        ended, self._ended_early = self._ended_early, []
        return ended

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        self._resources.check_integrity()
        rows = [r.row for r in self._running]
        assert len(set(rows)) == len(rows) and 0 not in rows, "a row has two owners"
        assert sorted(rows + self._free_rows) == list(range(1, self.limits.max_requests + 1)), "a row is lost"
        for request in self._running:
            assert request.settled.at_least <= request.bound.at_most, "settled beyond the bound"

    # Inside: making a batch

    def _schedule_decoding(self, batch: BatchBuilder, plan: Sequence[int]) -> tuple[list[Request], int, bool]:
        """Schedule one token and drafts for every request that yields tokens. plan: the most drafts of each request.
        Returns the requests that still compute their prompts, the tokens that are left for these, and whether pages
        were missing. If pages were missing, no request may be admitted."""
        running, budget = list(self._running), self._size.tokens
        is_tight = len(running) + sum(plan) > budget
        prefills: list[Request] = []
        is_short = False
        # The hot loop: a thousand requests, every step.
        for index, (request, num_drafts) in enumerate(zip(running, plan, strict=True), start=1):
            bound = request.bound.at_most + 1 + num_drafts
            if bound > request.free_bound or is_tight:
                if request.state is not State.RUNNING:
                    continue  # preempted by an earlier one in this loop
                if not request.yields_tokens:
                    prefills.append(request)
                    continue
                left = request.num_left
                if left <= 0:
                    continue  # the steps in flight end it
                # One token for everyone goes before anyone's drafts.
                num_drafts = min(num_drafts, left - 1, budget - 1 - (len(running) - index) - len(prefills))
                bound = min(request.bound.at_most + 1 + num_drafts, request.end_len)
                if not self._has_room(request, bound, batch):
                    is_short = True
                    continue
                request.free_bound = min(request.covered - self.cache.lookahead, request.end_len - 1)
            budget -= 1 + num_drafts
            batch.add_decoding(request, num_drafts, bound)
        return prefills, budget, is_short

    def _tenants_in_line(self, prefills: Sequence[Request]) -> list[Tenant]:
        """Tenants with prompts to compute, in the order in which the step serves them."""
        if not (prefills or self._waiting.has_next):
            return []
        return self._shares.in_turn({request.input.tenant for request in prefills} | self._waiting.tenants.keys())

    def _begin_prompts(self, batch: BatchBuilder, budget: int, prefills: list[Request]) -> FullStep:
        """Return the token budget that the decoding requests of the batch leave for prompts."""
        line = PromptLine(prefills, self._waiting, min(self._waiting.num_ready, len(self._free_rows)))
        if batch.is_empty or not (prefills or self._waiting.has_next):
            return FullStep(budget, line)
        num_tokens = self._size.tokens - budget
        return self._prompt_time.begin(batch.requests, num_tokens, budget, line, self.stats.num_steps)

    def _schedule_known(self, request: Request, step: FullStep, batch: BatchBuilder) -> int:
        context = request.bound.at_most
        left = request.admitted_len - context
        chunk, inputs = min(left, step.room_for(request)), request.input.input_parts
        if inputs:
            chunk = inputs.chunk(context, chunk, step.tokens_left)
        bound = context + chunk
        if not (chunk and self._has_room(request, bound, batch)):
            return 0
        batch.add_prompt(request, chunk, chunk == left and request.input.generates, bound)
        request.prompt_done_at = self.stats.num_steps
        self._shares.compute(request.input.tenant, chunk)
        step.add(chunk, context)
        if not self._suspects.has_trial:
            self.cache.promise(batch.step, request.id, request.token_ids, bound)
        return chunk

    def _admit(self, tenant: Tenant, step: FullStep, batch: BatchBuilder,
               without_pages: list[Tenant]) -> list[Request]:
        """Start waiting requests of a tenant, and return them. A request is passed over, so that those behind it may
        start, in three cases: other requests are computing the beginning of its prompt, its long prompt has no room
        beside short ones, or a RowResource has no room for it. Once a request has waited long for a resource, no other
        request of any tenant that needs one starts before it."""
        waiting = self._waiting
        passed_over: list[Request] = []
        without_room: list[Request] = []
        started: list[Request] = []
        is_full = False  # for requests that need a resource
        if without_pages:  # else the pages that they wait for would go to others for ever
            held = held_tokens(self._running)
            if any(held[other] < held[tenant] for other in without_pages):
                return []
        while (waiting.has_next_of(tenant) and self._num_free_rows(tenant) > len(passed_over)
               and step.most_tokens(0) > 0 and len(without_room) < MAX_WITHOUT_ROOM):
            request = waiting.next_of(tenant)
            if self._tenure.keeps_out(request, self._waiting):
                break
            if step.room_for(request) == 0:
                passed_over.append(waiting.pop(tenant))
                continue
            room = self._resources.room_for(request.input)
            if room is not Room.NOT_NEEDED and (is_full or self._lets_pass(request) or room is Room.TAKEN):
                is_full |= self._is_overdue(request, batch.step)
                without_room.append(waiting.pop(tenant))
                continue
            start = self._find_start(request, batch.step)
            if start.must_wait and (self._in_flight or self.cache.has_orders or not batch.is_empty):
                passed_over.append(waiting.pop(tenant))
                continue
            if not self.cache.can_start(start):
                without_pages.append(tenant)
                if request is self._tenure.holder:
                    self._tenure.lack()
                break
            if room is not Room.NOT_NEEDED and not self._resources.take(request.input):
                is_full |= self._is_overdue(request, batch.step)
                without_room.append(waiting.pop(tenant))
                continue
            self._start(waiting.pop(tenant), start)
            started.append(request)
            if step.room_for(request) == 0 or self._schedule_known(request, step, batch) == 0:
                break
        for request in (*passed_over, *without_room):
            waiting.push(request)
        return started

    def _is_overdue(self, request: Request, step: int) -> bool:
        """Note that a resource has no room for a request. Returns whether the request has waited for long."""
        return self._overdue.note(request, step, self._waiting.tenants.keys() | self._shares.rows.keys())

    def _lets_pass(self, request: Request) -> bool:
        """Whether a request that needs a resource must wait, because another tenant's request has waited long for
        it."""
        return self._overdue.holds_up(request) and request is not self._tenure.holder

    def _num_free_rows(self, tenant: Tenant) -> int:
        own = len(self._free_rows) - self._shares.num_reserved(tenant, self._waiting.tenants)
        return own if self._size.is_whole else min(own, self._size.requests - len(self._running))

    def _find_start(self, request: Request, step: int) -> Start:
        asked = request.input
        may_share = request.shares_promises and not self._suspects.has_trial
        return self.cache.find_start(request.id, request.token_ids, asked.cache_keys, inputs=asked.input_parts,
                                     use_prefix=asked.reads_prefix_cache, step=step if may_share else None)

    def _start(self, request: Request, start: Start) -> None:
        self._overdue.forget(request)
        row = self._free_rows.pop()
        request.take_row(row, self.cache.admit(request.id, row, start))
        request.next_event = self.cache.next_event(request.settled)
        self._running.append(request)
        self._shares.take_row(request.input.tenant)
        self._num_masked += request.input.is_masked
        self._admissions.append(request.admission(self.cache.restored(request.id)))

    def _make_way(self) -> None:
        """Preempt a request of the tenant that holds the most, if a request of another tenant waits for a row or for
        pages. Nothing is preempted if the two tenants would only swap places. The request with tenure is never
        preempted; if it lacked pages, another request is preempted for it."""
        waiting = self._waiting.tenants
        others = [request for request in self._running if request is not self._tenure.holder]
        if not others or len(waiting.keys() | self._shares.rows.keys()) < 2:
            return
        if self._tenure.is_short:
            self._give_way(least_important(others, others, self._waiting.rank))
        elif waiting and not self._free_rows:
            giver = self._shares.row_giver(waiting)
            own = [request for request in others if request.input.tenant == giver]
            if giver is not NO_TENANT and own:
                self._give_way(least_important(own, own, self._waiting.rank))
        elif waiting:
            self._make_way_for_pages(waiting, others)

    def _make_way_for_pages(self, waiting: Mapping[Tenant, int], others: Sequence[Request]) -> None:
        held = held_tokens(self._running)
        tenant = min(waiting, key=lambda each: held[each])
        request = self._waiting.next_of(tenant)
        victim = least_important(others, self._running, self._waiting.rank)
        giver = victim.input.tenant
        if giver == tenant or held[giver] - victim.covered < held[tenant] + len(request.token_ids):
            return
        start = self._find_start(request, self.stats.num_steps)
        if not (self._tenure.keeps_out(request, self._waiting) or start.must_wait or self.cache.can_start(start)):
            self._give_way(victim)

    def _give_way(self, request: Request) -> None:
        """Preempt this request to make room for other requests."""
        if len(self._shares.rows) > 1 or any(tenant != request.input.tenant for tenant in self._waiting.tenants):
            self._tenure.give_way(request)
        self._preempt(request)

    def _has_room(self, request: Request, bound: int, batch: BatchBuilder) -> bool:
        """Whether the request has pages up to the length `bound`, or gets them now."""
        return bound + self.cache.lookahead <= request.covered or self._make_room(request, bound, batch)

    def _make_room(self, request: Request, bound: int, batch: BatchBuilder) -> bool:
        """Get pages for the request up to the length `bound`. Returns False if it must wait. If pages are short, the
        request waits for results in flight; without any, the least important request is preempted, perhaps this one.
        The request with tenure is not preempted: it waits for the next step, and another one is preempted for it."""
        target, holder = Bound(bound), self._tenure.holder
        while not self.cache.reserve(request.id, target):
            if request is holder:
                self._tenure.lack()
            if self._in_flight:
                return False
            scheduled = batch.request_ids
            left = [r for r in self._running if r.id not in scheduled and r is not holder]
            if not left and len(self._running) > 1:
                return False
            victim = least_important(left or [request], self._running, self._waiting.rank)
            self._give_way(victim)
            if victim is request:
                return False
        request.covered = self.cache.covered(request.id)
        return True

    def _preempt(self, request: Request) -> None:
        """Free the row and pages of a request and publish its checkpoints. The request waits, and is computed again
        from its settled tokens."""
        self.cache.retire(request.id, request.token_ids, request.settled, request.folded, is_exact=False)
        self._give_up_row(request)

    def _give_up_row(self, request: Request) -> None:
        """Free the row and pages of a request without publishing its checkpoints. The request waits, and is computed
        again from its settled tokens."""
        self.stats.num_preemptions += 1
        request.stats.num_preemptions += 1
        self._release(request)
        request.state = State.WAITING
        self._waiting.push(request)

    def _start_again(self, request: Request) -> None:
        """Restart a request that began from pages or a state which another request was still computing, because these
        turned out wrong. From now on the request begins only from finished pages and states."""
        request.shares_promises = False
        self.stats.num_restarts += 1
        self._give_up_row(request)

    def _try_suspects(self, is_new: bool = False) -> None:
        """Preempt and hold back the requests that are not on trial. Called before a step, and after a failed step
        (`is_new`)."""
        computed = {request.id: request.settled.at_least for request in self._requests.values()}
        if not (self._suspects.clear(computed) or is_new):
            return
        on_trial = self._suspects.on_trial
        for request in [r for r in self._running if r.id not in on_trial]:
            self._preempt(request)
        self._waiting.hold_back_all_but(on_trial)
        self._overdue.forget_all()  # it may be held back

    def _finish_batch(self, batch: BatchBuilder, started: Sequence[Request]) -> ScheduledBatch | None:
        if batch.is_empty and not self.cache.has_orders:
            if not (self._in_flight or self._size.is_whole):  # what waits may need a larger step
                self._size.grow()
            return None
        # After everyone has pages to run, and before those that are read in this step are let go.
        step = self.stats.num_steps
        checkpoints = self.cache.grant_checkpoints(step, batch.progress) if self.cache.takes_checkpoints else []
        folds = self.cache.take_folds(step)
        cache = CacheOrders(self.cache.take_changes(), checkpoints, folds, batch.num_pending, self.cache.shares_pages)
        drafting = self.speculation.take_orders(batch, started)
        form = batch.form if self._num_masked else StepForm.WHOLE
        scheduled = batch.build(self._admissions, cache, drafting, form, self._resources.take_orders())
        self._admissions = []
        self._in_flight[scheduled.step] = scheduled
        self.stats.num_steps += 1
        self.stats.max_steps_in_flight = max(self.stats.max_steps_in_flight, len(self._in_flight))
        return scheduled

    # Inside: after a result

    def _settle(self, request: Request, part: RequestResult) -> None:
        """Publish and drop pages according to the request's new settled length, and end the request if the result says
        so."""
        settled = request.settled
        if settled.at_least >= request.next_event and part.finish is not Finish.ERROR:  # then it may hold NaN
            request.next_event = self.cache.settle(request.id, settled, request.token_ids)
        if part.finish:
            request.error = part.error
            self._end(request, part.finish, early=False)

    def _end(self, request: Request, finish: Finish, early: bool = True) -> None:
        request.finish = finish
        if request.state is State.RUNNING:
            if finish is not Finish.ERROR:  # pages that a failed step wrote are not published
                is_exact = not early or request.unsettled == 0
                self.cache.retire(request.id, request.token_ids, request.settled, request.folded, is_exact=is_exact)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.state = State.FINISHED
        self._overdue.forget(request)
        self.cache.forget(request.id)
        del self._requests[request.id]
        self._waiting.forget(request)
        self._tenure.forget(request)
        self._suspects.forget(request.id)
        self.speculation.end(request)
        if early:
            self._ended_early.append(request)

    def _release(self, request: Request) -> None:
        self.cache.free(request.id)
        self._running.remove(request)
        self._shares.give_row(request.input.tenant)
        self._num_masked -= request.input.is_masked
        self._resources.give(request.input)
        self._free_rows.append(request.row)
        self.speculation.leave_row(request)
        # The row may be taken again in this very batch: nothing of its former owner must reach the device later.
        self._admissions = [a for a in self._admissions if a.row != request.row]
        request.leave_row()
