"""LogitsPart: a feature's part of a step that edits logits before a token is chosen.

Its editor gets the logits between the stages of the torch sampler: no kernel samples then, and no step is captured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from outrider.core import ScheduledBatch, StepPart
from outrider.sample.extras import LogitEditor


class LogitsPart(StepPart):
    @abstractmethod
    def of_step(self, batch: ScheduledBatch, logit_counts: Sequence[int]) -> LogitEditor:
        """Make the editor for a step's logit rows, before the forward pass. logit_counts: the number of logit rows of
        each request."""
