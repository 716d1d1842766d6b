"""Pause: why an engine runs no steps for now. `engine.maintenance` sets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str = ""  # for those who wait; empty while steps run
    sleep_level: int = 0  # 0 while awake
    before_requests: Callable[[], None] | None = None  # ends the pause, or refuses the requests that are added

    def admit_requests(self) -> None:
        """Called before requests are added."""
        if self.before_requests is not None:
            self.before_requests()

    @property
    def is_on(self) -> bool:
        return bool(self.reason)
