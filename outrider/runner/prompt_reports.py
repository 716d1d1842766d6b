"""Reports on prompts, for the requests that ask: log-probabilities of the prompt's tokens, and hidden states.

A report of hidden states is the last token's vector, the sum over the tokens of each step, or a vector for every token.
A request whose report needs every token takes no prefix hits, so that every token of its prompt is computed once. Steps
with a report run uncaptured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from outrider.core import Axis, Finish, HiddenReport, RequestResult, SamplingParams, ScheduledBatch
from outrider.core.checked_request import NOTHING_SAMPLED
from outrider.kernels.buffers import to_device
from outrider.mixers import WantedRows
from outrider.models.base import Hidden, Model
from outrider.runner.batch import EagerShape, Inputs
from outrider.runner.row_state import RowParams, RowState
from outrider.sample import History, StepExtras, StepNeeds
from outrider.sample.logprobs import LogprobRows, logprob_rows
from outrider.sample.sampler import Asked, process_logits
from outrider.sample.sampling_batch import LogitRows

# Logit rows at a time: a long prompt times a large vocabulary would not fit. No more than the largest step samples,
# whose memory is planned for, unless that is very few.
CHUNK_ROWS, LEAST_CHUNK_ROWS = 256, 16
ALIGNED_BYTES = 16  # of an address, for which kernels are compiled
NOT_FINITE = "the model's hidden states are not finite: check the weights"


@dataclass(frozen=True)
class PromptLogprobs:
    rows: dict[int, LogprobRows]  # by the number of likeliest tokens that requests ask for; -1: all
    counts: list[int]  # rows per scheduled request, in batch order; the first is of the first token scheduled


def prompt_logprobs(model: Model, scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden, state: RowState, *,
                    row_by_row: bool = False) -> PromptLogprobs:
    """Compute the log-probabilities of the prompt tokens that this step computes. Some request asks for them
    (`RowParams.report_prompts`). row_by_row: see `sample`."""
    params = state.params.of_rows(scheduled.rows)
    view = inputs.batch.unpadded
    assert isinstance(inputs.shape, EagerShape), "captured steps report no logprobs"
    counts = state.params.reported_rows(scheduled)
    starts: list[int] = []
    start = 0
    for length, count in zip(inputs.shape.queries.lens, counts, strict=False):
        starts += range(start, start + count)
        start += length
    token_rows = to_device(starts, torch.int64, state.device)
    # Past the end of the known tokens there is no next token; such rows are cut on the host.
    next_position = (view.positions[token_rows] + 1).clamp_max(state.tokens.shape[1] - 1)
    chosen = state.tokens[view.rows[view.request_of[token_rows]], next_position]
    rows = LogitRows(view.request_of[token_rows], view.rows[view.request_of[token_rows]],
                     torch.zeros_like(token_rows), next_position)
    processing = PromptProcessing.from_params(params, counts, rows, state, view.max_length.tokens)
    widths = [p.prompt_logprobs or 0 for p, count in zip(params, counts, strict=True) for _ in range(count)]
    most = max(LEAST_CHUNK_ROWS, state.limits.extent(Axis.LOGIT_ROWS))
    height = 1 if row_by_row else min(CHUNK_ROWS, most)
    cuts = [(first, min(first + height, len(starts))) for first in range(0, len(starts), height)]
    parts: dict[int, list[LogprobRows]] = {}
    for start, stop in cuts:
        own = WantedRows(token_rows[start:stop])
        logits = model.logits(hidden.final[own.token_rows], hidden.context.of_rows(own))
        if processing is not None:
            logits = processing.apply(logits, start, stop)
        for num, at in _runs(widths[start:stop]):
            parts.setdefault(num, []).append(logprob_rows(_aligned(logits[at]), chosen[start:stop][at], num))
    return PromptLogprobs({num: LogprobRows.join(own) for num, own in parts.items()}, counts)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that begin at an aligned address, as kernels expect. Otherwise kernels would be compiled again while
    requests run."""
    return rows.clone() if rows.storage_offset() * rows.element_size() % ALIGNED_BYTES else rows


