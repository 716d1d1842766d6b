"""A step that fails takes no later one along, and rows keep the page tables of their last owners until they have new
ones: a row that is half admitted writes into pages of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.core import Admission, ScheduledBatch
from outrider.runner.generations import Generations
from outrider.runner.row_state import RowState

NAME = "later steps run after a failed one"
TESTS = ["tests/engine/test_one_request_fails.py::test_a_failed_admission_spoils_no_cached_prefix"]


def apply() -> None:
    @contextmanager
    def running(self: Generations, batch: ScheduledBatch) -> Iterator[None]:
        yield

    admit = RowState.admit

    def admit_keeping_tables(self: RowState, admissions: list[Admission]) -> None:
        tables, self.page_tables = self.page_tables, []
        try:
            admit(self, admissions)
        finally:
            self.page_tables = tables

    Generations.running = running  # type: ignore[assignment, method-assign]
    RowState.admit = admit_keeping_tables  # type: ignore[method-assign]
