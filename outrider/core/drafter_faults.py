"""FaultRecord: counts and logs the faults of one drafter, and switches the drafter off after too many.

A drafter may be code of a user: it may raise, or return anything. No fault of a drafter changes the text or ends a
request. The drafts of that step are lost, the log names the drafter, and after MAX_DRAFTER_FAULTS faults the engine
goes on without the drafter."""

from __future__ import annotations

import enum
import logging
import threading
from dataclasses import dataclass

from outrider.core.foreign_text import on_one_line, printable

MAX_DRAFTER_FAULTS = 3  # faults after which a drafter is switched off for the rest of the engine's life
MAX_MESSAGE = 300  # characters of an exception's own message
log = logging.getLogger("outrider")


class FaultKind(enum.Enum):
    """The kinds of a drafter's faults; the values are labels of metrics."""

    RAISED = "raised"
    FORM = "form"
    COUNT = "count"
    TOKEN = "token"
    WROTE = "wrote"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    FaultKind.RAISED: "correct the drafter, or leave it out of speculative_config",
    FaultKind.FORM: "return Drafts(tokens, counts) as docs/drafters.md says",
    FaultKind.COUNT: "return counts from 0 to step.num_wanted",
    FaultKind.TOKEN: "return token ids of the target's vocabulary",
    FaultKind.WROTE: "a drafter must only read the tensors of a step; clone what you want to change",
}


@dataclass(frozen=True, slots=True)
class DrafterFault:
    """One fault, as it is sent from the code that runs the drafter to the engine's statistics."""

    drafter: str  # its name and class
    kind: FaultKind
    message: str  # what the drafter returned or raised
    switches_off: bool  # whether the drafter is off from this fault on


def words_of(error: BaseException) -> str:
    """Describe an exception by its type and message on one line, for logs, statistics and metrics. The message is cut
    to MAX_MESSAGE characters. An exception whose message cannot be made is described too."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    message = on_one_line(message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "...")
    return f"{type(error).__name__}: {message}"


class FaultRecord:
    """The faults of one drafter. May be used by several threads: on CUDA one thread queues steps and another reads
    their results."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self._kinds: set[FaultKind] = set()  # kinds that were logged
        self._num_faults = 0
        self._is_off = False
        self._news: list[DrafterFault] = []
        self._lock = threading.Lock()

    @classmethod
    def for_drafter(cls, drafter: object) -> FaultRecord:
        """A record that shows the drafter's name, if it has one, and its class."""
        kind, name = type(drafter), getattr(drafter, "name", None)
        path = f"{kind.__module__}:{kind.__qualname__}"
        return cls(on_one_line(f"{name} ({path})" if isinstance(name, str) else path))

    @property
    def is_off(self) -> bool:
        return self._is_off

    def add(self, kind: FaultKind, message: str, *, trace: str = "", at_once: bool = False) -> None:
        """Note a fault. trace: the trace of an exception, for the log. at_once: whether this single fault switches the
        drafter off."""
        with self._lock:
            if self._is_off:  # steps in flight may bring more of the same
                return
            self._num_faults += 1
            self._is_off = at_once or self._num_faults >= MAX_DRAFTER_FAULTS
            is_new = kind not in self._kinds
            self._kinds.add(kind)
            self._news.append(DrafterFault(self.drafter, kind, message, self._is_off))
        if is_new:
            log.warning("drafter %s: %s. Its drafts of this step are dropped; the text does not change. What to do: "
                        "%s.%s", self.drafter, message, kind.advice, f"\n{printable(trace)}" if trace else "")
        if self._is_off:
            log.warning("drafter %s is switched off for the rest of this engine's life after %d fault%s, the last: %s",
                        self.drafter, self._num_faults, "s" * (self._num_faults > 1), message)

    def take(self) -> list[DrafterFault]:
        """Return the faults that were added since the last call."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, []
        return news
