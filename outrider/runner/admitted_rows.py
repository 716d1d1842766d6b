"""FirstTokenRows: makes the batches of rows that were just admitted, for drafters. Imported for the first drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.core import Admission
from outrider.kernels.buffers import to_device
from outrider.layers import GivenRows
from outrider.mixers.batch import BatchView, ExactQueries, LengthBound
from outrider.runner.row_state import RowState
from outrider.runner.step_inputs import components_before, first_given_rows


def admitted_view(admissions: Sequence[Admission], state: RowState, *, pads: bool) -> BatchView:
    """Make a view with one token for each admitted row: the first token that the row is to compute. Its cache slots are
    -1, so nothing is written. pads: add dead rows up to a power of two, so that a few compiled kernels serve all
    numbers of rows."""
    count = len(admissions)
    padding = [0] * ((1 << (count - 1).bit_length()) - count) if pads else []
    fields = ([a.row for a in admissions], [a.computed for a in admissions], [1] * count)
    rows, begin, live = to_device([own + padding for own in fields], torch.int64, state.device)
    requests = torch.arange(rows.shape[0], device=state.device)
    starts = torch.arange(rows.shape[0] + 1, device=state.device)
    lengths = torch.where(live > 0, begin + 1, 0)
    return BatchView(
        num_requests=len(rows), num_tokens=len(rows), queries=ExactQueries((1,) * len(rows)),
        max_length=LengthBound(1 + max(a.computed for a in admissions)), rows=rows, query_starts=starts,
        lengths=lengths, live=live, query_starts_int32=starts.int(), lengths_int32=lengths.int(), live_int32=live.int(),
        token_ids=torch.where(live > 0, state.tokens[rows, begin], 0), positions=begin, request_of=requests,
        page_tables=tuple(table[rows] for table in state.page_tables),
        token_slots=(torch.full_like(rows, -1),) * len(state.page_tables),
    )


class FirstTokenRows:
    """Makes the batch of the first token that each admitted row computes, with the vectors that replace embeddings."""

    def __init__(self, state: RowState) -> None:
        self._state = state

    def __call__(self, admissions: Sequence[Admission]) -> BatchView:
        return admitted_view(admissions, self._state, pads=self._state.device.type == "cuda")

    def given_rows(self, admissions: Sequence[Admission]) -> GivenRows | None:
        """Return the vectors that replace these tokens' embeddings; None if all tokens use their ids."""
        if not any(own.request.input_parts for own in admissions):
            return None
        return first_given_rows(admissions, self._state)

    def components_before(self, admissions: Sequence[Admission]) -> torch.Tensor | None:
        if not any(own.request.input_parts for own in admissions):
            return None
        return components_before(admissions, self(admissions).num_requests, self._state.device)


def dead_view(view: BatchView) -> BatchView:
    """Copy the view with no token live, so that it changes nothing."""
    nothing = torch.zeros_like(view.live)
    return replace(view, live=nothing, lengths=nothing, live_int32=nothing.int(), lengths_int32=nothing.int())


class DeadFirstRows(FirstTokenRows):
    """Makes such batches for warm-up, with no token live, so that they change nothing."""

    def __call__(self, admissions: Sequence[Admission]) -> BatchView:
        return dead_view(super().__call__(admissions))
