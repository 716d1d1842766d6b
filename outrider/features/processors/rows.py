"""ProcessorRows: runs an engine's logits processors over the logit rows of a step.

An operator's `LogitsProcessor` classes (`logits_processors.py`, vLLM's interface) get their logits only here, between
the stages of the torch sampler: no kernel samples then, and no step is captured. A processor sees a batch of requests
with the outputs of each in a list. A step shows it one position after the other: first the logits that follow the known
tokens of every request, then the first draft is added to the list and the logits that follow it are shown, and so on.
So the list always holds exactly the tokens before the position. At the end the lists are cut back to known tokens.

If a draft that a processor has seen is rejected, the request is added to the batch again in its next step, as after a
preemption, so that a state that the processor built on that draft is dropped. If a processor raises, each request is
tried alone with a fresh instance; only those that raise end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from outrider.core import Admission, Axis, Limits, ScheduledBatch
from outrider.core.drafter_faults import words_of
from outrider.core.params import SamplingParams
from outrider.kernels.buffers import to_device
from outrider.logits_processors import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    ProcessorFailure,
)
from outrider.runner.logits_part import LogitsPart
from outrider.runner.row_state import RowState
from outrider.runner.row_texts import RowText, read_later

log = logging.getLogger("outrider")


@dataclass(eq=False)
class ProcessedRequest:
    """A request in a row, with its output tokens as logits processors see them."""

    params: SamplingParams
    prompt_ids: list[int] | None
    outputs: list[int]  # the list that processors keep; between steps it holds known tokens alone
    known: int  # tokens, prompt included, that `outputs` covers
    is_new: bool = True  # it is added to the batch in its next step
    shown: list[int] = field(default_factory=list)  # drafts that processors see behind `outputs` in this step

    def follow(self, text: RowText, num_drafts: int) -> None:
        """Take the tokens that became known since the last step, and the drafts of this one."""
        num_new = text.known - self.known
        assert 0 <= num_new <= len(text.last), f"{num_new} tokens since the last step, more than one can yield"
        new = text.last[len(text.last) - num_new :]
        self.is_new |= self.shown != new[: len(self.shown)]
        self.outputs += new
        self.known, self.shown = text.known, text.drafts[:num_drafts]

    def entry(self, index: int) -> AddedRequest:
        return index, self.params, self.prompt_ids, self.outputs


@dataclass(frozen=True, eq=False)
class StepRows:
    """A request's logit rows in a step: one row after its known tokens, then one row after each of its drafts."""

    request: ProcessedRequest
    index: int  # of the request in the scheduled batch
    first: int  # logit row


class EngineProcessor:
    """One logits processor of the engine. After an exception a new one is made, because the state of the old one is
    unknown."""

    def __init__(self, kind: type[LogitsProcessor], config: Any, device: torch.device) -> None:
        self.name = kind.__name__
        self._make: Callable[[], LogitsProcessor] = partial(kind, config, device, device.type == "cuda")
        try:
            self._own = self._make()
            self.is_argmax_invariant = bool(self._own.is_argmax_invariant())
        except Exception as error:
            raise ValueError(f"logits_processors: {self.name} raised in its constructor: {words_of(error)}") from error
        self._failed = False  # in this step

    def begin(self, update: BatchUpdate | None, batch: list[ProcessedRequest]) -> BatchUpdate | None:
        """Called before the first position of a step. Returns the BatchUpdate to show to this processor: a new
        processor must see the whole batch as added."""
        if not self._failed:
            return update
        self._own, self._failed = self._make(), False
        return BatchUpdate(len(batch), [], [request.entry(index) for index, request in enumerate(batch)], [])

    def process(self, take: Callable[[], torch.Tensor], update: BatchUpdate | None,
                batch: list[ProcessedRequest]) -> tuple[torch.Tensor, dict[int, ProcessorFailure]]:
        """Return the processed logits [batch size, V], and a dict from the index of each request that failed to its
        failure. `take`: makes a copy of the logits."""
        if not self._failed:
            try:
                return self._apply(self._own, take(), update), {}
            except Exception:  # of which request is found out below
                self._failed = True
        processed, failures, own = take(), {}, self._make()
        for index, request in enumerate(batch):
            alone = BatchUpdate(1, [], [request.entry(0)], [])
            try:
                processed[index] = self._apply(own, processed[index : index + 1].clone(), alone)[0]
            except Exception as error:
                failures[index] = ProcessorFailure(f"the logits processor {self.name} failed: {words_of(error)}")
                own = self._make()
        return processed, failures

    @staticmethod
    def _apply(own: LogitsProcessor, logits: torch.Tensor, update: BatchUpdate | None) -> torch.Tensor:
        own.update_state(update)
        processed = own.apply(logits)
        if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
            raise ValueError(f"apply must return a tensor of the shape of its logits, {tuple(logits.shape)}")
        return processed.to(logits)


