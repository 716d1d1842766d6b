"""Outputs of requests, and the increments they grow by. Names follow vLLM's where they mean the same. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from outrider.core.params import SamplingParams

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n samples of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the token id or string that stopped it
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of the sample's tokens, if the request asked for `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass
class RequestMetrics:
    """Times in seconds on one clock; counts over all samples of the request."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0  # steps that yielded tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted at place 0, 1, ...

    @property
    def mean_run_length(self) -> float:
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0

    def observe_drafts(self, num_accepted: int) -> None:
        """Count one step's accepted drafts, which are always the first ones of the draft."""
        self.accepted_per_position += [0] * (num_accepted - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


class SampleKey(NamedTuple):
    """The sample of a request that an increment belongs to, with the data that all samples of the request share."""

    request_id: str
    sample_index: int
    seed: int
    metrics: RequestMetrics  # the engine's own object, which goes on counting


class SampleEnd(NamedTuple):
    finish_reason: str | None
    stop_reason: int | str | None = None
    error: str | None = None


class OutputIncrement(NamedTuple):
    """The part of a sample that one step added. A short tuple, because hundreds are made every step."""

    sample: SampleKey
    token_ids: list[int]
    text: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    end: SampleEnd | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    seed: int | None = None  # given with the request or drawn for it; the request repeated with it gives the same text
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        """The output of a request that has just been added."""
        logprobs: list[list[dict[int, Logprob]] | None] = [None if params.logprobs is None else []
                                                           for _ in range(params.n)]
        samples = [CompletionOutput(index, logprobs=own) for index, own in enumerate(logprobs)]
        return cls(request_id, prompt, token_ids, samples, None if params.prompt_logprobs is None else [None])

    def grow(self, increment: OutputIncrement) -> None:
        (_, index, self.seed, self.metrics), token_ids, text, logprobs, end, prompt_logprobs = increment
        sample = self.outputs[index]
        sample.token_ids += token_ids
        if text:
            sample.text += text
        if logprobs is not None and sample.logprobs is not None:
            sample.logprobs += logprobs
        if prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs += prompt_logprobs
        if end is not None:
            sample.finish_reason, sample.stop_reason, sample.error = end

    def cut_back(self) -> dict[int, list[int]]:
        """Leaves each sample that has not finished the tokens that surely did not end it: all that are whole but the
        last. Returns them by sample."""
        known: dict[int, list[int]] = {}
        for sample in self.outputs:
            if sample.finish_reason is None:
                whole = len(sample.token_ids) if sample.logprobs is None else len(sample.logprobs)
                count = max(min(whole, len(sample.token_ids)) - 1, 0)
                del sample.token_ids[count:]
                if sample.logprobs is not None:
                    del sample.logprobs[count:]
                known[sample.index] = list(sample.token_ids)
        if self.prompt_logprobs is not None and 0 in known:  # they come again, with the first sample
            self.prompt_logprobs = [None]
        return known

    def fail(self, error: str) -> None:
        """Samples that have not finished end with an error."""
        for sample in self.outputs:
            if sample.finish_reason is None:
                sample.finish_reason, sample.error = "error", error

    def copy(self) -> RequestOutput:
        """The output as it is now, with lists of its own."""
        twin = _twin(self)
        twin.outputs = []
        for sample in self.outputs:
            own = _twin(sample)
            own.token_ids = list(sample.token_ids)
            own.logprobs = None if sample.logprobs is None else list(sample.logprobs)
            twin.outputs.append(own)
        twin.metrics = _twin(self.metrics)
        twin.metrics.accepted_per_position = list(self.metrics.accepted_per_position)
        twin.prompt_logprobs = None if self.prompt_logprobs is None else list(self.prompt_logprobs)
        return twin

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    @property
    def finished(self) -> bool:
        for output in self.outputs:  # a loop is faster than all(..), and every request is asked in every step
            if output.finish_reason is None:
                return False
        return True


def _twin(instance: Shared) -> Shared:
    """A copy that shares its fields. A server makes one for every run of every stream, and dataclasses.replace takes
    ten times as long."""
    twin = object.__new__(type(instance))
    twin.__dict__.update(instance.__dict__)
    return twin
