"""AdapterPlacements: the adapters that the device must have before a step. No torch."""

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
    """The placements of one step. They are carried out before rows are admitted, because admitted requests may have
    these adapters."""

    placements: tuple[AdapterPlacement, ...]
