"""TimedEngine: runs chosen batches on a real engine, and records when steps are submitted and when their results
arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.core import SamplingParams, ScheduledBatch, StepResult
from outrider.engine.assembly import engine_around
from outrider.engine.engine import Engine
from outrider.runner.commands import Answer, Command, Errand
from outrider.runner.interface import FixedDrafting, NoDrafting, RunningWorker, UnboundedSteps

LOWEST_ID, HIGHEST_ID = 100, 30000
PROMPT_BACKGROUND = 32  # answer tokens of the requests that decode while prompts are measured


@dataclass
class ObservedStep:
    """One step: its batch, and its times in seconds on one clock."""

    batch: ScheduledBatch
    submitted: float  # the call of `submit` began
    waited_from: float = 0.0  # the engine began to wait for the result
    done: float = 0.0  # the result was there

    @property
    def only_decodes(self) -> bool:
        return all(self.batch.samples) and max(self.batch.num_known) == 1 and not self.batch.admissions


class _TimedResult(Future[StepResult]):
    def __init__(self, step: ObservedStep, future: Future[StepResult]) -> None:
        super().__init__()
        self._step, self._future = step, future

    def result(self, timeout: float | None = None) -> StepResult:
        self._step.waited_from = time.perf_counter()
        result = self._future.result(timeout)
        self._step.done = time.perf_counter()
        return result


class TimedRunner:
    """A worker that times its steps. Each step has a fixed number of drafts, and as many prompt tokens as fit."""

    def __init__(self, worker: RunningWorker, num_drafts: int) -> None:
        self._worker = worker
        drafting = FixedDrafting(num_drafts) if worker.info.limits.max_drafts else NoDrafting()
        self.info = replace(worker.info, drafting=drafting, prompt_steps=UnboundedSteps())
        self.steps: list[ObservedStep] = []

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        step = ObservedStep(batch, time.perf_counter())
        self.steps.append(step)
        return _TimedResult(step, self._worker.submit(batch))

    def command(self, command: Command[Answer]) -> Future[Answer]:
        return self._worker.command(command)

    def begin(self, errand: Errand) -> Future[None]:
        return self._worker.begin(errand)

    def idle(self, quiet_seconds: float) -> float | None:
        return self._worker.idle(quiet_seconds)

    def close(self) -> None:
        """Do nothing: the worker serves other engines after this one."""


class Pace(NamedTuple):
    """The median times of consecutive steps."""

    interval: float  # seconds between two results
    host: float  # seconds of an interval in which the engine's thread did not wait for the device

    @classmethod
    def from_steps(cls, steps: list[ObservedStep]) -> Pace:
        pairs = list(zip(steps, steps[1:], strict=False))
        return cls(median(now.done - before.done for before, now in pairs),
                   median(now.waited_from - before.done for before, now in pairs))


class TimedEngine:
    """An engine around a worker that serves no other requests during the measurement."""

    def __init__(self, config: EngineConfig, worker: RunningWorker, num_drafts: int, seed: int = 0) -> None:
        self._runner = TimedRunner(worker, num_drafts)
        self.engine: Engine = engine_around(config, self._runner)
        self.num_drafts = num_drafts
        self.engine.scheduler.cache.mark_all_unclean()  # an engine before this one may have written any page
        self.limits, self._num_pages = worker.info.limits, worker.info.num_pages
        self._source = Random(f"{seed} {num_drafts}")
        self._num_added = 0
        self._contexts: list[list[int]] = []  # of requests that decode while prompts are measured

    def prompt(self, length: int) -> list[int]:
        highest = min(HIGHEST_ID, self.limits.vocab_size - 1)
        return self._source.choices(range(min(LOWEST_ID, highest // 2), highest + 1), k=length)

    def decode_pace(self, prompts: list[list[int]], num_steps: int) -> Pace:
        """Measure the pace of `num_steps` consecutive steps in which all prompts decode."""
        self._runner.steps.clear()
        self._add(prompts, self._answer_len([len(prompt) for prompt in prompts], num_steps + 8))
        while len(self._decoding(len(prompts))) < num_steps + 2:
            self._check_work()
            self.engine.step()
        steps = self._decoding(len(prompts))[2:]  # the first ones may still wait for the prompts before them
        self.engine.abort_all()
        while self.engine.has_work:
            self.engine.step()
        return Pace.from_steps(steps)

    def _check_work(self) -> None:
        """Raise an error if requests end, or preempt one another, before all of them have decoded together."""
        if not self.engine.has_work:
            raise ValueError(f"the cache is too small for the measured steps: it has {self._num_pages} pages for all "
                             f"requests, and a request has at most {self.limits.max_len} tokens. Raise num_pages or "
                             "max_model_len")

    def _answer_len(self, lengths: Sequence[int], num_steps: int) -> int:
        """The length of answers, in tokens, with which all of these prompts decode together for `num_steps` steps.
        Early prompts may decode while late prompts are still computed."""
        free = max(1, self.limits.max_batched_tokens - len(lengths) * (1 + self.limits.max_drafts))
        return (num_steps + -(-sum(lengths) // free)) * (1 + self.limits.max_drafts)

    def _add(self, prompts: Sequence[list[int]], output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, seed=0)
        checked = self.engine.checks.check_all([{"prompt_token_ids": prompt} for prompt in prompts],
                                               [params] * len(prompts), [0] * len(prompts))
        self.engine.add({f"costs-{self._num_added + index}": one for index, one in enumerate(checked)})
        self._num_added += len(prompts)

    def prompt_seconds(self, lengths: Sequence[int], contexts: Sequence[int]) -> Pace:
        """Measure the pace of a step that computes new prompts of these lengths. Other requests with contexts of the
        given lengths decode meanwhile, so that the device is not idle before the step."""
        self._runner.steps.clear()
        while len(self._contexts) < len(contexts):
            self._contexts.append(self.prompt(self.limits.max_len))
        # The same contexts every time, which the prefix cache then has.
        self._add([own[:length] for own, length in zip(self._contexts, contexts, strict=False)],
                  self._answer_len(contexts, PROMPT_BACKGROUND))
        while len(self._decoding(len(contexts))) < 2:
            self._check_work()
            self.engine.step()
        num_before = len(self._runner.steps)
        self._add([self.prompt(length) for length in lengths], 1)
        while not any(step.done for step in self._runner.steps[num_before:]):
            self.engine.step()
        pace = Pace.from_steps([step for step in self._runner.steps[: num_before + 1] if step.done][-2:])
        self.engine.abort_all()
        while self.engine.has_work:
            self.engine.step()
        return pace

    def lone_seconds(self, length: int) -> float:
        """Measure the seconds from the submission of a step with one new prompt to its result, while nothing else
        runs."""
        self._runner.steps.clear()
        self._add([self.prompt(length)], 1)
        while self.engine.has_work:
            self.engine.step()
        step = self._runner.steps[0]
        return step.done - step.submitted

    def start_seconds(self) -> float:
        """Measure the seconds from the arrival of a request to its first step, while nothing else runs."""
        arrived = time.perf_counter()
        self.lone_seconds(PROMPT_BACKGROUND)
        return self._runner.steps[0].submitted - arrived

    def _decoding(self, num_requests: int) -> list[ObservedStep]:
        return [step for step in self._runner.steps
                if step.done and step.batch.num_requests == num_requests and step.only_decodes]

    def close(self) -> None:
        self.engine.close()
