"""WorkerFeature: what a feature adds to a worker, which holds the device."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core import Limits
from outrider.core.background_work import NO_WORK, BackgroundWork
from outrider.drafters.base import Drafter
from outrider.drafters.observer import DraftObserver
from outrider.models.base import Model
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep


class WorkerFeature:
    """Methods do nothing unless a feature defines them."""

    name = "a feature"  # in messages
    edits_logits = False  # whether it edits the logits of every step (`DeviceStep.edit_logits`)

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        """The limits with the sizes of the feature's buffers (`Limits.parts`)."""
        return limits

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        """Called when the limits are known, before the first step is made."""
        return FeatureBytes()

    def observers(self) -> Sequence[DraftObserver]:
        """The observers of drafts that the feature adds. Called once, when the limits are known."""
        return ()

    def background(self) -> BackgroundWork:
        """The work that the feature does in the background of steps. Called once, when the limits are known."""
        return NO_WORK

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        """Add the feature's part to a step (`DeviceStep.add_part`, `take_deltas`, `edit_logits`). Called for every
        DeviceStep that is made: perhaps first one that only measures memory, then the one that serves."""
