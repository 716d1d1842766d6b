"""A drafting pass takes its query starts from a buffer with one for each row, though padding can add more requests."""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.batches import SingleTokenView
from outrider.mixers.batch import BatchView, ExactQueries

NAME = "padded requests never outnumber rows"
TESTS = ["tests/drafters/test_f1.py::test_f1_padding_to_more_requests_than_there_are_rows"]


def apply() -> None:
    def within_rows(self: SingleTokenView, view: BatchView) -> BatchView:
        count = view.num_requests
        starts, starts_int32 = self._starts[: count + 1], self._starts_int32[: count + 1]
        return replace(view, num_tokens=count, queries=ExactQueries((1,) * count), query_starts=starts,
                       query_starts_int32=starts_int32, request_of=starts[:-1])

    SingleTokenView.cut = within_rows  # type: ignore[method-assign]
