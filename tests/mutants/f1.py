"""The assistant takes its page tables from the padded batch, beside lengths cut to the actual one (failure F1)."""

from __future__ import annotations

from dataclasses import replace

from outrider.mixers.batch import BatchView
from outrider.spec.base import Step
from outrider.spec.gemma_assistant import AssistantDrafter
from outrider.spec.views import Reading, reading_pass

NAME = "page table of the padded batch"
TESTS = ["tests/spec/test_f1.py"]


def apply() -> None:
    view = AssistantDrafter.view

    def two_sizes(self: AssistantDrafter, step: Step, _: Reading) -> BatchView:
        actual = replace(step, batch=replace(step.batch, padded=step.batch.unpadded), **{
            name: getattr(step, name)[: step.batch.unpadded.num_requests]
            for name in ("computed_before", "num_computed", "guesses")
        })  # fmt: skip
        cut = reading_pass(actual, self._max_len, self._behind)
        return replace(view(self, actual, cut), page_tables=step.batch.padded.page_tables)

    AssistantDrafter.view = two_sizes  # type: ignore[method-assign]
