"""LogitsPart: the part of a step with which a feature edits logits before a token is chosen.

Its editor is called between the stages of the torch sampler. Such a step uses no sampler kernels and is not captured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from outrider.core import ScheduledBatch, StepPart
from outrider.sample.extras import LogitEditor


class LogitsPart(StepPart):
    @abstractmethod
    def of_step(self, batch: ScheduledBatch, logit_counts: Sequence[int]) -> LogitEditor:
        """Make the editor for the logit rows of a step; called before the forward pass. logit_counts: the number of
        logit rows of each request."""
