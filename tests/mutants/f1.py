"""The assistant takes its page tables from the padded batch, beside lengths cut to the actual one (failure F1)."""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.base import Step
from outrider.drafters.batches import DraftingBatches, committed_requests, drafting_rows
from outrider.kernels import ops
from outrider.kernels.drafting import ReadingPass
from outrider.mixers.batch import BatchView

NAME = "page table of the padded batch"
TESTS = ["tests/drafters/test_f1.py"]


def apply() -> None:
    reading = DraftingBatches.reading

    def two_sizes(self: DraftingBatches, step: Step, _: ReadingPass) -> BatchView:
        actual = replace(step, batch=replace(step.batch, padded=step.batch.unpadded), **{
            name: getattr(step, name)[: step.batch.unpadded.num_requests]
            for name in ("computed_before", "num_computed", "goes_on")
        })
        cut = ops.plan_reading_pass(committed_requests(actual), drafting_rows(actual), num_wanted=step.num_wanted,
                                    max_len=self._max_len, behind=1)
        return replace(reading(self, actual, cut), page_tables=step.batch.padded.page_tables)

    DraftingBatches.reading = two_sizes  # type: ignore[method-assign]
