"""RowInputs: keeps the input parts of each row's request (such as vectors that replace token embeddings), and picks the
parts that a step needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from outrider.core import Admission, ScheduledBatch, Uncaptured
from outrider.core.input_part import InputPart

if TYPE_CHECKING:
    from outrider.runner.input_encoder import InputEncoder


class PromptChunk(NamedTuple):
    """Tokens of one request that a step computes, and the input parts that the step needs for them."""

    request: int  # index in the batch
    start: int
    end: int
    parts: list[InputPart]


class KeptParts(NamedTuple):
    parts: list[InputPart]
    computed: int  # tokens before these; no later step computes them


class RowInputs:
    """The input parts of each row's request, kept until no later step needs them. The entry of a released row stays
    until the row is admitted again; no batch uses the row before that."""

    def __init__(self, encoders: dict[type[InputPart], InputEncoder] | None = None) -> None:
        """encoders: by the type of parts whose vectors they compute."""
        self._by_row: dict[int, KeptParts] = {}
        self.encoders = {} if encoders is None else encoders

    def admit(self, admission: Admission) -> None:
        self._by_row.pop(admission.row, None)
        self._keep(admission.row, admission.request.input_parts, admission.computed)

    def why_uncaptured(self, batch: ScheduledBatch) -> Uncaptured | None:
        """Return the reason why an input part keeps the step from being captured; None if the step needs no input
        part."""
        return next((_need(part, chunk.start, chunk.end) for chunk in self.chunks(batch) for part in chunk.parts), None)

    def chunks(self, batch: ScheduledBatch) -> list[PromptChunk]:
        """Return the tokens and input parts of the requests whose part the step needs. The host's length bounds can be
        used for this, because they are exact while a prompt is being computed."""
        if not self._by_row:
            return []
        counts = zip(batch.rows, batch.bounds, batch.num_known, batch.num_drafts, strict=True)
        chunks = [PromptChunk(request, bound - known - drafts, bound, self._by_row[row].parts)
                  for request, (row, bound, known, drafts) in enumerate(counts) if row in self._by_row]
        needed = [chunk._replace(parts=_needed(chunk.parts, chunk.start, chunk.end)) for chunk in chunks]
        return [chunk for chunk in needed if chunk.parts]

    def take(self, batch: ScheduledBatch) -> list[PromptChunk]:
        """Return the result of `chunks` for a step that is about to run, and drop the parts that no later step
        needs."""
        taken = self.chunks(batch)
        if taken and self.encoders:
            needed = [(part, kept.computed) for kept in self._by_row.values() for part in kept.parts]
            for encoder in self.encoders.values():
                encoder.expect(needed)
        for chunk in taken:
            row = batch.rows[chunk.request]
            self._keep(row, self._by_row.pop(row).parts, chunk.end)
        return taken

    def _keep(self, row: int, parts: Sequence[InputPart], computed: int) -> None:
        """Keep the row's parts that steps after its first `computed` tokens need."""
        if left := _needed(parts, computed, sys.maxsize - 1):
            self._by_row[row] = KeptParts(left, computed)


def _needed(parts: Sequence[InputPart], start: int, end: int) -> list[InputPart]:
    return [part for part in parts if _need(part, start, end) is not None]


def _need(part: InputPart, start: int, end: int) -> Uncaptured | None:
    """Return why a step over the tokens [start, end) that needs this input part cannot be captured; None if the step
    does not need the part. One more position is checked, because a drafter reads the vector of the next position."""
    if any(part.two_way_ranges(start, end)):
        return Uncaptured.SPANS
    has_vectors = part.vectors(start, end + 1) is not None or any(part.encoded_ranges(start, end + 1))
    return Uncaptured.PROMPT_EMBEDS if has_vectors or part.rope_positions(start, end) is not None else None
