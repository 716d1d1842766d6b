"""Pause: the reason why an engine runs no steps for now. PauseMode: what happens to running requests. PauseWait: a
call that pauses the engine as soon as its requests have ended. `engine.maintenance` sets all three.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sized
from dataclasses import dataclass

from outrider.core.fields import shown

COMING = "the engine pauses as soon as its requests have ended: other requests wait for resume_generation"


class PauseMode(enum.Enum):
    """The treatment of running requests by `pause_generation`."""

    ABORT = "they end with the tokens that they have"
    WAIT = "they run to their ends first"
    RECOMPUTE = "they stay; after an update of weights their tokens are computed again"
    IN_PLACE = "they stay, and go on with their pages and states after an update of weights too"

    @classmethod
    def from_names(cls, mode: str, clear_cache: bool) -> PauseMode:
        """Return the mode that vLLM's arguments `mode` and `clear_cache` ask for."""
        match mode:
            case "abort":
                return cls.ABORT
            case "wait":
                return cls.WAIT
            case "keep":
                return cls.RECOMPUTE if clear_cache else cls.IN_PLACE
        raise ValueError(f"mode must be 'abort', 'wait' or 'keep', got {shown(mode)}")


class PauseWait:
    """A call of `pause_generation` with mode="wait" that has not paused the engine yet. The engine refers to it only
    weakly, so a call that was interrupted on any line holds back no request."""

    def __init__(self, clears_cache: bool) -> None:
        self.clears_cache = clears_cache
        self.is_met = False  # the engine was paused when all requests had ended
        self.failure = ""  # why the requests will not run to their ends

    def check(self) -> None:
        """Raise ValueError if the call has failed."""
        if self.failure:
            raise ValueError(f"pause_generation: {self.failure}")


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str = ""  # for those who wait; empty while steps run
    sleep_level: int = 0  # 0 while awake
    before_requests: Callable[[], None] | None = None  # ends the pause, or refuses the requests that are added
    waits: Sized = ()  # calls that pause the engine when no request is left; requests are added after that

    def admit_requests(self) -> None:
        """Called before requests are added. Ends the pause, or raises the error that refuses the requests."""
        if self.before_requests is not None:
            self.before_requests()

    @property
    def is_on(self) -> bool:
        return bool(self.reason)

    @property
    def is_coming(self) -> bool:
        return len(self.waits) > 0

    @property
    def why_requests_wait(self) -> str:
        """Return the reason why requests that arrive now must wait; empty if they need not wait."""
        return self.reason or (COMING if self.is_coming else "")
