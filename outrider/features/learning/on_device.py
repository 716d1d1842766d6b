"""LearningOnDevice: the worker's part of a drafter that learns while it serves. It makes the learner, and reports the
memory that the learner needs."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.background_work import BackgroundWork
from outrider.drafters.base import Drafter
from outrider.drafters.observer import DraftObserver
from outrider.features.learning import learner as learning
from outrider.features.learning.served_head import ServedHead
from outrider.models.base import Model
from outrider.runner.memory import FeatureBytes
from outrider.runner.worker_feature import WorkerFeature


class LearningOnDevice(WorkerFeature):
    name = "drafter that learns"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._learner: learning.DrafterLearner | None = None

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        served = ServedHead.from_drafter(drafter, self._config.packed_weights)
        num_tokens, segment_tokens = learning.count_served_tokens(served, self._config.adapt_memory_bytes,
                                                                  limits.max_len)
        settings = learning.LearningSettings.for_head(served.head.hidden_size, self._config.adapt_share)
        self._learner = learning.DrafterLearner(served, limits, settings, num_tokens, segment_tokens)
        return limits

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        """The device memory that the trainer will take later. The record of served texts is allocated already and is
        not counted here."""
        return FeatureBytes(later=self._made.measure_memory())

    def observers(self) -> Sequence[DraftObserver]:
        return (self._made,)

    def background(self) -> BackgroundWork:
        return self._made

    @property
    def _made(self) -> learning.DrafterLearner:
        assert self._learner is not None, "limits come first"
        return self._learner
