"""What a step is told and what it answers.

`ScheduledBatch` and `StepResult` are picklable and are the only things that pass between the scheduler and a runner, so
a runner may live in another thread, process or machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.params import SamplingParams


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


class Uncaptured(enum.Enum):
    """Why a step ran without replaying a captured one."""

    NO_GRAPHS = "no graphs on this device, or eager by setting"
    NO_CAPTURED_KERNELS = "layers whose kernels have no captured form"
    FOLDS = "folds rows that ended"
    SEVERAL_CHECKPOINTS = "several checkpoints of one request"
    SAMPLING_PARAMETERS = "sampling parameters that need kernels, which this model or device has none of"
    MANY_LOGPROBS = "more log-probabilities than a captured step reports"
    PROMPT_LOGPROBS = "log-probabilities of a prompt"
    UNPLACED_LISTS = "a logit_bias or bad_words that found no place on the device"
    DRAFTER_FILLS_SLOTS = "the drafter fills slots of admitted rows"
    PROMPTS = "prompts whose lengths the host must know"
    TOO_MANY_REQUESTS = "more requests than any graph"
    TOO_MANY_TOKENS = "more tokens than any graph"
    NO_MEMORY = "no memory for a capture"
    TOO_MANY_CAPTURES = "too many sizes captured already"


class StepForm(enum.Enum):
    """How a step is cut. A split step lets the host act when its forward is queued and before its sampler is: what the
    host then writes to the device (a grammar's masks) may depend on the result of the step before."""

    WHOLE = "whole"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What the scheduler asks of one step. Lists run over requests, in batch order; there may be none but folds.

    Parameters of a request are not here: they travel once, in its admission, and the device side keeps them by row."""

    step: int
    request_ids: list[int]
    epochs: list[int]
    rows: list[int]
    num_known: list[int]  # known tokens scheduled, at least one
    num_drafts: list[int]  # drafts scheduled; the device may have fewer alive
    samples: list[bool]  # the known tokens scheduled reach the end of the known tokens
    bounds: list[int]  # computed tokens after this step, at most
    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    clear_pages: list[int] = field(default_factory=list)  # pages that change group: zero before use
    host_drafts: list[HostDraft] = field(default_factory=list)
    checkpoints: list[CheckpointWrite] = field(default_factory=list)  # of rows of this batch
    folds: list[CheckpointWrite] = field(default_factory=list)  # of rows that ended: before any of them is taken again
    num_pending: list[int] = field(default_factory=list)  # accepted drafts that wait to be folded, at most
    propose: int = 0  # most drafts to guess for the next step; 0 leaves the drafter out
    generation: int = 0  # rises when a step has failed: the device forgets its rows before the first of a new one
    form: StepForm = StepForm.WHOLE

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_known) + sum(self.num_drafts)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token first, then the most likely ones. A tuple of
    tuples: hundreds are made every step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the chosen token; 1 is the most likely
    texts: tuple[str, ...] | None = None  # of token_ids; None where a request wants no text


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
    uncaptured: Uncaptured | None = None  # why no captured step was replayed, if none was
