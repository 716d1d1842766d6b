"""Plain data that crosses boundaries: limits, requests' lengths, what a step is told and what it answers.

Nothing here imports torch. `ScheduledBatch` and `StepResult` are picklable and are the only things that pass
between the scheduler and a runner, so a runner may live in another thread, process or machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.params import SamplingParams

NULL_PAGE = 0  # never owned by a request; padded and forgotten table entries point here
NULL_ROW = 0  # never owned by a request; padded rows point here


class Axis(enum.Enum):
    """What an axis of a persistent buffer counts. A buffer is declared by these, never by bare integers."""

    ROWS = "rows"  # running requests and the null row
    REQUESTS = "requests"  # requests of one batch
    STARTS = "starts"  # requests of one batch plus one (query starts)
    TOKENS = "tokens"  # token rows of one batch
    LENGTH = "length"  # tokens of one request
    DRAFTS = "drafts"  # drafts of one request in one step
    RUN = "run"  # tokens a step can yield for one request: drafts plus one
    LOGIT_ROWS = "logit rows"  # rows that reach the sampler in one step
    VOCAB = "vocabulary"
    STOP_IDS = "stop ids"  # token ids that end a request


@dataclass(frozen=True)
class Limits:
    """The sizes that every buffer, table and capacity is derived from."""

    max_requests: int
    max_batched_tokens: int
    max_len: int
    max_drafts: int
    vocab_size: int
    max_stop_ids: int = 64
    steps_in_flight: int = 2

    def extent(self, axis: Axis) -> int:
        match axis:
            case Axis.ROWS | Axis.STARTS:
                return self.max_requests + 1
            case Axis.REQUESTS:
                return self.max_requests
            case Axis.TOKENS:
                return self.max_batched_tokens
            case Axis.LENGTH:
                return self.max_len
            case Axis.DRAFTS:
                return self.max_drafts
            case Axis.RUN:
                return self.max_drafts + 1
            case Axis.LOGIT_ROWS:
                return min(self.max_batched_tokens, self.max_requests * (self.max_drafts + 1))
            case Axis.VOCAB:
                return self.vocab_size
            case Axis.STOP_IDS:
                return self.max_stop_ids

    @property
    def max_unsettled_tokens(self) -> int:
        """Most tokens of one request that can be in steps whose results are not back."""
        return self.steps_in_flight * self.max_batched_tokens


@dataclass(slots=True)
class Settled:
    """Computed tokens confirmed by a result. A lower bound of the truth, which lives on the device."""

    at_least: int = 0


@dataclass(slots=True)
class Bound:
    """Computed tokens if every step in flight accepts all it was given. An upper bound of the truth."""

    at_most: int = 0


class Finish(enum.IntEnum):
    """Why a request ended, as the device reports it (0 to 2) or as the host decides (the rest)."""

    NO = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def reason(self) -> str | None:
        return None if self is Finish.NO else self.name.lower()


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a row: everything the device must know about it. Also used when it resumes."""

    row: int
    token_ids: list[int]  # all known tokens: the prompt, and after a preemption its settled outputs
    prompt_len: int
    computed: int  # tokens whose cache a prefix hit provides
    max_len: int  # known tokens at which the device ends the request
    eos_ids: tuple[int, ...]  # end the request unless ignore_eos
    params: SamplingParams
    sample_index: int  # which of the n samples of a prompt
    seed: int
    checkpoint: list[int] = field(default_factory=list)  # pages with the recurrent state after `computed` tokens


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Columns [start, start + len(pages)) of a row's page table in one group."""

    group: int
    row: int
    start: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """Pages for a row's recurrent state after `boundary` tokens, should a step bring it there."""

    id: int  # what the step reports if it wrote them
    row: int
    boundary: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class HostDraft:
    """Drafts made on the host from the last result it saw: they follow the row's first `after` known tokens.

    The device drops those that have been accepted since, if they agree; else the draft is dead."""

    row: int
    after: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What the scheduler asks of one step. Lists run over requests, in batch order; there may be none but folds."""

    step: int
    request_ids: list[int]
    epochs: list[int]
    rows: list[int]
    num_known: list[int]  # known tokens scheduled, at least one
    num_drafts: list[int]  # drafts scheduled; the device may have fewer alive
    samples: list[bool]  # the known tokens scheduled reach the end of the known tokens
    bounds: list[int]  # computed tokens after this step, at most
    params: list[SamplingParams]
    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    clear_pages: list[int] = field(default_factory=list)  # pages that change group: zero before use
    host_drafts: list[HostDraft] = field(default_factory=list)
    checkpoints: list[CheckpointWrite] = field(default_factory=list)  # of rows of this batch
    folds: list[CheckpointWrite] = field(default_factory=list)  # of rows that ended: before any of them is taken again
    num_pending: list[int] = field(default_factory=list)  # accepted drafts that wait to be folded, at most; or unknown
    propose: int = 0  # most drafts to guess for the next step; 0 leaves the drafter out

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_known) + sum(self.num_drafts)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token; 1 is the most likely


class RequestResult(NamedTuple):
    """What one step did for one request. A tuple: hundreds are made every step."""

    request_id: int
    epoch: int
    run: list[int]  # empty while the prompt is being computed, and for a request that had already ended
    num_computed: int  # known tokens computed plus drafts accepted, in this step
    num_drafted: int  # drafts that were alive
    num_accepted: int
    num_proposed: int = 0  # drafts that wait for the next step
    finish: Finish = Finish.NO
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    requests: list[RequestResult]
    seconds: float = 0.0
    checkpoints: list[int] = field(default_factory=list)  # ids of those that were written
