"""Outputs of requests, and the increments that steps add to them. Names with the same meaning as in vLLM have vLLM's
names. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from outrider.core.lazy_exports import LateModule
from outrider.core.params import SamplingParams
from outrider.core.step_messages import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outrider.core import coded_arrays as late
else:
    late = LateModule("outrider.core.coded_arrays")

Shared = TypeVar("Shared")


@dataclass(unsafe_hash=True)  # not frozen: to make one would take twice as long
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None = None


class WeightSpan(NamedTuple):
    """The range from `start` to `end` of a sample's tokens, or of a prompt's rows, that came from one version of the
    weights."""

    version: int  # how many updates of weights were complete
    start: int
    end: int


# (version of the weights, its first position), in order. Positions before the first start are those of version 0.
VersionStarts: TypeAlias = tuple[tuple[int, int], ...]


def weight_spans(starts: VersionStarts, num: int) -> list[WeightSpan]:
    """Turn version starts into the ranges of positions 0 to `num` that came from each version of the weights."""
    if not starts or starts[0][1]:
        starts = ((0, 0), *starts)
    ends = [*(start for _, start in starts[1:]), num]
    return [WeightSpan(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]


def with_version(starts: VersionStarts, version: int, position: int) -> VersionStarts:
    """Add to version starts that positions from `position` on come from this version, unless they do already."""
    is_known = version == (starts[-1][0] if starts else 0)
    return starts if is_known else (*starts, (version, position))


def cut_starts(starts: VersionStarts, first: int, stop: int) -> VersionStarts:
    """Return version starts for the positions `first` to `stop` only, counted from `first`."""
    cut = [(version, max(0, start - first)) for version, start in starts if start < stop]
    num_before = sum(start == 0 for _, start in cut)  # only the last of these has positions
    return tuple(cut[max(0, num_before - 1) :])


class SamplingMask(NamedTuple):
    """The token ids that the filters kept at each place of a sample; None where they kept too many to report."""

    token_ids: list[list[int] | None]


@dataclass
class CompletionOutput:
    """The output of one of the n samples of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort or error
    stop_reason: int | str | None = None  # the token id or string that stopped it
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False)  # with its end: what features add, by name
    version_starts: VersionStarts = field(default=(), repr=False)

    @property
    def weight_versions(self) -> list[WeightSpan]:
        """The versions of the weights with which the tokens were computed."""
        return weight_spans(self.version_starts, len(self.token_ids))

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The ids that the filters kept, if the request asked for them (`return_sampling_mask`)."""
        token_ids = self.extras.get("sampling_mask")
        return None if token_ids is None else SamplingMask(token_ids)

    @property
    def routed_experts(self) -> NDArray[np.integer[Any]] | None:
        """The experts that each layer chose, [tokens - 1, layers, experts of a token], where the engine's
        `enable_return_routed_experts` asks for them. Layers without experts have zeros."""
        coded = self.extras.get("routed_experts")
        return None if coded is None else late.decode_array(coded)

    def note_version(self, version: int) -> None:
        """Note that later tokens come from this version of the weights."""
        self.version_starts = with_version(self.version_starts, version, len(self.token_ids))

    def cut_versions(self, first: int, stop: int) -> None:
        """Keep only the weight versions of tokens `first` to `stop`, and count positions from `first`."""
        self.version_starts = cut_starts(self.version_starts, first, stop)

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the log-probabilities of the sample's tokens, if the request asked for `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))

    def _set_logprobs(self, entries: list[dict[int, Logprob]] | None) -> None:
        self._entries: tuple[list[dict[int, Logprob]] | None, list[tuple[Any, ...]]] = (entries, [])

    def add_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Add entries in the form in which a step reports them: plain tuples, which the garbage collector does not
        track. They become dicts when `logprobs` is first read, because making hundreds of dicts in every step would
        take longer than the step."""
        self._entries[1].extend(map(tuple, entries))

    def _get_logprobs(self) -> list[dict[int, Logprob]] | None:
        named, unnamed = self._entries
        if named is not None and unnamed:
            named = named + [name_logprobs(TokenLogprobs(*entry)) for entry in unnamed]
            self._entries = (named, [])  # in one assignment: an interrupt may land on any line
        return named


# The field as a property, so that comparisons and copies see the named entries too.
CompletionOutput.logprobs = property(  # type: ignore[assignment]
    CompletionOutput._get_logprobs, CompletionOutput._set_logprobs)


def name_logprobs(entry: TokenLogprobs) -> dict[int, Logprob]:
    """Turn the entry of one position into a dict by token id: the chosen token and the likeliest ones, by rank."""
    token_ids, values, rank, texts = entry
    shown = (None,) * len(token_ids) if texts is None else texts
    named = dict(zip(token_ids[1:], map(Logprob, values[1:], count(1), shown[1:]), strict=True))
    if token_ids[0] not in named:
        named = {token_ids[0]: Logprob(values[0], rank, shown[0]), **named}
    return named


@dataclass
class RequestMetrics:
    """Times in seconds on one clock; counts over all samples of the request."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
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
        """Count the accepted drafts of one step. Accepted drafts are always the first drafts of the step."""
        count_first(self.accepted_per_position, num_accepted)


def count_first(counts: list[int], number: int, times: int = 1) -> None:
    """Add `times` to each of the first `number` counts."""
    if number > len(counts):
        counts += [0] * (number - len(counts))
    for position in range(number):
        counts[position] += times


class SampleKey(NamedTuple):
    """The sample of a request that an increment belongs to, with the data that all samples of the request share."""

    request_id: str
    sample_index: int
    seed: int
    metrics: RequestMetrics  # the engine's own object, which goes on counting
    weights_version: int = 0


NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


class SampleEnd(NamedTuple):
    finish_reason: str | None
    stop_reason: int | str | None = None
    error: str | None = None
    extras: Mapping[str, Any] = NO_EXTRAS


NOT_REPORTED = TokenLogprobs((), (), 0)


class PromptRows(NamedTuple):
    """Log-probabilities of a prompt's tokens from `start` on. They replace earlier rows of these tokens."""

    start: int
    entries: list[TokenLogprobs]  # `NOT_REPORTED` for a token that stands for something else


