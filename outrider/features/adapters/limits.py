"""AdapterLimits: the sizes of the device's adapter buffers: adapters, targets and factor elements. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core import Limits
from outrider.core.feature_parts import LimitsPart


@dataclass(frozen=True)
class AdapterLimits(LimitsPart):
    slots: int  # adapters on the device at once
    targets: int  # products that adapters may change
    numbers: int  # room for all adapters together

    @staticmethod
    def of(limits: Limits) -> AdapterLimits:
        part = limits.part(AdapterLimits)
        assert part is not None, "these limits have no room for adapters"
        return part
