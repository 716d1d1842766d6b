"""F2: the Gemma 4 assistant is given the longest length there may be as its bound."""

from __future__ import annotations

from dataclasses import replace

from outrider.drafters.base import Step
from outrider.drafters.batches import DraftingBatches
from outrider.kernels.drafting import ReadingPass
from outrider.mixers.batch import BatchView, LengthBound

NAME = "f2: the assistant is bounded by max_model_len"
TESTS = [
    "tests/drafters/test_f2_bounds.py::test_f2_hybrids_latent_layers_and_the_assistant_are_bounded_by_the_batch[gemma4_assistant]",
]


def apply() -> None:
    reading = DraftingBatches.reading

    def unbounded(self: DraftingBatches, step: Step, only: ReadingPass) -> BatchView:
        return replace(reading(self, step, only), max_length=LengthBound(self._max_len))

    DraftingBatches.reading = unbounded  # type: ignore[method-assign]