class OutputIncrement(NamedTuple):
    """The part of a sample that one step added. A short tuple, because hundreds are made every step."""

    sample: SampleKey
    token_ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    end: SampleEnd | None = None
    prompt_logprobs: PromptRows | None = None
    hidden: NDArray[np.float32] | None = None  # the result of a request for hidden states, with its end


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    seed: int | None = None  # given with the request or drawn for it; the request repeated with it gives the same text
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_version_starts: VersionStarts = field(default=(), repr=False)

    def _set_prompt_logprobs(self, rows: list[dict[int, Logprob] | None] | None) -> None:
        self._prompt_rows: tuple[list[dict[int, Logprob] | None] | None, list[tuple[Any, ...]]] = (rows, [])

    def _get_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the prompt's log-probabilities as dicts, which are made when they are first read (see
        `CompletionOutput.add_logprobs`)."""
        named, unnamed = self._prompt_rows
        if named is not None and unnamed:
            named = [*named, *(name_logprobs(TokenLogprobs(*entry)) if entry[0] else None for entry in unnamed)]
            self._prompt_rows = (named, [])
        return named

    @property
    def prompt_weight_versions(self) -> list[WeightSpan]:
        """The versions of the weights that the rows of `prompt_logprobs` came from. If a prompt is interrupted by an
        update and computed again, all of its rows are computed again."""
        named, unnamed = self._prompt_rows
        num = len(named or ()) + len(unnamed)
        has_rows = bool(unnamed) or any(row is not None for row in named or ())  # the first token has none
        return weight_spans(self.prompt_version_starts, num) if has_rows else []

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        """Make the output of a request that has just been added."""
        logprobs: list[list[dict[int, Logprob]] | None] = [None if params.logprobs is None else []
                                                           for _ in range(params.n)]
        samples = [CompletionOutput(index, logprobs=own) for index, own in enumerate(logprobs)]
        return cls(request_id, prompt, token_ids, samples, None if params.prompt_logprobs is None else [None])

    def grow(self, increment: OutputIncrement) -> None:
        (_, index, self.seed, self.metrics, version), token_ids, text, logprobs, end, prompt_logprobs, _ = increment
        sample = self.outputs[index]
        if token_ids:
            sample.note_version(version)
        sample.token_ids += token_ids
        if text:
            sample.text += text
        if logprobs is not None:
            sample.add_logprobs(logprobs)
        if prompt_logprobs is not None and self._prompt_rows[0] is not None:
            self._add_prompt_rows(prompt_logprobs, version)
        if end is not None:
            sample.finish_reason, sample.stop_reason, sample.error, extras = end
            sample.extras = extras or sample.extras

    def _add_prompt_rows(self, rows: PromptRows, version: int) -> None:
        named, unnamed = self._prompt_rows
        assert named is not None
        if not rows.entries:
            return
        if rows.start < len(named) + len(unnamed):
            self._prompt_rows = named, unnamed = named[: rows.start], unnamed[: max(0, rows.start - len(named))]
        unnamed.extend(map(tuple, rows.entries))
        kept = rows.start if rows.start > 1 else 0  # the first token has no row: a version that begins after it has all
        self.prompt_version_starts = with_version(cut_starts(self.prompt_version_starts, 0, kept), version, kept)

    def cut_back(self) -> dict[int, list[int]]:
        """Cut each unfinished sample back to tokens from which it can be resumed, and return these tokens by sample
        index. The last token is dropped, because it may have ended the sample, and so is a token without its
        log-probability."""
        known: dict[int, list[int]] = {}
        for sample in self.outputs:
            if sample.finish_reason is None:
                whole = len(sample.token_ids) if sample.logprobs is None else len(sample.logprobs)
                num_kept = max(min(whole, len(sample.token_ids)) - 1, 0)
                del sample.token_ids[num_kept:]
                sample.cut_versions(0, num_kept)
                if sample.logprobs is not None:
                    del sample.logprobs[num_kept:]
                known[sample.index] = list(sample.token_ids)
        if self.prompt_logprobs is not None and 0 in known:  # they come again, with the first sample
            self.prompt_logprobs, self.prompt_version_starts = [None], ()
        return known

    def fail(self, error: str) -> None:
        """End the unfinished samples with this error."""
        for sample in self.outputs:
            if sample.finish_reason is None:
                sample.finish_reason, sample.error = "error", error

    def copy(self) -> RequestOutput:
        """Return a copy of the current output. Later changes of the output do not change the copy's lists."""
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
    def error(self) -> str | None:
        """Return the reason why a sample failed, or None."""
        return next((sample.error for sample in self.outputs if sample.error is not None), None)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    @property
    def finished(self) -> bool:
        for output in self.outputs:  # a loop is faster than all(..), and every request is asked in every step
            if output.finish_reason is None:
                return False
        return True


RequestOutput.prompt_logprobs = property(  # type: ignore[assignment]
    RequestOutput._get_prompt_logprobs, RequestOutput._set_prompt_logprobs)


def _twin(instance: Shared) -> Shared:
    """Make a shallow copy. A server makes one in every step for every stream, and dataclasses.replace takes ten times
    as long."""
    twin = object.__new__(type(instance))
    twin.__dict__.update(instance.__dict__)
    return twin
