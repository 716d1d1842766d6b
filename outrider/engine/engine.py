"""The loop: schedule, step, update, emit, with the next step scheduled before the last one's result is read.

Owns the life of a request from its checks to its last run. Knows scheduler and runner by their data only; a runner
may live in another thread or process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from outrider.core import Finish, Limits, StepResult
from outrider.core.fields import Text, check_value, shown
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleKey
from outrider.core.params import MAX_LOGPROBS_ALL, Priority, SamplingParams, request_seed
from outrider.core.token_ids import check_token_ids
from outrider.engine.output import PromptLogprobsOutput, SampleOutput
from outrider.engine.stats import EngineStats, StatsLog
from outrider.engine.text import Tokenizer
from outrider.runner.interface import Runner, WorkerDied
from outrider.sched.request import Request, RequestInput
from outrider.sched.scheduler import Scheduler, Update

log = logging.getLogger("outrider")


class CheckedRequest(NamedTuple):
    """A request that the engine can serve."""

    token_ids: list[int]
    params: SamplingParams  # with their words as tokens
    priority: int
    cache_salt: str | None


@dataclass(slots=True)
class _Live:
    """A request the caller knows, over its n samples."""

    request_id: str
    metrics: RequestMetrics
    scheduler_ids: list[int]  # of its samples
    prompt_logprobs: PromptLogprobsOutput | None
    num_left: int  # samples that have not ended


class Engine:
    """Single-threaded: one owner calls `add`, `step` and `abort`."""

    def __init__(self, scheduler: Scheduler, runner: Runner, limits: Limits, *, tokenizer: Tokenizer | None = None,
                 eos_ids: tuple[int, ...] = (), seed: int = 0, max_logprobs: int = 20,
                 submits_early: bool = False) -> None:
        """submits_early: with one step in flight, the next one is queued before the last one's tokens go out."""
        self.scheduler = scheduler
        self.runner = runner
        self.limits = limits
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self._stats_log = StatsLog(self.stats) if limits.max_drafts else None
        self.eos_ids = eos_ids
        self._seed = seed
        self._max_logprobs = max_logprobs
        self._submits_early = submits_early and limits.steps_in_flight == 1
        self._ids = count()
        self._num_accepted = 0  # requests, with a seed or without: what the seed of the next one is drawn from
        self._live: dict[str, _Live] = {}
        self._samples: dict[int, tuple[_Live, SampleOutput]] = {}  # by the scheduler's request id
        self._in_flight: deque[Future[StepResult]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._live) or bool(self._in_flight) or self.scheduler.has_work

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has been added and has not ended."""
        return request_id in self._live

    def need_tokenizer(self, name: str) -> Tokenizer:
        """`name`: the model's, for the message where there is none."""
        if self.tokenizer is None:
            raise ValueError(f"{name} has no tokenizer files: give prompts as token ids")
        return self.tokenizer

    # Requests

    def add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, priority: int = 0,
            cache_salt: str | None = None) -> None:
        """Check and queue a request; raises ValueError, with nothing changed, if it cannot be served."""
        self.queue(request_id, self.check(prompt_token_ids, params, priority=priority, cache_salt=cache_salt))

    def queue(self, request_id: str, checked: CheckedRequest) -> None:
        """Raises ValueError, with nothing changed, if the id is in use or the pool too small."""
        check_value("request_id", Text, request_id)
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        token_ids, params, priority, cache_salt = checked
        seed = request_seed(self._seed, self._num_accepted) if params.seed is None else params.seed
        live = _Live(request_id, RequestMetrics(arrival_time=time.perf_counter()), [], None, params.n)
        for request in [self._new_request(token_ids, params, seed, i, priority, cache_salt) for i in range(params.n)]:
            self.scheduler.add(request)
            key = SampleKey(request_id, request.input.sample_index, seed, live.metrics)
            self._samples[request.id] = live, SampleOutput(key, params, self.tokenizer)
            live.scheduler_ids.append(request.id)
        if params.prompt_logprobs is not None:
            live.prompt_logprobs = PromptLogprobsOutput(len(token_ids), self._decode)
        self._live[request_id] = live
        self._num_accepted += 1
        self.stats.add(len(token_ids), params.n)

    def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        for scheduler_id in live.scheduler_ids if live else []:
            self.scheduler.end(scheduler_id, Finish.ABORT)

    def check(self, prompt_token_ids: list[int], params: SamplingParams, *, priority: int = 0,
              cache_salt: str | None = None) -> CheckedRequest:
        """Raises a ValueError that says what to change, if the request cannot be served."""
        limits = self.limits
        check_value("priority", Priority, priority)
        check_value("cache_salt", str | None, cache_salt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {shown(params)}")
        params = params.snapshot()
        if not prompt_token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt_token_ids) >= limits.max_len:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens and max_model_len is {limits.max_len}, which leaves no "
                "room for an answer: shorten the prompt or raise max_model_len"
            )
        for token in prompt_token_ids:
            if type(token) is not int:
                raise ValueError(f"prompt token ids must be integers, got {shown(token)}")
            if not 0 <= token < limits.vocab_size:
                raise ValueError(f"prompt token id {shown(token)} is outside the vocabulary of {limits.vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            most = limits.vocab_size if value == MAX_LOGPROBS_ALL else value
            if most is not None and most > self._max_logprobs:
                raise ValueError(f"{name}={value} exceeds max_logprobs={self._max_logprobs} of this engine")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        params = self._with_bad_word_ids(params)
        check_token_ids(params, self.eos_ids, limits)
        return CheckedRequest(prompt_token_ids, params, priority, cache_salt)

    # One step

    def step(self) -> list[OutputIncrement]:
        """Advance by one step; returns what it added to requests, and the ends of requests."""
        depth = self.limits.steps_in_flight
        is_submitted = len(self._in_flight) < depth and self._submit()
        increments: list[OutputIncrement] = []
        if self._in_flight and (not is_submitted or len(self._in_flight) >= depth):
            updates = self._take_result()
            if self._submits_early:  # what the last step yielded goes out while the next one runs
                self._submit()
            for update in updates:
                self._emit(update, increments)
        if self._stats_log is not None:
            self._stats_log.tick()
        for request in self.scheduler.take_ended_early():
            self._end(request, increments)
        return increments

    def close(self) -> None:
        with suppress(WorkerDied):  # its requests have heard of it, or nobody waits for them
            while self._in_flight:
                self._take_result()
        if self._stats_log is not None:
            self._stats_log.close()
        self.runner.close()

    # Inside

    def _submit(self) -> bool:
        """Schedule and queue the next step, if there is anything to compute."""
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        self.stats.observe_batch(batch)
        self._in_flight.append(self.runner.submit(batch))
        return True

    def _take_result(self) -> list[Update]:
        """Wait for the oldest step in flight. It leaves the queue only then: an interrupt must not lose it."""
        try:
            result = self._in_flight[0].result()
        except WorkerDied as error:
            while self._in_flight:
                self._in_flight.popleft()
                self.scheduler.fail_step(str(error))
            raise
        except Exception as error:  # whatever a step died of, it is the end of its requests and not of the engine
            log.exception("a step failed")
            self._in_flight.popleft()
            self.scheduler.fail_step(f"a step failed: {error!r}")
            return []
        self._in_flight.popleft()
        self.stats.observe_step(result)
        return self.scheduler.update(result)

    def _new_request(self, prompt: list[int], params: SamplingParams, seed: int, index: int, priority: int,
                     salt: str | None) -> Request:
        limit = self.limits.max_len if params.max_tokens is None else len(prompt) + params.max_tokens
        asked = RequestInput(params, min(limit, self.limits.max_len), seed, self.eos_ids, index, priority,
                             () if salt is None else (f"salt={salt}",))
        return Request(next(self._ids), prompt, asked)

    def _emit(self, update: Update, increments: list[OutputIncrement]) -> None:
        request, result = update
        live, sample = self._samples[request.id]
        if result.run:
            self.stats.observe(result)
            if result.num_accepted:
                live.metrics.observe_drafts(result.num_accepted)
            if live.metrics.first_token_time is None:
                live.metrics.first_token_time = time.perf_counter()
        elif not result.finish and live.prompt_logprobs is None:
            return  # a part of its prompt was computed
        try:
            if live.prompt_logprobs is not None and result.prompt_logprobs and not request.input.sample_index:
                entries = live.prompt_logprobs.take(result.epoch, result.prompt_logprobs)
                increments.append(sample.add_prompt_logprobs(entries))
            if result.run or result.finish:
                increments.append(sample.take(result))
        except Exception as error:  # one request's text must not take its batch mates' tokens along
            log.exception("a request's output failed")
            increments.append(sample.end(Finish.ERROR, f"the output failed: {error!r}"))
        if result.finish:
            self._end(request, increments)
        elif sample.is_finished:  # though the device does not know
            self.scheduler.end(request.id, Finish.STOP)

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
            del self._live[live.request_id]

    def _decode(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _with_bad_word_ids(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words or params.bad_words_token_ids:
            return params
        if self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this engine has none: use logit_bias, allowed_token_ids")
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            # At the start of a text and after a space a word has different tokens: forbid both.
            for text in (word.lstrip(), " " + word.lstrip()):
                words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        return replace(params, bad_words_token_ids=tuple(words))
