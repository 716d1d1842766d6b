"""The two messages between the scheduler and a runner, which runs its steps: `ScheduledBatch` and `StepResult`.

Both can be pickled, and nothing else passes between the two sides of a step. So a runner may be in another thread,
process or machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outrider.core.checked_request import NO_REQUEST, CheckedRequest
from outrider.core.draft_confidence import DraftSharing
from outrider.core.drafter_faults import DrafterFault
from outrider.core.feature_parts import BatchPart, ResultPart, find_part
from outrider.core.limits import NULL_ROW
from outrider.core.params import SamplingParams
from outrider.core.row_end import RowEnd
from outrider.core.uncaptured import Uncaptured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outrider.core.page_moves import MovesReport, PageMoves


class Finish(enum.IntEnum):
    """The reason why a request ended, as reported by the device (0 to 2) or decided by the host (the rest)."""

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
    """All data that the device needs about a request that takes a row, at its start or after a preemption."""

    row: int
    request: CheckedRequest
    computed: int  # tokens whose cache a prefix hit provides
    max_len: int  # known tokens at which the device ends the request
    eos_ids: tuple[int, ...] = ()  # end the request unless ignore_eos
    sample_index: int = 0  # which of the n samples of a prompt
    output_ids: list[int] = field(default_factory=list)  # settled outputs, after a preemption
    checkpoint: list[int] = field(default_factory=list)  # pages with the recurrent state after `computed` tokens

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_known(self) -> int:
        return self.prompt_len + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Return all known tokens: the prompt and the outputs that results have confirmed."""
        return [*self.request.token_ids, *self.output_ids]


NO_ADMISSION = Admission(NULL_ROW, NO_REQUEST, computed=1, max_len=2, output_ids=[0])  # of a dead row


class PageWrite(NamedTuple):
    """New values for columns [start, start + len(pages)) of a row's page table in one group. A tuple, because dozens
    are made in every step."""

    group: int
    row: int
    start: int
    pages: list[int]


@dataclass(slots=True)
class PageChanges:
    """Changes of pages that the device makes before a step. Written by the cache manager, read by the device's page
    pool and page tables, passed on unchanged by the code between."""

    table_writes: list[PageWrite] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)  # pages that change group: zeroed before use
    moves: PageMoves | None = None  # copies to and from other places; None: the engine has none, or has nothing to do


class DeltaReach(enum.Flag):
    """The kinds of matrix products that the weight deltas of batch rows change. A captured step contains delta kernels
    only for certain kinds, so that a step with deltas of linear layers does not run kernels for experts, embeddings or
    latent attention."""

    NOTHING = 0
    LINEARS = enum.auto()
    EMBEDDINGS = enum.auto()
    EXPERTS = enum.auto()
    LATENTS = enum.auto()  # the expansion of latent attention


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """An order to save a row's recurrent state to pages: the state after exactly `boundary` tokens. A step carries it
    out if the row reaches the boundary in this step."""

    id: int  # reported in `StepResult.checkpoints` by the step that wrote the pages
    row: int
    boundary: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class HostDraft:
    """Drafts that the host made from the last result it saw. They follow the row's first `after` known tokens.

    The row may have accepted more tokens since. Then the device compares the first drafts with these tokens. If they
    agree, it drops the compared drafts and keeps the rest; otherwise it drops all drafts."""

    row: int
    after: int
    token_ids: list[int]


class StepForm(enum.Enum):
    """Whether a step is queued whole or split. In a split step the host writes data for the sampler, such as masks,
    between forward pass and sampler. So the data can depend on the results of the previous step."""

    WHOLE = "whole"
    SPLIT = "split"


class StepMode(NamedTuple):
    """The options with which the worker runs a step."""

    generation: int = 0  # rises after a failed step: the device forgets its rows before the first step of a new one
    form: StepForm = StepForm.WHOLE
    is_traced: bool = False  # the result tells how long the parts of the step took, where the worker can


