"""RowInputs: the input parts of the rows' requests, and what a step takes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from outrider.core import Admission, ScheduledBatch, Uncaptured
from outrider.core.input_part import InputPart
from outrider.layers import GivenRows


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
        reasons = (part.why_uncaptured(chunk.start, chunk.end) for chunk in self.chunks(batch) for part in chunk.parts)
        return next(reasons, None)

    def chunks(self, batch: ScheduledBatch) -> list[PromptChunk]:
        """The requests for which the step needs input parts. Until a prompt is computed its bounds are exact."""
        if not self._by_row:
            return []
        counts = zip(batch.rows, batch.bounds, batch.num_known, batch.num_drafts, strict=True)
        chunks = [PromptChunk(request, bound - known - drafts, bound, self._by_row.get(row, []))
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
    return [part for part in parts if part.why_uncaptured(start, end) is not None]


def find_given_rows(chunks: Sequence[PromptChunk], query_lens: Sequence[int], device: torch.device, *,
               ahead: int) -> GivenRows | None:
    """The vectors that replace embeddings in a step. query_lens: tokens of the batch's requests. ahead: how many
    positions the token rows are ahead of the step's token rows."""
    first_row = [0, *accumulate(query_lens)]
    found = [(vectors, first_row[chunk.request] - chunk.start - ahead) for chunk in chunks for part in chunk.parts
             if (vectors := part.vectors(chunk.start + ahead, chunk.end + ahead)) is not None]
    return GivenRows.try_build(found, device)
