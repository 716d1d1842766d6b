"""Engine: the loop that schedules a step, runs it, updates the scheduler and emits outputs. The next step may be
scheduled before the last one's result is read.

The engine owns a checked request from its arrival to its last token. It exchanges only plain data with the scheduler
and the runner; a runner may live in another thread or process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from outrider.core import Finish
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import ResultPart
from outrider.core.outputs import OutputIncrement
from outrider.engine.collector import unfreeze_heap, working_thresholds
from outrider.engine.live_requests import LiveRequests
from outrider.engine.pause import Pause
from outrider.engine.request_checks import RequestChecks
from outrider.engine.stats import EngineStats
from outrider.engine.step_watcher import StepWatcher, UntracedSteps
from outrider.engine.worker_line import EngineError, WorkerLine
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import Runner, StepOutOfMemory, WorkerDied
from outrider.sched.scheduler import Scheduler
from outrider.sched.updates import Update

log = logging.getLogger("outrider")


class Engine:
    """Runs requests on a worker. Single-threaded: the one owner of the engine calls `add`, `step` and `abort`."""

    def __init__(self, make_scheduler: Callable[[int], Scheduler], worker: WorkerLine, checks: RequestChecks,
                 requests: LiveRequests, stats: EngineStats, *, watchers: Sequence[StepWatcher] = (),
                 submits_early: bool = False) -> None:
        """make_scheduler: makes a scheduler whose steps have the given generation. submits_early: whether the next step
        is queued before the tokens of the last step are delivered."""
        self._requests, self.keepers = requests, requests.keepers
        self._make_scheduler, self._watchers = make_scheduler, tuple(watchers)
        self.scheduler = self._watched_scheduler(0)
        self.worker = worker
        self.checks, self.model, self.limits = checks, checks.model, checks.model.limits
        worker.on_death = self.keepers.close
        self.stats = stats
        self.trace = UntracedSteps()  # a StepTrace, set before the first step, traces some steps
        self._submits_early = submits_early and self.limits.steps_in_flight == 1
        self._held: list[OutputIncrement] = []  # what `rest` and aborts of a paused engine added to requests
        self.pause = Pause()
        self.reports: dict[type, ResultPart] = {}  # the last that features told, by type

    @property
    def runner(self) -> Runner:
        return self.worker.runner

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights that were completed."""
        return self._requests.weights_version

    @property
    def has_ended(self) -> bool:
        return self.worker.has_ended

    @property
    def is_forked(self) -> bool:
        """Whether this object is an engine's copy in a forked process, which cannot be used."""
        return self.worker.is_forked

    @property
    def has_work(self) -> bool:
        if self.pause.is_on:
            return bool(self._held)
        return bool(self._requests) or self.worker.num_in_flight > 0 or self.scheduler.has_work or bool(self._held)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has been added and has not ended."""
        return request_id in self._requests

    def check_running(self) -> None:
        """Raise an error with the reason if no step can run any more."""
        self.worker.check()

    # Requests

    def add(self, requests: Mapping[str, CheckedRequest]) -> dict[str, CheckedRequest]:
        """Queue requests, given by id. If any is refused with a ValueError, none is added. Returns the requests with
        the seeds that were drawn for them."""
        self.check_running()
        self.pause.admit_requests()
        seeded = self._requests.add(requests, self.scheduler)
        for asked in seeded.values():
            self.stats.add(len(asked.token_ids), asked.num_samples)
        return seeded

    def resume(self, request_id: str, queued: CheckedRequest, known: dict[int, list[int]]) -> dict[int, str]:
        """Add a request again after `reset`. `known`: for each sample that has not ended, the tokens that the caller
        already has. Returns the text of these tokens by sample."""
        return self._requests.resume(request_id, queued, known, self.scheduler)

    def abort(self, request_id: str) -> None:
        for request in self._requests.samples_of(request_id):
            self.scheduler.end(request.id, Finish.ABORT)
        if self.pause.is_on:
            self._end_early(self._held)

    def settle(self) -> None:
        """Wait for the steps in flight. The next `step` returns their outputs, and the ends of requests that were
        aborted before."""
        self.check_running()
        while self.worker.num_in_flight:
            self._requests.emit(self._take_result(), self.scheduler, self._held)
        self._end_early(self._held)

    def abort_all(self, matches: Callable[[str], bool] = lambda request_id: True) -> int:
        """Abort all requests whose ids match, and return how many there were."""
        found = [request_id for request_id in self._requests if matches(request_id)]
        for request_id in found:
            self.abort(request_id)
        return len(found)

    def rest(self) -> None:
        """Bring the engine to rest, because the content of the device's memory is about to change: wait for the steps
        in flight, preempt all requests and empty the cache. The next `step` returns the outputs of the steps in
        flight."""
        self.settle()
        self.scheduler.preempt_all()
        self.scheduler.cache.forget_all()
        self._end_early(self._held)
        self._flush()

    def take_new_weights(self) -> None:
        """Raise the version of the weights by one, after `rest` and a complete update. Cached pages of older weights
        are no longer prefix hits, and outputs say which tokens come from which version."""
        self._requests.use_weights(self.weights_version + 1)
        self.scheduler.cache.use_weights(self.weights_version)

    def forget_cached(self) -> bool:
        """Forget the cached pages that no request holds. Returns True if no page is left that a prefix hit could
        find."""
        self.check_running()
        is_empty = self.scheduler.cache.forget_cached()
        self._flush()
        return is_empty

    def order(self, command: Command[Answer]) -> Future[Answer]:
        """Have the worker carry out a command, and return a future of the answer; steps go on meanwhile."""
        return self.worker.order(command)

    def command(self, command: Command[Answer]) -> Answer:
        """Have the worker carry out a command, and wait for its answer."""
        return self.worker.command(command)

    def reset(self) -> None:
        """Forget all requests, steps and pages. Called after an interrupt, which may have left their state
        inconsistent. The worker runs steps in order: a step that it may still be computing comes before the first step
        of the new generation and is forgotten with it. Afterwards `resume` adds requests again, and `drop_unused` drops
        the data that features keep for all other requests."""
        scheduler = self._watched_scheduler(self.scheduler.generation + 1)
        scheduler.cache.mark_all_unclean()
        self.worker.forget()
        self.scheduler, self._held = scheduler, []
        self._requests.forget()
        self._flush()

    def drop_unused(self) -> None:
        """Drop the data that features keep for requests that are gone. Called after `reset`, when `resume` has added
        the requests that are still wanted."""
        self.keepers.drop_unused()

    # One step

    def step(self) -> list[OutputIncrement]:
        """Queue a step or read the result of one, or both. Returns the tokens and texts that were added to requests,
        and the ends of requests."""
        self.check_running()
        working_thresholds.begin(self)
        depth = self.limits.steps_in_flight
        is_submitted = self.worker.num_in_flight < depth and self._submit()
        increments, self._held = self._held, []
        if self.worker.num_in_flight and (not is_submitted or self.worker.num_in_flight >= depth):
            updates = self._take_result()
            if self._submits_early:  # what the last step yielded goes out while the next one runs
                self._submit()
            self._requests.emit(updates, self.scheduler, increments)
        self._end_early(increments)
        self._flush()
        if not self.has_work:
            working_thresholds.end(self)
        return increments

    def idle(self, quiet_seconds: float) -> float | None:
        """Let the worker prepare for later steps while there is no work. Returns the seconds after which to call again,
        or None if that makes sense only after further steps. quiet_seconds: how long there has been no work."""
        return self.runner.idle(quiet_seconds)

    def close(self) -> None:
        """Wait for the steps in flight and end the engine. Requests that still run are never answered."""
        if self.is_forked:
            return
        self.worker.end(EngineError("the engine was closed: start a new one"))
        self.close_watchers()
        self.keepers.close()
        self.runner.close()
        working_thresholds.end(self)
        unfreeze_heap(self)  # what start-up made may be garbage from now on

    def close_watchers(self) -> None:
        """Close the step watchers, which frees resources that another engine may need, such as the addresses for cache
        events."""
        watchers, self._watchers = self._watchers, ()
        for watcher in watchers:
            watcher.close()

    # Inside

    def _submit(self) -> bool:
        """Schedule and queue the next step. Returns False if there is nothing to compute or the engine may not run
        steps."""
        if not self.worker.takes_steps or self.pause.is_on:
            return False
        batch = self.trace.schedule(self.scheduler)
        if batch is None:
            return False
        self.stats.observe_batch(batch)
        self._requests.stamp_admissions(batch)
        self.worker.submit(batch)
        return True

    def _take_result(self) -> list[Update]:
        try:
            result = self.worker.take_result()
        except WorkerDied:
            raise
        except Exception as error:  # whatever a step died of, it is not the end of the engine
            self._recover(error)
            return []
        self.stats.observe_step(result)
        if result.drafting is not None:
            self.reports |= {type(report): report for report in result.drafting.reports}
        self.trace.finish(result)
        updates = self.scheduler.update(result, self.worker.seconds_since_last(has_requests=bool(self._requests)))
        self.stats.observe_runs([part for _, part in updates])
        return updates

    def _recover(self, error: Exception) -> None:
        """Go on after a failed step: wait for the steps behind it, then let the scheduler compute the requests
        again."""
        log.error("a step failed", exc_info=error)
        self.worker.drain()
        self.scheduler.recover(f"a step failed: {error!r}", lacked_memory=isinstance(error, StepOutOfMemory))

    def _end_early(self, increments: list[OutputIncrement]) -> None:
        self._requests.end(self.scheduler.take_ended_early(), increments)

    def _flush(self) -> None:
        for watcher in self._watchers:
            watcher.flush()

    def _watched_scheduler(self, generation: int) -> Scheduler:
        scheduler = self._make_scheduler(generation)
        scheduler.cache.use_weights(self.weights_version)
        for watcher in self._watchers:
            watcher.follow(scheduler)
        return scheduler
