"""ErrandAnswers: tells callers when every rank has done an errand. No torch.

An errand (`runner/commands.py`) is work that a worker does beside its steps, such as reading files. Every rank does it
and sends an answer. The caller gets a future that completes with the last answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from outrider.engine.worker_messages import ErrandDone


@dataclass
class _Begun:
    done: Future[None]
    num_left: int  # ranks that have not answered
    error: str | None = None


class ErrandAnswers:
    """Counts the ranks' answers to each errand, and completes the errand's future when every rank has answered. May be
    used by several threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._numbers = count()
        self._begun: dict[int, _Begun] = {}

    def add(self) -> tuple[int, Future[None]]:
        """Register a new errand. Returns its number and a future, which completes when every rank has done the errand,
        and raises ValueError if a rank could not."""
        done: Future[None] = Future()
        with self._lock:
            number = next(self._numbers)
            self._begun[number] = _Begun(done, self._num_ranks)
        return number, done

    def take(self, answer: ErrandDone) -> None:
        with self._lock:
            own = self._begun.get(answer.number)
            if own is None:
                return
            own.num_left -= 1
            own.error = own.error or answer.error
            if own.num_left:
                return
            del self._begun[answer.number]
        with suppress(InvalidStateError):  # given up
            if own.error is None:
                own.done.set_result(None)
            else:
                own.done.set_exception(ValueError(own.error))

    def fail_all(self, error: BaseException) -> None:
        """Give the error to the futures of all errands that are not done, because the ranks have ended and will not
        answer."""
        with self._lock:
            left, self._begun = list(self._begun.values()), {}
        for own in left:
            with suppress(InvalidStateError):
                own.done.set_exception(error)
