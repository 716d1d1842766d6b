"""WorkerFeature: what a feature adds to a worker, which holds the device."""

from __future__ import annotations

from outrider.core import Limits
from outrider.models.base import Model
from outrider.runner.step import DeviceStep


class WorkerFeature:
    """Methods do nothing unless a feature defines them."""

    name = "a feature"  # in messages
    edits_logits = False  # whether it edits the logits of every step (`DeviceStep.edit_logits`)

    def limit(self, limits: Limits, model: Model) -> Limits:
        """The limits with the sizes of the feature's buffers (`Limits.parts`)."""
        return limits

    def num_bytes(self, limits: Limits, model: Model) -> int:
        """Device memory that the feature's buffers take, which no pages may have."""
        return 0

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        """Add the feature's part to a step (`DeviceStep.add_part`, `take_deltas`, `edit_logits`). Called for every step
        that is made: perhaps one to measure memory with, then the one that serves."""
