"""Pause: why an engine runs no steps for now. `engine.maintenance` sets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str = ""  # for those who wait; empty while steps run
    sleep_level: int = 0  # 0 while awake

    @property
    def is_on(self) -> bool:
        return bool(self.reason)
