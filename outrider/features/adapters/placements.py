"""AdapterPlacements: which adapters to copy to the device before a step, and where. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.feature_parts import BatchPart


class AdapterPlacement(NamedTuple):
    """An adapter that the device copies from the host's memory before a step."""

    number: int  # of its load
    slot: int
    offset: int  # where it begins in the arena


@dataclass(frozen=True, slots=True)
class AdapterPlacements(BatchPart):
    """The adapters to copy before one step. They are copied before rows are admitted, because admitted requests may use
    them."""

    placements: tuple[AdapterPlacement, ...]
