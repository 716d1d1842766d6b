"""Pause: the reason why an engine runs no steps for now. PauseMode: what happens to running requests.
`engine.maintenance` sets both.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from outrider.core.fields import shown


class PauseMode(enum.Enum):
    """What `pause_generation` does with the requests that run."""

    ABORT = "they end with the tokens that they have"
    WAIT = "they run to their ends first"
    RECOMPUTE = "they stay; after an update of weights their tokens are computed again"
    IN_PLACE = "they stay, and go on with their pages and states after an update of weights too"

    @classmethod
    def from_names(cls, mode: str, clear_cache: bool) -> PauseMode:
        """Return the mode for vLLM's names of it."""
        match mode:
            case "abort":
                return cls.ABORT
            case "wait":
                return cls.WAIT
            case "keep":
                return cls.RECOMPUTE if clear_cache else cls.IN_PLACE
        raise ValueError(f"mode must be 'abort', 'wait' or 'keep', got {shown(mode)}")


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str = ""  # for those who wait; empty while steps run
    sleep_level: int = 0  # 0 while awake
    before_requests: Callable[[], None] | None = None  # ends the pause, or refuses the requests that are added
    is_coming: bool = False  # steps run until no request is left; who adds a request waits until then

    def admit_requests(self) -> None:
        """End the pause, or refuse the requests, before requests are added."""
        if self.before_requests is not None:
            self.before_requests()

    @property
    def is_on(self) -> bool:
        return bool(self.reason)
