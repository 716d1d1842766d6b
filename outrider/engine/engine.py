"""The loop: schedule, step, update, emit, with the next step scheduled before the last one's result is read.

Owns the life of a request from its arrival, checked, to its last run. Knows scheduler and runner by their data only; a
runner may live in another thread or process.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from outrider.core import FaultRecord, Finish, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import ResultPart
from outrider.core.lazy_exports import LateModule
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleKey
from outrider.core.params import request_seed
from outrider.core.pooling_params import PoolingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.engine.collector import unfreeze_heap, working_thresholds
from outrider.engine.output import PromptLogprobsOutput, SampleOutput
from outrider.engine.request_checks import RequestChecks
from outrider.engine.stats import EngineStats, StatsLog, stamp_admissions
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import Runner, WorkerDied
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.sched.updates import Update

if TYPE_CHECKING:
    from outrider.engine import pooling
    from outrider.engine.kv_events import KvEvents
    from outrider.engine.pooling import PooledOutput
    from outrider.engine.step_trace import StepTrace
else:
    pooling = LateModule("outrider.engine.pooling")

log = logging.getLogger("outrider")


class EngineError(RuntimeError):
    """The engine has failed or was shut down; no request can be served any more. The cause is chained."""


@dataclass(slots=True)
class _Live:
    """A request that the caller knows, with its n samples."""

    request_id: str
    metrics: RequestMetrics
    asked: CheckedRequest
    samples: list[tuple[Request, SampleOutput | PooledOutput]]
    prompt_logprobs: PromptLogprobsOutput | None
    num_left: int  # samples that have not ended


class Engine:
    """Runs requests on a worker. Single-threaded: one owner calls `add`, `step` and `abort`."""

    def __init__(self, make_scheduler: Callable[[int], Scheduler], runner: Runner, checks: RequestChecks, *,
                 seed: int = 0, submits_early: bool = False, host_faults: FaultRecord | None = None,
                 kv_events: KvEvents | None = None) -> None:
        """make_scheduler: for steps from a generation on. submits_early: with one step in flight, the next one is
        queued before the last one's tokens go out. host_faults: of the schedulers' host drafters."""
        self.checks, self.model, limits = checks, checks.model, checks.model.limits
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler(0)
        self.runner = runner
        self.limits = limits
        self.stats = EngineStats()
        self.trace: StepTrace | None = None  # set before the first step, to trace some steps
        self._stats_log = StatsLog(self.stats) if limits.max_drafts else None
        self._host_faults = host_faults
        self.kv_events = kv_events
        self.keepers = RequestKeepers()  # of features; set before the first request
        self._seed = seed
        self._submits_early = submits_early and limits.steps_in_flight == 1
        self._ids = count()
        self._num_accepted = 0  # requests, with a seed or without: what the seed of the next one is drawn from
        self._live: dict[str, _Live] = {}
        self._samples: dict[int, tuple[_Live, SampleOutput | PooledOutput]] = {}  # by the scheduler's request id
        self._in_flight: deque[Future[StepResult]] = deque()
        self._last_end: float | None = None  # when the last step ended, if requests were left
        self._is_step_missing = False  # the last one in flight never reached the worker
        self._held: list[OutputIncrement] = []  # what `rest` and aborts of a paused engine added to requests
        self.paused_because: str | None = None  # why no step may run for now: see `engine.maintenance`
        self.sleep_level = 0  # 0 while awake
        self.reports: dict[type, ResultPart] = {}  # the last that features told, by type
        self._error: EngineError | WorkerDied | None = None  # why no step can run any more
        self._process_id = os.getpid()

    @property
    def has_ended(self) -> bool:
        return self._error is not None or self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of an engine in a forked process. The worker and all threads stayed in the other
        process."""
        return os.getpid() != self._process_id

    @property
    def has_work(self) -> bool:
        if self.paused_because is not None:
            return bool(self._held)
        return bool(self._live) or bool(self._in_flight) or self.scheduler.has_work or bool(self._held)

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has been added and has not ended."""
        return request_id in self._live

    # Requests

    def add(self, requests: Mapping[str, CheckedRequest]) -> dict[str, CheckedRequest]:
        """Queue requests, by id, atomically: if one is refused, with a ValueError, none is added. Returns the requests
        with the seeds that were drawn for them."""
        self.check_running()
        for request_id in requests:
            if request_id in self._live:
                raise ValueError(f"request id {request_id!r} is in use")
        requests = self.keepers.renew(requests)
        seeded = {request_id: asked.with_seed(request_seed(self._seed, self._num_accepted + index))
                  for index, (request_id, asked) in enumerate(requests.items())}
        self._enter([self._new_live(request_id, asked) for request_id, asked in seeded.items()])
        self._num_accepted += len(seeded)
        for asked in seeded.values():
            self.stats.add(len(asked.token_ids), asked.num_samples)
        return seeded

    def resume(self, request_id: str, queued: CheckedRequest, known: dict[int, list[int]]) -> dict[int, str]:
        """Go on with a request after `reset`. `known`: the first tokens of those of its samples that have not ended.
        Returns their texts so far."""
        live = self._new_live(request_id, queued)
        live.samples = [own for own in live.samples if own[0].sample_index in known]
        live.num_left = len(known)
        texts = {}
        for request, sample in live.samples:
            index = request.sample_index
            request.token_ids += known[index]
            texts[index] = sample.replay(known[index])
        self._enter([live] if known else [])
        return texts

    def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        for request, _ in live.samples if live else []:
            self.scheduler.end(request.id, Finish.ABORT)
        if self.paused_because is not None:
            self._end_early(self._held)

    def settle(self) -> None:
        """Wait for the steps in flight. The next `step` returns what they added to requests."""
        self.check_running()
        while self._in_flight:
            for update in self._take_result():
                self._emit(update, self._held)

    def abort_all(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    def rest(self) -> None:
        """Wait for the steps in flight, preempt all requests and empty the cache: what the device holds is about to be
        changed. The next `step` returns what these steps added to requests."""
        self.settle()
        self.scheduler.preempt_all()
        self.scheduler.cache.forget_all()
        self._end_early(self._held)
        self._publish_events()

    def forget_cached(self) -> bool:
        """Forget cached pages that no request holds. Returns whether no page can be found any more."""
        self.check_running()
        is_empty = self.scheduler.cache.forget_cached()
        self._publish_events()
        return is_empty

    def order(self, command: Command[Answer]) -> Future[Answer]:
        """Have the worker carry out a command; steps go on meanwhile."""
        self.check_running()
        return self.runner.command(command)

    def command(self, command: Command[Answer]) -> Answer:
        """Have the worker carry out a command, and wait for its answer."""
        self.check_running()
        try:
            return self.runner.command(command).result()
        except WorkerDied as error:
            self._error = WorkerDied(f"the engine has ended: {error}")
            raise

    def reset(self) -> None:
        """Forget all requests, steps and pages, whatever state they are in: after an interrupt, which may have landed
        on any line. The worker runs steps in their order, so what it may still be computing comes before the first step
        of the new generation and is forgotten with it. `resume` brings requests back, then `drop_unused`
        follows: until then features keep what requests had."""
        scheduler = self._make_scheduler(self.scheduler.generation + 1)
        scheduler.cache.mark_all_unclean()
        self._in_flight, self._live, self._samples, self._held = deque(), {}, {}, []
        self._last_end = None
        self._is_step_missing, self.scheduler = False, scheduler
        self.keepers.forget_requests()
        self._publish_events()

    def drop_unused(self) -> None:
        """After `reset`, and `resume` of the requests that are still wanted."""
        self.keepers.drop_unused()

    # One step

    def step(self) -> list[OutputIncrement]:
        """Advance by one step; returns what it added to requests, and the ends of requests."""
        self.check_running()
        working_thresholds.begin(self)
        depth = self.limits.steps_in_flight
        is_submitted = len(self._in_flight) < depth and self._submit()
        increments, self._held = self._held, []
        if self._in_flight and (not is_submitted or len(self._in_flight) >= depth):
            updates = self._take_result()
            if self._submits_early:  # what the last step yielded goes out while the next one runs
                self._submit()
            for update in updates:
                self._emit(update, increments)
        if self._stats_log is not None:
            self._stats_log.tick()
        self._end_early(increments)
        self._publish_events()
        if not self.has_work:
            working_thresholds.end(self)
        return increments

    def idle(self, quiet_seconds: float) -> float | None:
        """Let the worker prepare for later steps, when there was no work for so many seconds. See `Runner.idle`."""
        return self.runner.idle(quiet_seconds)

    def close(self) -> None:
        """Waits for the steps in flight. Requests that still run are never answered."""
        if self.is_forked:
            return
        if self._error is None:
            self._error = EngineError("the engine was closed")
        if self._stats_log is not None:
            self._stats_log.close()
            self._stats_log = None
        self.runner.close()
        self.close_events()
        working_thresholds.end(self)
        unfreeze_heap(self)  # what start-up made may be garbage from now on

    def close_events(self) -> None:
        """Give up the addresses where events of the cache are published: another engine may take them."""
        if self.kv_events is not None:
            self.kv_events.close()

    # Inside

    def _submit(self) -> bool:
        """Schedule and queue the next step, if there is anything to compute."""
        if self._is_step_missing or self.paused_because is not None:
            return False
        batch = self.scheduler.schedule() if self.trace is None else self.trace.schedule(self.scheduler)
        if batch is None:
            return False
        self.stats.observe_batch(batch)
        if batch.admissions:
            stamp_admissions(batch, lambda request_id: self._samples[request_id][0].metrics)
        try:
            future = self.runner.submit(batch)
        except Exception as error:  # it has not reached the worker, which must not go on without it
            future = Future()
            future.set_exception(error)
            self._is_step_missing = True
        self._in_flight.append(future)
        return True

    def _take_result(self) -> list[Update]:
        try:
            result = self._in_flight[0].result()
        except WorkerDied as error:
            self._error = WorkerDied(f"the engine has ended: {error}")
            raise
        except Exception as error:  # whatever a step died of, it is not the end of the engine
            self._recover(error)
            return []
        self._in_flight.popleft()
        self.stats.observe_step(result)
        if result.drafting is not None:
            self.reports |= {type(report): report for report in result.drafting.reports}
        if self._host_faults is not None:
            self.stats.observe_faults(self._host_faults.take())
        if self.trace is not None:
            self.trace.finish(result)
        updates = self.scheduler.update(result, self._seconds_since_last())
        self.stats.observe_runs([part for _, part in updates])
        return updates

    def _seconds_since_last(self) -> float | None:
        """Called when a step has ended: the time since the one before it did, if requests were there since then."""
        now, last = time.perf_counter(), self._last_end
        self._last_end = now if self._live else None
        return None if last is None else now - last

    def _recover(self, error: Exception) -> None:
        """Called when a step has failed. Waits for the steps after it, which are cancelled or have no effect; then the
        scheduler begins again."""
        log.error("a step failed", exc_info=error)
        self._last_end = None
        while self._in_flight:
            try:
                self._in_flight.popleft().result()
            except WorkerDied as death:
                self._error = WorkerDied(f"the engine has ended: {death}")
                raise
            except Exception:  # cancelled, or failed too: the first failure counts
                continue
        self._is_step_missing = False
        self.scheduler.recover(f"a step failed: {error!r}")

    def _publish_events(self) -> None:
        if self.kv_events is not None:
            self.kv_events.flush()

    def check_running(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self.is_forked:
            raise EngineError(f"the engine belongs to process {self._process_id}, from which this one was forked: "
                              "start an engine in this process, or ask the other one")

    def _new_live(self, request_id: str, asked: CheckedRequest) -> _Live:
        """Build the request and the objects that turn its tokens into outputs; nothing is registered yet."""
        params, prompt_len = asked.params, len(asked.token_ids)
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        if isinstance(params, PoolingParams):
            pooled = pooling.PooledOutput(SampleKey(request_id, 0, 0, metrics), params, prompt_len, self.model.classes)
            only = (Request(next(self._ids), asked, prompt_len), pooled)
            return _Live(request_id, metrics, asked, [only], None, 1)
        longest = self.model.longest(prompt_len, params.max_tokens)
        samples: list[tuple[Request, SampleOutput | PooledOutput]] = []
        for index in range(params.n):
            request = Request(next(self._ids), asked, longest, self.model.eos_ids, index)
            key = SampleKey(request_id, index, asked.seed, metrics)
            samples.append((request, SampleOutput(key, params, self.model.tokenizer)))
        prompt = None if params.prompt_logprobs is None else PromptLogprobsOutput(prompt_len, self.model.tokenizer)
        return _Live(request_id, metrics, asked, samples, prompt, params.n)

    def _enter(self, lives: Sequence[_Live]) -> None:
        """Register all requests atomically: if one is refused, none is added."""
        asked = [live.asked for live in lives]
        self.keepers.enter(asked)  # before the scheduler, which looks up what they keep
        try:
            self.scheduler.add(*(request for live in lives for request, _ in live.samples))
        except Exception:
            self.keepers.leave(*asked)
            raise
        self._live |= {live.request_id: live for live in lives}
        self._samples |= {request.id: (live, sample) for live in lives for request, sample in live.samples}

    def _emit(self, update: Update, increments: list[OutputIncrement]) -> None:
        request, result = update
        live, sample = self._samples[request.id]
        if result.run:
            if result.num_accepted:
                live.metrics.observe_drafts(result.num_accepted)
            if live.metrics.first_token_time is None:
                live.metrics.first_token_time = time.perf_counter()
        elif not result.finish and live.prompt_logprobs is None and result.hidden is None:
            return  # a part of its prompt was computed
        try:
            if live.prompt_logprobs is not None and result.prompt_logprobs and not request.sample_index:
                assert isinstance(sample, SampleOutput)
                entries = live.prompt_logprobs.take(result.epoch, result.prompt_logprobs)
                increments.append(sample.add_prompt_logprobs(entries))
            if result.run or result.finish or result.hidden is not None:
                increments.append(sample.take(result))
        except Exception as error:  # one request's text must not take its batch mates' tokens along
            log.exception("a request's output failed")
            increments.append(sample.end(Finish.ERROR, f"the output failed: {error!r}"))
        if result.finish:
            self._end(request, increments)
        elif sample.is_finished:  # though the device does not know
            self.scheduler.end(request.id, Finish.STOP)

    def _end_early(self, increments: list[OutputIncrement]) -> None:
        for request in self.scheduler.take_ended_early():
            self._end(request, increments)

    def _end(self, request: Request, increments: list[OutputIncrement]) -> None:
        live, sample = self._samples.pop(request.id)
        metrics, counted = live.metrics, request.stats
        if not sample.is_finished:
            increments.append(sample.end(request.finish, request.error))
        metrics.num_cached_tokens = max(metrics.num_cached_tokens, counted.num_hit_tokens)
        metrics.num_preemptions += counted.num_preemptions
        metrics.num_steps += counted.num_steps
        metrics.num_draft_tokens += counted.num_drafted
        metrics.num_accepted_tokens += counted.num_accepted
        live.num_left -= 1
        if not live.num_left:
            metrics.finished_time = time.perf_counter()
            self.keepers.leave(live.asked)
            del self._live[live.request_id]
