"""BatchBuilder: the requests of one batch, as the scheduler adds them, and the ScheduledBatch they make.

Advances bounds as tokens are scheduled. Which requests and how many tokens is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.cache.checkpoints import StateProgress
from outrider.core import Admission, CheckpointWrite, HostDraft, PageChanges, RowEnd, ScheduledBatch, StepForm
from outrider.core.draft_confidence import DraftSharing
from outrider.core.spans import MarkedSpan
from outrider.core.step import AdapterPlacement
from outrider.sched.request import Request


class Entry(NamedTuple):
    """One request's part of a batch, and what it was when it was added."""

    request: Request
    num_known: int
    num_drafts: int
    samples: bool
    num_pending: int
    before: int  # its bound


class BatchBuilder:
    """Collects the requests of one batch and advances their bounds."""

    def __init__(self, step: int, generation: int = 0) -> None:
        self.step, self._generation = step, generation
        self._entries: list[Entry] = []
        self._spans: list[MarkedSpan] = []

    @property
    def is_empty(self) -> bool:
        return not self._entries

    @property
    def request_ids(self) -> set[int]:
        return {entry.request.id for entry in self._entries}

    @property
    def requests(self) -> list[Request]:
        return [entry.request for entry in self._entries]

    def add(self, request: Request, num_known: int, num_drafts: int, samples: bool, bound: int) -> None:
        own = request.bound
        self._entries.append(Entry(request, num_known, num_drafts, samples, request.num_pending, own.at_most))
        request.num_pending = num_drafts
        own.at_most = bound
        request.unsettled += num_known + num_drafts
        request.in_flight_samples += samples

    @property
    def only_decodes(self) -> bool:
        """Whether every request has one known token and samples."""
        return all(entry.samples and entry.num_known == 1 for entry in self._entries)

    def mark(self, start: int, end: int) -> None:
        """A span of the request that was added last."""
        self._spans.append(MarkedSpan(len(self._entries) - 1, start, end))

    @property
    def form(self) -> StepForm:
        """Split if a request samples by a grammar, whose masks the host writes before the sampler runs."""
        has_grammar = any(entry.samples and entry.request.input.has_form for entry in self._entries)
        return StepForm.SPLIT if has_grammar else StepForm.WHOLE

    @property
    def progress(self) -> dict[int, StateProgress]:
        """How far each request's recurrent states get. Tokens known at admission are never in doubt, and drafts are
        not stored in the step that checks them."""
        progress: dict[int, StateProgress] = {}
        for request, known, _, _, _, before in self._entries:
            sure = min(request.admitted_len, before)  # computed when the step begins, whatever is in flight
            least = max(request.settled.at_least, sure) + known
            progress[request.id] = StateProgress(request.folded, max(request.folded, sure), least, before + known)
        return progress

    def build(self, admissions: Iterable[Admission], pages: PageChanges, host_drafts: list[HostDraft],
              checkpoints: list[CheckpointWrite], folds: list[CheckpointWrite], num_wanted: int,
              form: StepForm = StepForm.WHOLE, *, shares_pages: bool = False,
              adapters: list[AdapterPlacement] | None = None, ends: list[RowEnd],
              sharing: DraftSharing | None = None) -> ScheduledBatch:
        # By column: the hot part of a step of hundreds of requests.
        columns = zip(*self._entries, strict=True) if self._entries else ((),) * 6
        requests, num_known, num_drafts, samples, num_pending, _ = map(list, columns)
        return ScheduledBatch(
            step=self.step,
            request_ids=[r.id for r in requests],
            epochs=[r.epoch for r in requests],
            rows=[r.row for r in requests],
            num_known=num_known,
            num_drafts=num_drafts,
            samples=samples,
            bounds=[r.bound.at_most for r in requests],
            admissions=list(admissions),
            pages=pages,
            host_drafts=host_drafts,
            checkpoints=checkpoints,
            folds=folds,
            num_pending=num_pending,
            num_wanted=num_wanted,
            generation=self._generation,
            form=form,
            spans=self._spans,
            shares_pages=shares_pages,
            adapters=adapters or [],
            ends=ends,
            sharing=sharing,
        )