@dataclass(frozen=True, slots=True)
class CacheOrders:
    """Orders about the cache in one step: changes of pages, and recurrent states to save."""

    pages: PageChanges = field(default_factory=PageChanges)
    checkpoints: list[CheckpointWrite] = field(default_factory=list)  # for rows of the batch
    folds: list[CheckpointWrite] = field(default_factory=list)  # for rows that ended; done before the rows are reused
    num_pending: list[int] = field(default_factory=list)  # each request's accepted drafts that wait to be folded
    shares_pages: bool = False  # several requests hold the same leading pages, for hundreds of tokens


@dataclass(frozen=True, slots=True)
class DraftOrders:
    """Orders about drafts in one step, mainly for making the drafts of later steps. The number of drafts that this step
    checks is in `ScheduledBatch.num_drafts`."""

    num_wanted: int = 0  # most drafts that the drafter may guess for the next step; 0 leaves the drafter out
    from_host: list[HostDraft] = field(default_factory=list)
    sharing: DraftSharing | None = None  # how a captured step shares its token rows out; num_drafts are the most then
    ends: list[RowEnd] = field(default_factory=list)  # rows that requests have left; admissions may take them again


Part = TypeVar("Part", bound=BatchPart)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The scheduler's order for one step. Each list has an entry for each request, in the same order. A batch without
    requests may only fold accepted drafts into recurrent states.

    Parameters of a request are not here: they travel once, in its admission, and the device side keeps them by row."""

    step: int
    request_ids: list[int]
    epochs: list[int]
    rows: list[int]
    num_known: list[int]  # known tokens scheduled, at least one
    num_drafts: list[int]  # drafts scheduled; the device may have fewer alive
    samples: list[bool]  # whether the step computes the last known token, so that a token can be sampled after it
    bounds: list[int]  # computed tokens after this step, at most
    admissions: list[Admission] = field(default_factory=list)
    cache: CacheOrders = field(default_factory=CacheOrders)
    drafting: DraftOrders = field(default_factory=DraftOrders)
    mode: StepMode = StepMode()
    parts: tuple[BatchPart, ...] = ()  # of features, at most one of each kind

    def part(self, kind: type[Part]) -> Part | None:
        """Return the batch's part of this class, or None."""
        return find_part(self.parts, kind)

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_known) + sum(self.num_drafts)

    @property
    def num_token_rows(self) -> int:
        """Return the number of token rows that the step computes: fewer than its tokens if requests share rows for
        their drafts."""
        sharing = self.drafting.sharing
        return self.num_tokens if sharing is None else self.num_requests + sharing.total


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token first, then the most likely ones. A tuple of tuples, because
    hundreds are made in every step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # rank of the chosen token; 1 is the most likely
    texts: tuple[str, ...] | None = None  # one for each of token_ids; None where a request wants no text


class RequestResult(NamedTuple):
    """One step's result for one request. A tuple, because hundreds are made in every step."""

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
    hidden: NDArray[np.float32] | None = None  # [vectors, hidden size], as the request's HiddenReport says
    levels: int = 0  # how sure the drafter is of the drafts that wait (`core/draft_confidence.py`)
    parts: tuple[ResultPart, ...] = ()  # what features in the worker report, for their SampleAdditions


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time at which a traced step began in its worker, and the durations of its parts."""

    began: float  # seconds since the epoch
    parts: tuple[tuple[str, float], ...]  # names and seconds, one part after the other


class DraftingReport(NamedTuple):
    """A report of the drafters on the device since the last result: their faults, and statistics of features."""

    faults: tuple[DrafterFault, ...]
    is_over: bool  # all of them are switched off
    reports: tuple[ResultPart, ...] = ()  # of what observes drafts


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    requests: list[RequestResult]
    seconds: float = 0.0
    checkpoints: list[int] = field(default_factory=list)  # ids of the checkpoints that were written
    uncaptured: Uncaptured | None = None  # why the step was not a replayed graph; None if it was one
    times: StepTimes | None = None  # times of a traced step, where its worker can tell them
    drafting: DraftingReport | None = None  # where there are drafters on the device
    moved: MovesReport | None = None  # if the batch had orders to move pages
