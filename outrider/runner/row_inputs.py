"""RowInputs: the input parts of the rows' requests, and what a step takes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from outrider.core import Admission, ScheduledBatch, Uncaptured
from outrider.core.input_part import InputPart
from outrider.kernels.buffers import to_device
from outrider.layers import GivenRows
from outrider.mixers.batch import NO_EXTRA_KEYS, ExtraKeys, NoExtraKeys


class PromptChunk(NamedTuple):
    """Tokens of one request that a step computes, and the input parts that the step needs for them."""

    request: int  # index in the batch
    start: int
    end: int
    parts: list[InputPart]


class RowInputs:
    """The input parts of each row's request, as long as a later step needs them. A row that was released keeps its
    entry until it is taken again; no batch names it before."""

    def __init__(self) -> None:
        self._by_row: dict[int, list[InputPart]] = {}

    def admit(self, admission: Admission) -> None:
        self._by_row.pop(admission.row, None)
        self._keep(admission.row, admission.request.input_parts, admission.computed)

    def why_uncaptured(self, batch: ScheduledBatch) -> Uncaptured | None:
        """Why the step cannot be captured; None if it needs no input part."""
        return next((_need(part, chunk.start, chunk.end) for chunk in self.chunks(batch) for part in chunk.parts), None)

    def chunks(self, batch: ScheduledBatch) -> list[PromptChunk]:
        """The requests for which the step needs input parts. Until a prompt is computed its bounds are exact."""
        if not self._by_row:
            return []
        counts = zip(batch.rows, batch.bounds, batch.num_known, batch.num_drafts, strict=True)
        chunks = [PromptChunk(request, bound - known - drafts, bound, self._by_row[row])
                  for request, (row, bound, known, drafts) in enumerate(counts) if row in self._by_row]
        needed = [chunk._replace(parts=_needed(chunk.parts, chunk.start, chunk.end)) for chunk in chunks]
        return [chunk for chunk in needed if chunk.parts]

    def take(self, batch: ScheduledBatch) -> list[PromptChunk]:
        """The result of `chunks`, for a step that runs now. Parts that no later step needs are dropped."""
        taken = self.chunks(batch)
        for chunk in taken:
            row = batch.rows[chunk.request]
            self._keep(row, self._by_row.pop(row), chunk.end)
        return taken

    def _keep(self, row: int, parts: Sequence[InputPart], computed: int) -> None:
        """Keep the parts that are needed after so many computed tokens."""
        if left := _needed(parts, computed, sys.maxsize - 1):
            self._by_row[row] = left


def _needed(parts: Sequence[InputPart], start: int, end: int) -> list[InputPart]:
    return [part for part in parts if _need(part, start, end) is not None]


def _need(part: InputPart, start: int, end: int) -> Uncaptured | None:
    """What a step that computes the tokens [start, end) needs of the part, and no captured step has. A drafter reads
    the vector of the position after a token's own."""
    if any(part.two_way_ranges(start, end)):
        return Uncaptured.SPANS
    return None if part.vectors(start, end + 1) is None else Uncaptured.PROMPT_EMBEDS


def find_given_rows(chunks: Sequence[PromptChunk], query_lens: Sequence[int], device: torch.device, *,
                    ahead: int) -> GivenRows | None:
    """The vectors that replace embeddings in a step. query_lens: tokens of the batch's requests. ahead: how many
    positions the token rows are ahead of the step's token rows."""
    first_row = [0, *accumulate(query_lens)]
    found = [(vectors, first_row[chunk.request] - chunk.start - ahead) for chunk in chunks for part in chunk.parts
             if (vectors := part.vectors(chunk.start + ahead, chunk.end + ahead)) is not None]
    return GivenRows.try_build(found, device)


def find_extra_keys(chunks: Sequence[PromptChunk], query_lens: Sequence[int], num_tokens: int,
                    device: torch.device) -> ExtraKeys | NoExtraKeys:
    """The ranges of keys that tokens of a step see in addition. query_lens: tokens of the batch's requests.
    num_tokens: all of them, with padding."""
    ranges = [(chunk, start, end) for chunk in chunks for part in chunk.parts
              for start, end in part.two_way_ranges(chunk.start, chunk.end)]
    if not ranges:
        return NO_EXTRA_KEYS
    first_row = [0, *accumulate(query_lens)]
    starts, ends = [0] * num_tokens, [0] * num_tokens
    for chunk, start, end in ranges:
        row = first_row[chunk.request] + start - chunk.start
        starts[row : row + end - start] = [start] * (end - start)
        ends[row : row + end - start] = [end] * (end - start)
    return ExtraKeys(to_device(starts, torch.int64, device), to_device(ends, torch.int64, device))
