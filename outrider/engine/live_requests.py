"""LiveRequests: the requests of an engine, from their arrival to their last output.

LiveRequests makes an output object for each sample, gives it the results of every step, and keeps the metrics that the
caller gets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, TypeAlias, cast

from outrider.core import Finish, ScheduledBatch
from outrider.core.checked_request import CheckedRequest
from outrider.core.hidden_request import HiddenGatherer, HiddenTask
from outrider.core.lazy_exports import LateModule
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleKey
from outrider.core.params import request_seed
from outrider.core.request_keeper import RequestKeepers
from outrider.engine.output import SampleOutput
from outrider.engine.served_model import ServedModel
from outrider.engine.stats import stamp_admissions
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.sched.updates import Update

if TYPE_CHECKING:
    from outrider.core.sample_addition import AddingPart
    from outrider.engine import prompt_output
    from outrider.engine.prompt_output import PromptLogprobsOutput
else:
    prompt_output = LateModule("outrider.engine.prompt_output")

log = logging.getLogger("outrider")
OutputMaker: TypeAlias = SampleOutput | HiddenGatherer


@dataclass(slots=True)
class _Live:
    """A request that has not ended, with its n samples."""

    request_id: str
    metrics: RequestMetrics
    asked: CheckedRequest
    samples: list[tuple[Request, OutputMaker]]
    num_left: int  # samples that have not ended
    has_tokens: bool = False

    def begin_tokens(self) -> None:
        self.has_tokens = True
        self.metrics.first_token_time = time.perf_counter()

    def end_sample(self, request: Request) -> bool:
        """Add the steps and tokens of a sample that has ended to the metrics. Returns whether it was the request's last
        sample."""
        metrics, counted = self.metrics, request.stats
        metrics.num_cached_tokens = max(metrics.num_cached_tokens, counted.num_hit_tokens)
        metrics.num_preemptions += counted.num_preemptions
        metrics.num_steps += counted.num_steps
        metrics.num_draft_tokens += counted.num_drafted
        metrics.num_accepted_tokens += counted.num_accepted
        self.num_left -= 1
        if not self.num_left:
            metrics.finished_time = time.perf_counter()
        return not self.num_left


class LiveRequests:
    def __init__(self, model: ServedModel, keepers: RequestKeepers, seed: int = 0) -> None:
        """seed: the engine's seed, from which seeds are drawn for requests without one."""
        self.keepers = keepers
        self._model, self._seed = model, seed
        self._ids = count()
        self.weights_version = 0  # how many updates of weights were complete
        self._num_accepted = 0  # requests, with a seed or without: what the seed of the next one is drawn from
        self._live: dict[str, _Live] = {}
        self._samples: dict[int, tuple[_Live, OutputMaker]] = {}  # by the scheduler's request id
        self._prompts: dict[str, PromptLogprobsOutput] = {}  # of requests that have got rows of their prompts

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def samples_of(self, request_id: str) -> list[Request]:
        """Return the scheduler's requests for this request, one for each sample; none if it has ended."""
        live = self._live.get(request_id)
        return [request for request, _ in live.samples] if live else []

    # Arrival

    def add(self, requests: Mapping[str, CheckedRequest], scheduler: Scheduler) -> dict[str, CheckedRequest]:
        """Add all requests, or raise ValueError and add none. Returns the requests with the seeds that were drawn for
        them."""
        for request_id in requests:
            if request_id in self._live:
                raise ValueError(f"request id {request_id!r} is in use: choose another, or wait until that request has "
                                 "ended")
        requests = self.keepers.renew(requests)
        seeded = {request_id: asked.with_seed(request_seed(self._seed, self._num_accepted + index))
                  for index, (request_id, asked) in enumerate(requests.items())}
        self._enter([self._make(request_id, asked) for request_id, asked in seeded.items()], scheduler)
        self._num_accepted += len(seeded)
        return seeded

    def resume(self, request_id: str, queued: CheckedRequest, known: dict[int, list[int]],
               scheduler: Scheduler) -> dict[int, str]:
        """Add a request again after an interrupt, with the tokens that its caller already has. See `Engine.resume` for
        the arguments."""
        live = self._make(request_id, queued)
        live.samples = [own for own in live.samples if own[0].sample_index in known]
        live.num_left = len(known)
        texts = {}
        for request, sample in live.samples:
            index = request.sample_index
            request.token_ids += known[index]
            texts[index] = sample.replay(known[index])
        self._enter([live] if known else [], scheduler)
        return texts

    def stamp_admissions(self, batch: ScheduledBatch) -> None:
        """Note the time at which requests are scheduled for the first time."""
        if batch.admissions:
            stamp_admissions(batch, lambda request_id: self._samples[request_id][0].metrics)

    def _make(self, request_id: str, asked: CheckedRequest) -> _Live:
        """Build the request and the objects that turn its tokens into outputs; nothing is registered yet."""
        task, prompt_len, model = asked.params, len(asked.token_ids), self._model
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        keys = [SampleKey(request_id, index, asked.seed, metrics, self.weights_version)
                for index in range(asked.num_samples)]
        if isinstance(task, HiddenTask):
            gatherer = task.make_gatherer(keys[0], prompt_len, model.classes)
            samples: list[tuple[Request, OutputMaker]] = [(Request(next(self._ids), asked, prompt_len), gatherer)]
        else:
            longest = model.longest(prompt_len, asked.sampling.max_tokens)
            samples = [(Request(next(self._ids), asked, longest, model.eos_ids, key.sample_index),
                        self._make_output(key, asked)) for key in keys]
        return _Live(request_id, metrics, asked, samples, len(samples))

    def _make_output(self, key: SampleKey, asked: CheckedRequest) -> SampleOutput:
        adding = [cast("AddingPart", part) for part in asked.parts if part.adds_to_samples]
        additions = [own for part in adding for own in part.make_additions(key, asked, self.keepers)]
        return SampleOutput(key, asked.sampling, self._model.tokenizer, additions)

    def _enter(self, lives: Sequence[_Live], scheduler: Scheduler) -> None:
        """Register all requests atomically: if one is refused, none is added."""
        asked = [live.asked for live in lives]
        self.keepers.enter(asked)  # before the scheduler, which looks up what they keep
        try:
            scheduler.add(*(request for live in lives for request, _ in live.samples))
        except Exception:
            self.keepers.leave(*asked)
            raise
        self._live |= {live.request_id: live for live in lives}
        self._samples |= {request.id: (live, sample) for live in lives for request, sample in live.samples}

    def use_weights(self, version: int) -> None:
        """Set the version of the weights from which later tokens of all requests come."""
        self.weights_version = version
        for prompt in self._prompts.values():
            prompt.use_weights(version)
        for live in self._live.values():
            for request, sample in live.samples:
                if isinstance(sample, SampleOutput):
                    sample.use_weights(version, in_place=request.settled.at_least > 0)

    # Outputs, which are added to `increments`

    def emit(self, updates: Iterable[Update], scheduler: Scheduler, increments: list[OutputIncrement]) -> None:
        """Turn the results of a step into outputs."""
        for request, result in updates:
            live, sample = self._samples[request.id]
            if result.run:
                if result.num_accepted:
                    live.metrics.observe_drafts(result.num_accepted)
                if not live.has_tokens:
                    live.begin_tokens()
            try:
                if result.prompt_logprobs and not request.sample_index:
                    increments.append(self._prompt_of(live).take(result.epoch, result.prompt_logprobs))
                if result.parts and isinstance(sample, SampleOutput):
                    sample.note(result)
                if result.run or result.finish or result.hidden is not None:
                    increments.append(sample.take(result))
            except Exception as error:  # one request's text must not take its batch mates' tokens along
                log.exception("the output of a request could not be made; the request ends with an error")
                increments.append(sample.end(Finish.ERROR, f"the output failed: {error!r}"))
            if result.finish:
                self._end(request, increments)
            elif sample.is_finished:  # by its text: the device does not know
                scheduler.end(request.id, Finish.STOP)

    def _prompt_of(self, live: _Live) -> PromptLogprobsOutput:
        if live.request_id not in self._prompts:
            asked, tokenizer = live.asked, self._model.tokenizer
            key = SampleKey(live.request_id, 0, asked.seed, live.metrics, self.weights_version)
            self._prompts[live.request_id] = prompt_output.PromptLogprobsOutput(
                key, len(asked.token_ids), tokenizer if asked.sampling.detokenize else None, asked.input_parts)
        return self._prompts[live.request_id]

    def end(self, requests: Iterable[Request], increments: list[OutputIncrement]) -> None:
        """End requests that the scheduler has ended without a result of a step."""
        for request in requests:
            self._end(request, increments)

    def _end(self, request: Request, increments: list[OutputIncrement]) -> None:
        live, sample = self._samples.pop(request.id)
        if not sample.is_finished:
            increments.append(sample.end(request.finish, request.error))
        if live.end_sample(request):
            self.keepers.leave(live.asked)
            del self._live[live.request_id]
            self._prompts.pop(live.request_id, None)

    # After an interrupt

    def forget(self) -> None:
        """Forget all requests, because their state may be inconsistent after an interrupt. Features keep their data for
        these requests until `drop_unused`."""
        self._live, self._samples, self._prompts = {}, {}, {}
        self.keepers.forget_requests()
