"""WorkerFeature: the part of a feature that runs in a worker, next to the device. LateFeatures: the features that are
made when a request first asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from outrider.config import EngineConfig
from outrider.core import Limits
from outrider.core.background_work import NO_WORK, BackgroundWork
from outrider.drafters.base import Drafter
from outrider.feature_list import worker_half
from outrider.models.base import Model
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep

if TYPE_CHECKING:
    from outrider.drafters.observer import DraftObserver


class WorkerFeature:
    """The part of a feature that runs in the worker. A method does nothing unless the feature defines it. If the
    feature is one that requests ask for, only `attach` is called."""

    name = "a feature"  # in messages
    is_captured = True  # whether its work in steps can be part of a graph
    edits_logits = False  # whether it edits the logits of every step (`DeviceStep.edit_logits`)

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        """Return the limits with the sizes of the feature's buffers added (`Limits.parts`)."""
        return limits

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        """Return the device memory that the feature takes. Called when the limits are known, before the first step is
        made."""
        return FeatureBytes()

    def observers(self) -> Sequence[DraftObserver]:
        """Return the feature's observers of drafts. Called once, when the limits are known."""
        return ()

    def background(self) -> BackgroundWork:
        """Return the work that the feature does in the background while steps run. Called once, when the limits are
        known."""
        return NO_WORK

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        """Add the feature's part to a step (`DeviceStep.add_part`, `take_deltas`, `edit_logits`). Called for every
        DeviceStep that is made: the one that serves, and perhaps before it one that only measures memory."""


class StepLine(Protocol):
    """The part of a runner that runs other work in order with the steps."""

    def in_order(self, work: Callable[[], None], /) -> Future[None]: ...


class LateFeatures:
    """The worker's parts of features that requests ask for by a parameter. Each is made when the first such request
    comes, so that an engine without such requests loads none of the code. Several threads may use it."""

    def __init__(self, config: EngineConfig, step: DeviceStep, limits: Limits, line: StepLine) -> None:
        self._config, self._step, self._limits, self._line = config, step, limits, line
        self._lock = threading.RLock()  # a trace function may raise where `with` ends, before the release
        self._made: dict[str, WorkerFeature] = {}

    def need(self, name: str) -> WorkerFeature:
        """Return the worker's part of this feature; the first call makes it. Every step that is submitted afterwards
        includes it."""
        with self._lock:
            if name not in self._made:
                self.put(name, worker_half(name)(self._config))
            return self._made[name]

    def put(self, name: str, feature: WorkerFeature) -> None:
        self._line.in_order(lambda: feature.attach(self._step, self._step.model, self._limits))
        self._made[name] = feature