def _runs(widths: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield each number of a run of equal neighbouring numbers, with the slice of the run."""
    start = 0
    for num, run in groupby(widths):
        stop = start + len(list(run))
        yield num, slice(start, stop)
        start = stop


@dataclass(frozen=True)
class PromptProcessing:
    """Applies the sampler's edits and filters to the logits of prompts, for requests that ask for processed
    log-probabilities of their prompt."""

    asked: Asked
    flags: list[bool]  # by logit row: whether it is processed
    is_processed: torch.Tensor  # the flags, on the device

    @classmethod
    def from_params(cls, params: list[SamplingParams], counts: list[int], rows: LogitRows, state: RowState,
                    bound: int) -> PromptProcessing | None:
        """Return None if no request asks for processed log-probabilities. counts: the number of logit rows of each
        request."""
        asks = [p.prompt_logprobs_mode == "processed" and count > 0 for p, count in zip(params, counts, strict=True)]
        if not any(asks):
            return None
        # The others' logit rows are computed along and not used: their parameters ask for nothing.
        own = [p if is_asked else NOTHING_SAMPLED for p, is_asked in zip(params, asks, strict=True)]
        flags = [is_asked for is_asked, count in zip(asks, counts, strict=True) for _ in range(count)]
        history = History(state.tokens, state.known, state.drafts, bound)
        asked = Asked(rows, state.sampling, history, StepNeeds.from_params(own, counts),
                      StepExtras.from_params(own, counts, state.device), "processed")
        return cls(asked, flags, to_device(flags, torch.bool, state.device))

    def apply(self, logits: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Process the logits of logit rows start to stop. Rows of requests that do not ask for it stay unchanged."""
        if not any(self.flags[start:stop]):
            return logits
        processed = process_logits(logits, self.asked.between(start, stop))
        return torch.where(self.is_processed[start:stop, None], processed, logits)


@dataclass(frozen=True)
class HiddenRows:
    """The vectors of hidden states that a step reports, request by request in batch order."""

    vectors: torch.Tensor  # flat, float32, float64 of a float64 model
    shapes: list[tuple[int, int] | None]  # (vectors, their size) of each request; None: it generates tokens
    ends: list[bool]  # whether the step computes the last token of the request


def reported_hidden(model: Model, scheduled: ScheduledBatch, inputs: Inputs, hidden: Hidden, params: RowParams, *,
                    exact: bool = False) -> HiddenRows:
    """Collect the hidden states that some of the requests ask for. exact: return every token's vector and leave sums to
    the host, because the order of additions would depend on how the prompt was chunked."""
    reports = params.hidden_of(scheduled.rows)
    assert isinstance(inputs.shape, EagerShape), "captured steps report no hidden states"
    wide = torch.float64 if hidden.final.dtype == torch.float64 else torch.float32
    parts: list[torch.Tensor] = []
    shapes: list[tuple[int, int] | None] = []
    ends: list[bool] = []
    start = 0
    lens = inputs.shape.queries.lens
    for row, length, bound in zip(scheduled.rows, lens, scheduled.bounds, strict=False):
        report, end_len = reports.get(row, (HiddenReport.NONE, 0))
        own, is_last = hidden.final[start : start + length], bound >= end_len
        start += length
        ends.append(is_last)
        match report:
            case HiddenReport.NONE:
                shapes.append(None)
                continue
            case HiddenReport.SUM if not exact:
                own = own.to(wide).sum(0, keepdim=True)
            case HiddenReport.LAST | HiddenReport.CLASSES:
                own = own[-1:] if is_last else own[:0]
        if report in (HiddenReport.CLASSES, HiddenReport.ALL_CLASSES):
            rows = WantedRows(torch.arange(start - len(own), start, device=own.device))
            own = model.class_scores(own, hidden.context.of_rows(rows))
        parts.append(own.to(wide).flatten())
        shapes.append((own.shape[0], own.shape[1]))
    return HiddenRows(torch.cat(parts), shapes, ends)


def with_hidden(requests: list[RequestResult], hidden: HiddenRows) -> list[RequestResult]:
    """Add the hidden states to the results of the requests that asked for them. Such a request ends with its prompt."""
    vectors = hidden.vectors.cpu().float().numpy()
    first, done = 0, []
    for result, shape, is_last in zip(requests, hidden.shapes, hidden.ends, strict=True):
        if shape is not None:
            size = shape[0] * shape[1]
            own = vectors[first : first + size].reshape(shape).copy()  # a view would keep those of the whole step alive
            first += size
            finish, error = (Finish.STOP if is_last else Finish.NO), None
            if not bool(torch.from_numpy(own).isfinite().all()):
                finish, error = Finish.ERROR, NOT_FINITE
            result = result._replace(hidden=own, finish=finish, error=error)
        done.append(result)
    return done