class StepProcessors:
    """The logits processors with the logit rows of one step. The sampler calls `edit` with the logits, then `shape`
    with the scaled logits, for processors that never change which token is likeliest."""

    def __init__(self, processors: Sequence[EngineProcessor], rows: Callable[[], list[StepRows]],
                 update: Callable[[list[StepRows]], tuple[list[StepRows], BatchUpdate | None]]) -> None:
        self._processors, self._read, self._change = processors, rows, update
        self._batch: list[StepRows] = []
        self._update: BatchUpdate | None = None
        self.failures: dict[int, str] = {}  # by the request's index in the scheduled batch
        self.failed_rows: list[int] = []  # logit rows whose processing failed

    def edit(self, logits: torch.Tensor) -> None:
        self._batch, self._update = self._change(self._read())
        self._run(logits, is_argmax_invariant=False)

    def shape(self, scaled: torch.Tensor) -> None:
        self._run(scaled, is_argmax_invariant=True)
        longest = max((len(own.request.shown) for own in self._batch), default=0)
        for own in self._batch:  # it was called for positions that this request did not have
            own.request.is_new |= len(own.request.shown) < longest

    def _run(self, logits: torch.Tensor, *, is_argmax_invariant: bool) -> None:
        for processor in self._processors:
            if self._batch and processor.is_argmax_invariant == is_argmax_invariant:
                self._run_one(processor, logits)

    def _run_one(self, processor: EngineProcessor, logits: torch.Tensor) -> None:
        """Show the processor one position after the other. It always gets a row for every request of its batch: a
        request without a draft at the position is shown its first logits again, and the result is dropped."""
        requests = [own.request for own in self._batch]
        update = processor.begin(self._update, requests)
        known = [len(request.outputs) for request in requests]
        for position in range(1 + max(len(request.shown) for request in requests)):
            live = [own for own in self._batch if position <= len(own.request.shown)]
            for own in live if position else ():
                own.request.outputs.append(own.request.shown[position - 1])
            rows = [own.first + position * (position <= len(own.request.shown)) for own in self._batch]
            index = to_device(rows, torch.int64, logits.device)
            processed, failures = processor.process(partial(logits.index_select, 0, index), update, requests)
            update = None
            kept = [place for place, own in enumerate(self._batch) if position <= len(own.request.shown)]
            at = to_device(kept, torch.int64, logits.device)
            logits.index_copy_(0, index[at], processed[at])
            self._fail({place: failures[place] for place in kept if place in failures}, position)
        for request, length in zip(requests, known, strict=True):
            del request.outputs[length:]

    def _fail(self, failures: dict[int, ProcessorFailure], position: int) -> None:
        for place, failure in failures.items():
            own = self._batch[place]
            self.failed_rows.append(own.first + position)
            if own.index not in self.failures:
                self.failures[own.index] = failure
                log.warning("a request ends: %s", failure)


class ProcessorRows(LogitsPart):
    def __init__(self, processors: Sequence[EngineProcessor], state: RowState, limits: Limits) -> None:
        self._processors, self._state, self._run = processors, state, limits.extent(Axis.RUN)
        self._rows: dict[int, ProcessedRequest] = {}
        self._batch: list[ProcessedRequest] = []  # requests of the last step by their index in the batch

    def admit(self, admissions: Sequence[Admission]) -> None:
        for own in admissions:
            request = own.request
            self._rows.pop(own.row, None)
            if request.generates:
                prompt_ids = list(request.token_ids) if request.has_ids else None
                self._rows[own.row] = ProcessedRequest(own.params, prompt_ids, list(own.output_ids), own.num_known)

    def reset(self) -> None:
        self._rows.clear()

    def of_step(self, scheduled: ScheduledBatch, logit_counts: Sequence[int]) -> StepProcessors:
        """Begin a step with processors, before the step's forward. It requests a copy of the rows' tokens, which the
        device makes after the previous step."""
        firsts = [0, *accumulate(logit_counts)]
        asked = [index for index, row in enumerate(scheduled.rows) if logit_counts[index] and row in self._rows]
        read = read_later(self._state, [scheduled.rows[index] for index in asked], self._run)

        def follow() -> list[StepRows]:
            found = []
            for index, text in zip(asked, read(), strict=True):
                request = self._rows[scheduled.rows[index]]
                if text.is_alive:
                    request.follow(text, scheduled.num_drafts[index])
                    found.append(StepRows(request, index, firsts[index]))
            return found

        return StepProcessors(self._processors, follow, self._change)

    def _change(self, rows: list[StepRows]) -> tuple[list[StepRows], BatchUpdate | None]:
        """Return the rows of a step in the order of their indices in the batch, and the BatchUpdate since the last
        step."""
        batch, by_request = self._batch, {own.request: own for own in rows}
        free = [index for index, request in enumerate(batch) if request not in by_request]
        added = [index for index, request in enumerate(batch) if request in by_request and request.is_new]
        for index in free:
            batch[index].is_new = True  # if it comes back
        known = set(batch)
        for request in by_request:
            if request not in known:
                index = free.pop(0) if free else len(batch)
                batch[index : index + 1] = [request]
                added.append(index)
        entries = [batch[index].entry(index) for index in added]
        moved: list[MovedRequest] = []
        for index in reversed(free):  # the last request takes the place of one that is gone
            last = batch.pop()
            if index < len(batch):
                moved.append((len(batch), index, MoveDirectionality.UNIDIRECTIONAL))
                batch[index] = last
        for request in batch:
            request.is_new = False
        update = BatchUpdate(len(batch), free, entries, moved) if free or entries else None
        return [by_request[request] for request in batch], update
